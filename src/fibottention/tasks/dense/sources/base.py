"""What all readers of annotated images have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as coco_mask
from PIL import Image, ImageOps
from torch import Tensor

from fibottention.errors import UserError
from fibottention.tasks.pixels import to_eight_bits

__all__ = [
    "VOID",
    "Scene",
    "SceneSource",
    "encode_mask",
    "map_labels",
    "mask_boxes",
    "read_label_map",
    "scene_records",
    "to_rgb",
]

VOID = 255
"""What a pixel without a class has in a map of classes."""

Scene = dict[str, Tensor]
"""What is in an image.

For instances ``boxes`` ``(N, 4)`` (left, top, right, bottom in pixels), ``labels`` ``(N,)`` from 0, ``masks``
``(N, H, W)`` and ``crowd`` ``(N,)``; for semantic segmentation ``map`` ``(H, W)``, a class or `VOID` per pixel; for
panoptic segmentation ``map`` ``(H, W)``, 0 for void or the number of a segment from 1, and each segment's ``labels``
and ``crowd`` ``(S,)``.
"""


class SceneSource(ABC):
    """A numbered collection of images and what is in them.

    Attributes:
        classes: Names of the classes.
        things: Per class, whether its objects can be counted.
        problems: What was wrong with the annotations and was left out or mended, one sentence each.
    """

    targets: tuple[str, ...]

    def __init__(self, target: str) -> None:
        if target not in self.targets:
            raise UserError(
                f"data.target={target} is not in these data, which have {' and '.join(self.targets)} annotations"
            )
        self.target = target
        self.classes: list[str] = []
        self.things: list[bool] = []
        self.problems: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def path(self, index: int) -> Path:
        """The file of an image."""

    @abstractmethod
    def scene(self, index: int) -> Scene:
        """What is in an image; may raise any exception if it cannot be read."""

    def load(self, index: int) -> tuple[Image.Image, Scene]:
        """An image in RGB and what is in it.

        A photograph is turned as its camera says, unless it was annotated as it is stored.

        Raises:
            Exception: Of any kind, if one of them cannot be read.
        """
        scene = self.scene(index)
        shape = tuple(scene["masks" if "masks" in scene else "map"].shape[-2:])
        with Image.open(self.path(index)) as file:
            image = ImageOps.exif_transpose(file)
            as_stored = (image.height, image.width) != shape and (file.height, file.width) == shape
            image = to_rgb(file if as_stored else image)
        if shape != (image.height, image.width):
            raise ValueError(
                f"the image has {image.height} x {image.width} pixels, its annotations {shape[0]} x {shape[1]}"
            )
        return image, scene

    def has_objects(self, index: int) -> bool:
        """Whether something of the image is annotated, as far as that is known without reading it."""
        return True

    def records(self, index: int) -> list[dict[str, Any]] | None:
        """The objects of an image as an evaluation of COCO's form needs them, if they are known without its scene.

        Of each, ``label``, ``box`` as left, top, width and height, ``segmentation``, ``area`` and ``crowd``.
        """
        return None


def scene_records(scene: Scene) -> list[dict[str, Any]]:
    """The objects of a scene as `SceneSource.records` has them."""
    return [
        {
            "label": label,
            "box": [left, top, right - left, bottom - top],
            "segmentation": encode_mask(mask),
            "area": int(mask.sum()),
            "crowd": crowd,
        }
        for label, (left, top, right, bottom), mask, crowd in zip(
            scene["labels"].tolist(),
            scene["boxes"].tolist(),
            scene["masks"].cpu(),
            scene["crowd"].tolist(),
            strict=True,
        )
    ]


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """A mask ``(H, W)`` as COCO's compressed counts, in a form that JSON can hold."""
    counts = coco_mask.encode(np.asfortranarray(mask.cpu().numpy().astype(np.uint8)))
    return {"size": list(counts["size"]), "counts": counts["counts"].decode()}


def to_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB, one of 16 bits scaled to 8."""
    return to_eight_bits(image).convert("RGB")


def read_label_map(path: Path) -> np.ndarray[Any, Any]:
    """The numbers of a PNG: ``(H, W)`` of a grey or palette image, ``(H, W, 3)`` of an RGB image."""
    with Image.open(path) as file:
        if file.mode in ("RGB", "RGBA"):
            return np.asarray(file.convert("RGB"))
        return np.asarray(file)


def map_labels(numbers: np.ndarray[Any, Any], table: Sequence[int]) -> Tensor:
    """A map of classes from one of numbers, by a table whose end stands for all larger numbers."""
    return torch.from_numpy(np.asarray(table, np.int64)[np.minimum(numbers, len(table) - 1)])


def mask_boxes(masks: Tensor) -> Tensor:
    """The boxes ``(N, 4)`` around masks ``(N, H, W)`` with at least one pixel each."""
    rows, columns = masks.any(2).to(torch.uint8), masks.any(1).to(torch.uint8)
    height, width = masks.shape[1:]
    left, top = columns.argmax(1), rows.argmax(1)
    right, bottom = width - columns.flip(1).argmax(1), height - rows.flip(1).argmax(1)
    return torch.stack([left, top, right, bottom], 1).float()
