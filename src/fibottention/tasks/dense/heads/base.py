"""What all heads have in common."""

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.dense.sources.base import Scene

__all__ = ["DenseHead", "Prediction", "make_options", "padded_to"]

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
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], sizes: list[tuple[int, int]]
    ) -> list[Prediction]:
        """What is in the images.

        Args:
            features: The maps.
            pixels: The images ``(B, 3, H, W)``, padded at the right and at the bottom.
            size: Height and width of the images without the padding.
            sizes: Height and width for the prediction of each image.
        """


def make_options(cls: type[_Options], given: dict[str, Any]) -> _Options:
    """The options of a head.

    Raises:
        UserError: If there is no such option.
    """
    known = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
    for name in given:
        if name not in known:
            raise UserError(f"model.head_options has no {name}{nearest(name, known)}")
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
