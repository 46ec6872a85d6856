"""Data sets and loaders of image classification: reproducible sample by sample, robust against unreadable images."""

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchvision.transforms import v2

from fibottention.errors import UserError
from fibottention.tasks.classification.config import AugmentConfig, ClassificationConfig, DataConfig, check_ranges
from fibottention.tasks.classification.sources import ImageSource, open_source, timm_dataset

__all__ = ["ClassificationData", "ClassificationDataset", "eval_transform", "normalization", "open_image"]

_STATISTICS = {
    "fashion-mnist-subset": ([0.2860], [0.3530]),
    "fashion-mnist": ([0.2860], [0.3530]),
    "mnist": ([0.1307], [0.3081]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}
_ATTEMPTS = 20


def normalization(config: DataConfig, in_chans: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel."""
    defaults = _STATISTICS.get(config.name, (list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD)))
    result = []
    for name, given, default in (("mean", config.mean, defaults[0]), ("std", config.std, defaults[1])):
        values = given or default
        if len(values) == 1:
            values = values * in_chans
        elif in_chans == 1 and given is None:
            values = [sum(values) / len(values)]
        if len(values) != in_chans:
            raise UserError(f"data.{name} must have 1 or model.in_chans={in_chans} numbers, got {values}")
        result.append(values)
    mean, std = result
    if min(std) <= 0:
        raise UserError(f"data.std must be above 0, got {std}")
    return mean, std


def eval_transform(config: DataConfig, in_chans: int) -> Callable[[Image.Image], Tensor]:
    """Resize, centre crop and normalize, as in evaluation and prediction."""
    resize = config.resize or config.image_size
    if resize < config.image_size:
        raise UserError(f"data.resize must be at least data.image_size={config.image_size}, got {resize}")
    mean, std = normalization(config, in_chans)
    transform = create_transform(
        config.image_size,
        interpolation="bicubic" if config.interpolation == "random" else config.interpolation,
        crop_pct=config.image_size / (resize + 0.5),  # timm rounds down, which may lose a pixel
        mean=tuple(mean),
        std=tuple(std),
    )
    return cast(Callable[[Image.Image], Tensor], transform)


def train_transform(config: DataConfig, augment: AugmentConfig, in_chans: int) -> Callable[[Image.Image], Tensor]:
    """The random transform of training images."""
    mean, std = normalization(config, in_chans)
    if augment.auto_augment and in_chans == 1:
        raise UserError("augment.auto_augment needs colour images (model.in_chans=3), got model.in_chans=1")
    try:
        parts = create_transform(
            config.image_size,
            is_training=True,
            scale=augment.scale,
            hflip=augment.flip,
            color_jitter=augment.color_jitter,
            auto_augment=None if augment.auto_augment == "cifar" else augment.auto_augment,
            interpolation=config.interpolation,
            mean=tuple(mean),
            std=tuple(std),
            re_prob=augment.random_erasing,
            re_mode="pixel",
            separate=True,
        )
    except (AssertionError, ValueError) as error:
        raise UserError(f"augment.auto_augment must be a policy in timm's notation or null: {error}") from error
    first, second, last = cast(tuple[Callable[[Any], Any], ...], parts)
    if augment.crop != "resized":
        size = config.image_size
        steps: list[Callable[..., Any]] = [v2.Resize(size, v2.InterpolationMode.BICUBIC)]
        if augment.crop == "padded":
            steps.append(v2.RandomCrop(size, padding=max(1, size // 8)))
        else:
            steps.append(v2.CenterCrop(size))
        first = v2.Compose([*steps, v2.RandomHorizontalFlip(augment.flip)])
    if augment.auto_augment == "cifar":
        first = v2.Compose([first, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)])
    return v2.Compose([first, second, last])


def open_image(image: Image.Image, in_chans: int) -> Image.Image:
    """An image in the colour mode of the model."""
    return image.convert("L" if in_chans == 1 else "RGB")


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


class ClassificationDataset(Dataset[tuple[Tensor, int, int]]):
    """Transformed images of a source, as ``(image, target, unreadable)``.

    What a sample looks like depends on the seed, the epoch and its index only, not on the process that loads it.
    Indices past the end are the same images once more, augmented otherwise. A sample that cannot be read has its place
    in the source in ``unreadable`` (else -1): in training the next readable image takes its place, in evaluation it has
    the target -1.

    Args:
        source: Images and labels.
        transform: From image to tensor.
        in_chans: Channels of the model.
        train: Whether the samples are for training.
        seed: Seed of the random transforms.
        strict: Raise at the first image that cannot be read.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: Callable[[Image.Image], Tensor],
        *,
        in_chans: int,
        train: bool,
        seed: int = 0,
        strict: bool = False,
    ) -> None:
        self.source, self.transform, self.in_chans, self.train = source, transform, in_chans, train
        self.seed, self.strict = seed, strict
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        unreadable, place = -1, index % len(self.source)
        for attempt in range(_ATTEMPTS if self.train else 1):
            current = (index + attempt) % len(self.source)
            try:
                image, target = self.source.load(current)
                image = open_image(image, self.in_chans)
            except Exception as error:
                if self.strict:
                    raise UserError(f"cannot read {self.source.name(current)}: {error}") from error
                unreadable = place if attempt == 0 else unreadable
                continue
            with _isolated_seed(zlib.crc32(f"{self.seed} {self.epoch} {index}".encode())):
                return self.transform(image), target, unreadable
        if self.train:
            raise UserError(f"cannot read {_ATTEMPTS} images in a row, from {self.source.name(place)} on")
        blank = Image.new("L" if self.in_chans == 1 else "RGB", (64, 64))
        return self.transform(blank), -1, place


class EpochSampler(Sampler[int]):
    """Indices in an order that depends on the seed and the epoch only, so all processes agree on it.

    Each image once, or, with ``repeats``, part of them so often, one repetition after the other.
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


class _StreamDataset(IterableDataset[tuple[Tensor, int, int]]):
    """A streaming data set of timm (wds/, hfids/), in the form of `ClassificationDataset`."""

    def __init__(
        self,
        config: DataConfig,
        train: bool,
        transform: Callable[[Image.Image], Tensor],
        in_chans: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.stream = timm_dataset(config, train, batch_size, seed)
        self.stream.transform = lambda image: transform(open_image(image, in_chans))
        # The reader rounds its length to whole batches of each worker.
        self.stream.set_loader_cfg(num_workers=config.workers)

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[tuple[Tensor, int, int]]:
        for image, target in self.stream:
            yield image, int(target), -1


class ClassificationData:
    """Loaders of the training and validation images of a configuration.

    Attributes:
        classes: Names of the classes.
        train_loader: Batches ``(images, targets, unreadable)`` for training.
        val_loader: Batches for evaluation, every image once.
        is_stream: Whether the data are streamed; timm then divides them among the processes.
    """

    def __init__(self, config: ClassificationConfig, *, train: bool = True) -> None:
        data, in_chans = config.data, config.model.in_chans
        self.is_stream = data.name.split("/")[0].lower() in ("wds", "hfids", "tfds")
        self.sampler: EpochSampler | None = None
        batch_size, seed, workers = config.train.batch_size, config.train.seed, data.workers
        check_ranges(config)
        evaluate, augmented = eval_transform(data, in_chans), train_transform(data, config.augment, in_chans)
        if self.is_stream:
            if data.limit is not None or data.strict or config.augment.repeats > 1:
                raise UserError(
                    "data.limit, data.strict and augment.repeats do not work with streamed data "
                    f"(data.name={data.name})"
                )
            classes = config.model.options.get("num_classes")
            if not isinstance(classes, int):
                raise UserError(f"model.options.num_classes must be given for streamed data (data.name={data.name})")
            self.classes: list[str] = [str(i) for i in range(classes)]
            self.train_dataset: Any = _StreamDataset(data, True, augmented, in_chans, batch_size, seed)
            self.val_dataset: Any = _StreamDataset(data, False, evaluate, in_chans, batch_size, seed)
        else:
            val_source = open_source(data, train=False)
            train_source = open_source(data, train=True) if train else val_source
            if len(val_source.classes) > len(train_source.classes):
                raise UserError(
                    f"the validation images have {len(val_source.classes)} classes, the training images only "
                    f"{len(train_source.classes)}"
                )
            self.classes = list(train_source.classes)
            common: dict[str, Any] = {"in_chans": in_chans, "seed": seed, "strict": data.strict}
            self.train_dataset = ClassificationDataset(train_source, augmented, train=True, **common)
            self.val_dataset = ClassificationDataset(val_source, evaluate, train=False, **common)
            self.sampler = EpochSampler(len(train_source), seed, config.augment.repeats)
        settings: dict[str, Any] = {
            "batch_size": batch_size,
            "num_workers": workers,
            "pin_memory": torch.cuda.is_available(),
        }
        # A last, smaller batch would weigh its images more; a set smaller than one batch must still train.
        drop_last = self.is_stream or len(self.train_dataset) >= batch_size
        if not drop_last and (config.augment.mixup or config.augment.cutmix):
            raise UserError(
                f"train.batch_size={batch_size} is larger than the {len(self.train_dataset)} training images, which "
                "mixup and CutMix do not take"
            )
        self.train_loader = DataLoader(self.train_dataset, sampler=self.sampler, drop_last=drop_last, **settings)
        self.val_loader = DataLoader(self.val_dataset, **settings)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the augmentation of an epoch."""
        if self.sampler is not None:
            self.sampler.epoch = self.train_dataset.epoch = epoch
        elif hasattr(self.train_dataset.stream, "set_epoch"):
            self.train_dataset.stream.set_epoch(epoch)

    def name(self, index: int, train: bool) -> str:
        """What to call an image in a message."""
        return (self.train_dataset if train else self.val_dataset).source.name(index)
