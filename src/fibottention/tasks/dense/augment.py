"""Images and what is in them, resized, cropped and flipped together."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.sources.base import VOID, Scene, mask_boxes

__all__ = ["TrainTransform", "fitted", "to_pixels"]

_MEAN_COLOR = [124, 116, 104]
_FIRST_SIZES = (400, 500, 600)  # DETR's, before its crop of 384 .. 600 pixels a side
_FIRST_CROP = (384, 600)
_CROPS = 10  # that are tried for one without a class that fills it

_Items = dict[str, Tensor]


def fitted(height: int, width: int, shorter: float, longest: float) -> tuple[int, int]:
    """Height and width of an image whose shorter side gets a length, unless the longer one would get too long."""
    scale = min(shorter / min(height, width), longest / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def to_pixels(sample: tuple[Image.Image, Scene]) -> tuple[Tensor, Scene]:
    """From an image to its pixels ``(3, H, W)`` of uint8; what is in it stays as it is."""
    return F.pil_to_tensor(sample[0]), sample[1]


class _Distort(v2.RandomPhotometricDistort):
    """Brightness, contrast, saturation and hue, without torchvision's permutation of the colours."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {**super().make_params(flat_inputs), "channel_permutation": None}


class TrainTransform:
    """Images for training, drawn anew each time; crowds and what was cropped away are left out.

    Args:
        config: All options.
    """

    def __init__(self, config: DenseConfig) -> None:
        self.options, self.max_size = config.augment, config.data.max_size
        self.void = VOID if config.data.target == "semantic" else 0
        self.distort = _Distort(p=0.5) if config.augment.color else None

    def __call__(self, sample: tuple[Image.Image, Scene]) -> tuple[Tensor, Scene]:
        """From an image to pixels ``(3, H, W)`` of uint8, what is in it changed as the image is."""
        options = self.options
        items = _to_items(*sample)
        cropped = options.crop is not None
        if options.crop_first and torch.rand(()) < 0.5:
            items, cropped = _cropped_first(items, self.max_size), True
        if options.jitter is not None and options.crop is not None:
            low, high = options.jitter
            factor = float(torch.empty(()).uniform_(low, high))
            height, width = items["image"].shape[-2:]
            scale = factor * min(options.crop[0] / height, options.crop[1] / width)
            items = _resized(items, (max(1, round(height * scale)), max(1, round(width * scale))))
        else:
            size = options.sizes[int(torch.randint(len(options.sizes), ()))]
            height, width = items["image"].shape[-2:]
            items = _resized(items, fitted(height, width, size, self.max_size))
        if options.crop is not None:
            items = self._crop(items, options.crop)
        if torch.rand(()) < options.flip:
            items = {name: F.horizontal_flip(item) for name, item in items.items()}
        if self.distort is not None:
            items["image"] = self.distort(items["image"])
        return items["image"].as_subclass(Tensor), _to_scene(items, sample[1], cropped)

    def _crop(self, items: _Items, size: tuple[int, int]) -> _Items:
        """A random part of a size, padded to it at the right and at the bottom."""
        height, width = items["image"].shape[-2:]
        high, wide = min(size[0], height), min(size[1], width)
        part = items
        for _ in range(_CROPS):
            top, left = (int(torch.randint(room + 1, ())) for room in (height - high, width - wide))
            part = _part(items, top, left, high, wide)
            if self.options.max_class_share == 1:
                break
            counts = torch.bincount(part["map"].flatten())[:VOID]
            if counts.count_nonzero() > 1 and counts.max() < self.options.max_class_share * counts.sum():
                break
        return _padded(part, size, self.void)


def _to_items(image: Image.Image, scene: Scene) -> _Items:
    pixels = tv_tensors.Image(F.pil_to_tensor(image))
    items: _Items = {"image": pixels}
    if "map" in scene:
        items["map"] = tv_tensors.Mask(scene["map"][None].to(torch.int32))
    else:
        kept = ~scene["crowd"]
        box_class: Any = tv_tensors.BoundingBoxes
        canvas = (image.height, image.width)
        items["boxes"] = box_class(scene["boxes"][kept], format="XYXY", canvas_size=canvas)
        items["masks"] = tv_tensors.Mask(scene["masks"][kept].to(torch.uint8))
    return items


def _to_scene(items: _Items, scene: Scene, cropped: bool) -> Scene:
    """What is left after the transforms."""
    items = {name: item.as_subclass(Tensor) for name, item in items.items()}
    if "labels" not in scene:
        return {"map": items["map"][0].long()}
    if "map" in items:
        return {"map": items["map"][0].long(), "labels": scene["labels"], "crowd": scene["crowd"]}
    boxes, masks = items["boxes"], items["masks"].bool()
    kept = masks.flatten(1).any(1) & ((boxes[:, 2:] - boxes[:, :2]).amin(1) > 0)
    masks = masks[kept]
    labels = scene["labels"][~scene["crowd"]][kept]
    boxes = mask_boxes(masks) if cropped else boxes[kept]
    return {"boxes": boxes, "labels": labels, "masks": masks, "crowd": torch.zeros(len(labels), dtype=torch.bool)}


def _resized(items: _Items, size: tuple[int, int]) -> _Items:
    return {name: F.resize(item, list(size)) for name, item in items.items()}


def _part(items: _Items, top: int, left: int, height: int, width: int) -> _Items:
    return {name: F.crop(item, top, left, height, width) for name, item in items.items()}


def _padded(items: _Items, size: tuple[int, int], void: int) -> _Items:
    height, width = items["image"].shape[-2:]
    right, bottom = size[1] - width, size[0] - height
    if not right and not bottom:
        return items
    fills = {"image": _MEAN_COLOR, "map": void}
    return {name: F.pad(item, [0, 0, right, bottom], fill=fills.get(name, 0)) for name, item in items.items()}


def _cropped_first(items: _Items, max_size: int) -> _Items:
    shorter = _FIRST_SIZES[int(torch.randint(len(_FIRST_SIZES), ()))]
    height, width = items["image"].shape[-2:]
    height, width = fitted(height, width, shorter, max_size)
    items = _resized(items, (height, width))
    low, high = _FIRST_CROP
    sides = [int(torch.randint(min(low, side), min(high, side) + 1, ())) for side in (height, width)]
    top = int(torch.randint(height - sides[0] + 1, ()))
    left = int(torch.randint(width - sides[1] + 1, ()))
    return _part(items, top, left, sides[0], sides[1])
