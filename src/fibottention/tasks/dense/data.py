"""Loaders of annotated images."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fibottention.errors import UserError
from fibottention.tasks.dense.augment import TrainTransform, to_pixels
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.sources import SceneSource, open_source
from fibottention.tasks.dense.sources.base import VOID, Scene
from fibottention.tasks.labelled_data import EpochSampler, LabelledData, LabelledDataset

__all__ = ["Batch", "DenseData"]

Batch = dict[str, Any]
"""``images`` and ``scenes`` (lists), and of each image its ``indices`` in the source (-1 if it could not be read) and
``unreadable`` (the index of one that could not be read, else -1)."""

_BLANK = 32


class _Chosen:
    """Some images of a source, each with its number in the place of a label."""

    classes: Sequence[str] = ()

    def __init__(self, source: SceneSource, indices: list[int]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, index: int) -> tuple[tuple[Image.Image, Scene], int]:
        return self.source.load(self.indices[index]), self.indices[index]

    def name(self, index: int) -> str:
        return str(self.source.path(self.indices[index]))


class DenseData(LabelledData):
    """Loaders of training and validation images.

    Attributes:
        train_source: The training images.
        val_source: The validation images.

    Args:
        config: All options.
        train: Whether training images are needed.
    """

    def __init__(self, config: DenseConfig, *, train: bool = True) -> None:
        data = config.data
        self.val_source = open_source(data, train=False)
        self.train_source = open_source(data, train=True) if train else self.val_source
        for source in {id(s): s for s in (self.train_source, self.val_source)}.values():
            if data.strict and source.problems:
                raise UserError(f"data.strict: {source.problems[0]}")
        _check_classes(self.train_source.classes, self.val_source.classes, data.target)
        chosen = list(range(len(self.train_source)))
        if train:
            chosen = [index for index in chosen if self.train_source.has_objects(index)]
            if not chosen:
                first = f"; {self.problems()[0]}" if self.problems() else ""
                raise UserError(f"no training image has an annotated object{first}")
        chosen = _spread(chosen, data.limit)
        limit = None if data.limit is None else max(1, data.limit // 6)
        held = _spread(list(range(len(self.val_source))), limit)
        blank = (Image.new("RGB", (_BLANK, _BLANK)), {})
        common: dict[str, Any] = {"blank": blank, "seed": config.train.seed}
        train_dataset = LabelledDataset(
            _Chosen(self.train_source, chosen), TrainTransform(config), train=True, **common
        )
        val_dataset = LabelledDataset(_Chosen(self.val_source, held), to_pixels, train=False, **common)
        super().__init__(
            self.train_source.classes,
            train_dataset,
            val_dataset,
            EpochSampler(len(chosen), config.train.seed),
            config.train.batch_size,
            data.workers,
            drop_last=len(chosen) >= config.train.batch_size,
            collate=_collate,
        )

    def problems(self) -> list[str]:
        """What was wrong with the annotations, one sentence each."""
        sources = {id(s): s for s in (self.train_source, self.val_source)}.values()
        return [problem for source in sources for problem in source.problems]


def _check_classes(train: list[str], val: list[str], target: str) -> None:
    if len(set(train)) < len(train):
        twice = next(name for name in train if train.count(name) > 1)
        raise UserError(f"two classes are named {twice}")
    if train != val:
        place = next((i for i, (a, b) in enumerate(zip(train, val)) if a != b), min(len(train), len(val)))
        names = [classes[place] if place < len(classes) else "none" for classes in (train, val)]
        raise UserError(
            f"the training data have {len(train)} classes, the validation data {len(val)}; number {place + 1} is "
            f"{names[0]} in the training data and {names[1]} in the validation data"
        )
    if target == "semantic" and len(train) > VOID - 1:
        raise UserError(f"there can be at most {VOID - 1} classes in a map of classes, got {len(train)}")


def _spread(indices: list[int], limit: int | None) -> list[int]:
    """At most so many, evenly spread."""
    if limit is None or limit >= len(indices):
        return indices
    return [indices[i] for i in np.linspace(0, len(indices) - 1, limit).round().astype(int)]


def _collate(samples: list[tuple[tuple[Tensor, Scene], int, int]]) -> Batch:
    return {
        "images": [image for (image, _), _, _ in samples],
        "scenes": [scene for (_, scene), _, _ in samples],
        "indices": torch.tensor([index for _, index, _ in samples]),
        "unreadable": torch.tensor([unreadable for _, _, unreadable in samples]),
    }
