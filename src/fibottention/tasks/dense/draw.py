"""Predictions drawn into their images, and as JSON."""

import colorsys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from fibottention.tasks.dense.heads import Prediction
from fibottention.tasks.dense.sources.base import encode_mask

__all__ = ["class_colors", "draw_prediction", "prediction_to_dict"]

_GOLDEN = 0.618034  # of a turn: colours of classes that follow each other differ


def class_colors(count: int) -> list[tuple[int, int, int]]:
    """A colour per class, in RGB."""
    colors = []
    for number in range(count):
        value = 0.95 - 0.2 * (number // 8 % 3)
        red, green, blue = colorsys.hsv_to_rgb(number * _GOLDEN % 1, 0.75, value)
        colors.append((round(255 * red), round(255 * green), round(255 * blue)))
    return colors


def draw_prediction(image: Tensor, prediction: Prediction, classes: Sequence[str], threshold: float = 0.5) -> Tensor:
    """An image ``(3, H, W)`` of uint8 with the objects, segments or classes that were found in it.

    Args:
        image: The image.
        prediction: What was found, at the size of the image.
        classes: Names of the classes.
        threshold: Smallest score of an object that is drawn.
    """
    colors = class_colors(len(classes))
    if "boxes" in prediction:
        kept = prediction["scores"] >= threshold
        if not kept.any():
            return image
        labels, scores = prediction["labels"][kept].tolist(), prediction["scores"][kept].tolist()
        of_object = [colors[label] for label in labels]
        for place in prediction["scores"][kept].argsort().tolist():
            # One by one, since torchvision blackens what several share; the surest is the last.
            mask = prediction["masks"][kept][place]
            image = draw_segmentation_masks(image, mask, alpha=0.5, colors=of_object[place])
        texts = [f"{classes[label]} {score:.0%}" for label, score in zip(labels, scores, strict=True)]
        return draw_bounding_boxes(image, prediction["boxes"][kept], texts, colors=of_object, width=1)
    if "labels" not in prediction:
        present = prediction["map"].unique().tolist()
        masks = torch.stack([prediction["map"] == label for label in present])
        return draw_segmentation_masks(image, masks, alpha=0.6, colors=[colors[label] for label in present])
    labels = prediction["labels"].tolist()
    if not labels:
        return image
    masks = torch.stack([prediction["map"] == number for number in range(1, len(labels) + 1)])
    image = draw_segmentation_masks(image, masks, alpha=0.5, colors=[colors[label] for label in labels])
    border = _borders(prediction["map"])
    image[:, border] = 255
    return image


def _borders(numbers: Tensor) -> Tensor:
    """Pixels whose right or lower neighbour is of another segment."""
    border = torch.zeros_like(numbers, dtype=torch.bool)
    border[:, :-1] |= numbers[:, :-1] != numbers[:, 1:]
    border[:-1] |= numbers[:-1] != numbers[1:]
    return border


def prediction_to_dict(prediction: Prediction, classes: Sequence[str], threshold: float = 0.5) -> dict[str, Any]:
    """A prediction as plain data: masks in COCO's compressed form, boxes as left, top, width and height.

    Args:
        prediction: What was found.
        classes: Names of the classes.
        threshold: Smallest score of an object.
    """
    if "labels" not in prediction:
        pixels = prediction["map"]
        shares = torch.bincount(pixels.flatten(), minlength=len(classes)) / pixels.numel()
        segments = [
            {"class": classes[label], "share": share, "mask": encode_mask(pixels == label)}
            for label, share in enumerate(shares.tolist())
            if share
        ]
        return {"classes": segments}
    entries = []
    for place, (label, score) in enumerate(
        zip(prediction["labels"].tolist(), prediction["scores"].tolist(), strict=True)
    ):
        entry: dict[str, Any] = {"class": classes[label], "score": score}
        if "boxes" in prediction:
            if score < threshold:
                continue
            left, top, right, bottom = prediction["boxes"][place].tolist()
            entry["box"] = [left, top, right - left, bottom - top]
            entry["mask"] = encode_mask(prediction["masks"][place])
        else:
            entry["mask"] = encode_mask(prediction["map"] == place + 1)
        entries.append(entry)
    return {"objects" if "boxes" in prediction else "segments": entries}
