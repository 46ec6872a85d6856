"""Labelled samples for training: reproducible one by one, robust against those that cannot be read."""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fibottention.errors import UserError

__all__ = ["EpochSampler", "LabelledData", "LabelledDataset", "LabelledSource"]

_ATTEMPTS = 20


class LabelledSource(Protocol):
    """A numbered collection of labelled samples."""

    classes: Sequence[str]

    def __len__(self) -> int: ...

    def load(self, index: int) -> tuple[Any, int]:
        """Read one sample and its class; may raise any exception if it cannot be read."""
        ...

    def name(self, index: int) -> str:
        """What to call a sample in a message."""
        ...


@contextmanager
def _isolated_seed(seed: int) -> Iterator[None]:
    """Seed the global generators, which the transforms draw from, and put their state back afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class LabelledDataset(Dataset[tuple[Any, int, int]]):
    """Transformed samples of a source, as ``(sample, target, unreadable)``.

    What a sample looks like depends on the seed, the epoch and its index only, not on the process that loads it.
    Indices past the end are the same samples once more, augmented otherwise. One that cannot be read has its place in
    the source in ``unreadable`` (else -1): in training the next readable sample takes its place, in evaluation it has
    the target -1.

    Args:
        source: Samples and labels.
        transform: From what the source gives to what a batch is made of, mostly a tensor.
        blank: What takes the place of an unreadable sample in evaluation, before the transform.
        train: Whether the samples are for training.
        decode: A last step of reading, which may fail as the source may.
        seed: Seed of the random transforms.
        strict: Raise at the first sample that cannot be read.
    """

    def __init__(
        self,
        source: LabelledSource,
        transform: Callable[[Any], Any],
        *,
        blank: Any,
        train: bool,
        decode: Callable[[Any], Any] | None = None,
        seed: int = 0,
        strict: bool = False,
    ) -> None:
        self.source, self.transform, self.decode, self.blank = source, transform, decode, blank
        self.train, self.seed, self.strict = train, seed, strict
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        unreadable, place, reason = -1, index % len(self.source), ""
        with _isolated_seed(zlib.crc32(f"{self.seed} {self.epoch} {index}".encode())):
            for attempt in range(_ATTEMPTS if self.train else 1):
                current = (index + attempt) % len(self.source)
                try:
                    sample, target = self.source.load(current)
                    sample = sample if self.decode is None else self.decode(sample)
                except Exception as error:
                    if self.strict:
                        raise UserError(f"cannot read {self.source.name(current)}: {error}") from error
                    unreadable, reason = (place if attempt == 0 else unreadable), str(error)
                    continue
                return self.transform(sample), target, unreadable
            if self.train:
                raise UserError(
                    f"cannot read {_ATTEMPTS} samples in a row, from {self.source.name(place)} on: {reason}"
                )
            return self.transform(self.blank), -1, place


class EpochSampler(Sampler[int]):
    """Indices in an order that depends on the seed and the epoch only, so all processes agree on it.

    Each sample once, or, with ``repeats``, part of them so often, one repetition after the other.
    """

    def __init__(self, length: int, seed: int, repeats: int = 1) -> None:
        self.length, self.seed, self.repeats, self.epoch = length, seed, repeats, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {self.epoch} order".encode()))
        order = torch.randperm(self.length, generator=generator)[:, None]
        repeated = order + self.length * torch.arange(self.repeats)
        return iter(repeated.flatten()[: self.length].tolist())


class LabelledData:
    """Loaders of training and validation samples.

    Args:
        classes: Names of the classes.
        train_dataset: A `LabelledDataset`, or one that streams its samples.
        val_dataset: Likewise.
        sampler: Order of the training samples; None for streams, which have their own.
        batch_size: Samples per batch.
        workers: Processes that load samples.
        drop_last: Whether to leave out the last, smaller training batch.
        val_batch_size: Samples per batch of evaluation; ``batch_size`` if None.
        collate: Makes a batch of samples; they are stacked if None.
    """

    def __init__(
        self,
        classes: list[str],
        train_dataset: Any,
        val_dataset: Any,
        sampler: EpochSampler | None,
        batch_size: int,
        workers: int,
        *,
        drop_last: bool,
        val_batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.classes, self.sampler = classes, sampler
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        settings: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": torch.cuda.is_available(),
            "collate_fn": collate,
        }
        self.train_loader = DataLoader(train_dataset, batch_size, sampler=sampler, drop_last=drop_last, **settings)
        self.val_loader = DataLoader(val_dataset, val_batch_size or batch_size, **settings)

    @property
    def is_stream(self) -> bool:
        """Whether the data are streamed; they are then divided among the processes already."""
        return self.sampler is None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the augmentation of an epoch."""
        if self.sampler is not None:
            self.sampler.epoch = self.train_dataset.epoch = epoch
        elif hasattr(self.train_dataset.stream, "set_epoch"):
            self.train_dataset.stream.set_epoch(epoch)

    def name(self, index: int, train: bool) -> str:
        """What to call a sample in a message."""
        return (self.train_dataset if train else self.val_dataset).source.name(index)
