"""What all heads have in common."""

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.dense.sources.base import Scene

__all__ = ["DenseHead", "Prediction", "make_options", "padded_to", "resized_scores", "widened"]

Prediction = dict[str, Tensor]
"""What is found in an image, at its own size: as a `fibottention.tasks.dense.sources.base.Scene`, without ``crowd``.

Instances and segments also have ``scores`` ``(N,)``; a semantic prediction is ``scores`` ``(classes, H, W)``.
"""

_Options = TypeVar("_Options")


class DenseHead(nn.Module, ABC):
    """From the maps of a backbone to losses and predictions."""

    @abstractmethod
    def losses(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], scenes: list[Scene]
    ) -> dict[str, Tensor]:
        """Losses of images of one size, each a mean over the images.

        Args:
            features: The maps.
            pixels: The images ``(B, 3, H, W)``, padded at the right and at the bottom.
            size: Height and width of the images without the padding.
            scenes: What is in the images.
        """

    @abstractmethod
    def predict(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], wanted: tuple[int, int]
    ) -> list[Prediction]:
        """What is in the images.

        Args:
            features: The maps.
            pixels: The images ``(B, 3, H, W)``, padded at the right and at the bottom.
            size: Height and width of the images without the padding.
            wanted: Height and width for the predictions.
        """


def make_options(cls: type[_Options], given: dict[str, Any]) -> _Options:
    """The options of a head.

    Raises:
        UserError: If there is no such option, or a value is not valid.
    """
    defaults = {field.name: getattr(cls(), field.name) for field in fields(cls)}  # pyright: ignore[reportArgumentType]
    for name, value in given.items():
        if name not in defaults:
            raise UserError(f"model.head_options has no {name}{nearest(name, list(defaults))}")
        if isinstance(defaults[name], float):
            is_valid, wanted = isinstance(value, int | float) and 0 <= value <= 1, "a number in 0 .. 1"
        elif isinstance(defaults[name], list):
            is_valid = isinstance(value, list) and all(type(v) is int and v > 0 for v in value)
            wanted = "a list of whole numbers above 0"
        else:
            is_valid, wanted = type(value) is int and value > 0, "a whole number above 0"
        if not is_valid:
            raise UserError(f"model.head_options.{name} must be {wanted}, got {value!r}")
    return cls(**given)


def padded_to(maps: Tensor, pixels: Tensor, fill: float) -> Tensor:
    """Maps ``(..., h, w)`` padded at the right and at the bottom to the size of images ``(B, 3, H, W)``."""
    right, bottom = pixels.shape[-1] - maps.shape[-1], pixels.shape[-2] - maps.shape[-2]
    return F.pad(maps, (0, right, 0, bottom), value=fill)


def resized_scores(scores: Tensor, size: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Scores ``(N, H, W)`` of padded images cut to the images and brought to a size."""
    cut = scores[:, : size[0], : size[1]]
    if wanted == size:
        return cut
    return F.interpolate(cut[None], wanted, mode="bilinear", align_corners=False)[0]


def widened(value: Any) -> Any:
    """Tensors of half precision, also in lists, tuples and mappings, in float32; others as they are.

    Places in an image are computed from these: above 1024, a number of float16 is whole.
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        return {name: widened(item) for name, item in value.items()}
    return type(value)(widened(item) for item in value)
