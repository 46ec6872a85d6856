"""Data sets and loaders of image classification: reproducible sample by sample, robust against unreadable images."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torch.utils.data import IterableDataset
from torchvision.transforms import v2

from fibottention.errors import UserError
from fibottention.tasks.classification.config import AugmentConfig, ClassificationConfig, DataConfig
from fibottention.tasks.classification.sources import open_source, timm_dataset
from fibottention.tasks.labelled_data import EpochSampler, LabelledData, LabelledDataset
from fibottention.tasks.pixels import to_eight_bits

__all__ = ["ClassificationData", "eval_transform", "normalization", "open_image"]

_STATISTICS = {
    "fashion-mnist-subset": ([0.2860], [0.3530]),
    "fashion-mnist": ([0.2860], [0.3530]),
    "mnist": ([0.1307], [0.3081]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}


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
        if config.interpolation == "random":
            raise UserError(f"data.interpolation=random is for augment.crop=resized, got augment.crop={augment.crop}")
        steps: list[Callable[..., Any]] = [v2.Resize(size, v2.InterpolationMode(config.interpolation))]
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
    return to_eight_bits(image).convert("L" if in_chans == 1 else "RGB")


class _StreamDataset(IterableDataset[tuple[Tensor, int, int]]):
    """A streaming data set of timm (wds/, hfids/), in the form of `LabelledDataset`."""

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


class ClassificationData(LabelledData):
    """Loaders of the training and validation images of a configuration."""

    def __init__(self, config: ClassificationConfig, *, train: bool = True) -> None:
        data, in_chans = config.data, config.model.in_chans
        is_stream = data.name.split("/")[0].lower() in ("wds", "hfids", "tfds")
        batch_size, seed = config.train.batch_size, config.train.seed
        config.check()
        evaluate, augmented = eval_transform(data, in_chans), train_transform(data, config.augment, in_chans)
        sampler = None
        if is_stream:
            if data.limit is not None or data.strict or config.augment.repeats > 1:
                raise UserError(
                    "data.limit, data.strict and augment.repeats do not work with streamed data "
                    f"(data.name={data.name})"
                )
            number = config.model.options.get("num_classes")
            if not isinstance(number, int):
                raise UserError(f"model.options.num_classes must be given for streamed data (data.name={data.name})")
            classes = [str(i) for i in range(number)]
            train_dataset: Any = _StreamDataset(data, True, augmented, in_chans, batch_size, seed)
            val_dataset: Any = _StreamDataset(data, False, evaluate, in_chans, batch_size, seed)
        else:
            val_source = open_source(data, train=False)
            train_source = open_source(data, train=True) if train else val_source
            if len(val_source.classes) > len(train_source.classes):
                raise UserError(
                    f"the validation images have {len(val_source.classes)} classes, the training images only "
                    f"{len(train_source.classes)}"
                )
            classes = list(train_source.classes)
            common: dict[str, Any] = {
                "decode": partial(open_image, in_chans=in_chans),
                "blank": Image.new("L" if in_chans == 1 else "RGB", (64, 64)),
                "seed": seed,
                "strict": data.strict,
            }
            train_dataset = LabelledDataset(train_source, augmented, train=True, **common)
            val_dataset = LabelledDataset(val_source, evaluate, train=False, **common)
            sampler = EpochSampler(len(train_source), seed, config.augment.repeats)
        # A last, smaller batch would weigh its images more; a set smaller than one batch must still train.
        drop_last = is_stream or len(train_dataset) >= batch_size
        if train and not drop_last and (config.augment.mixup or config.augment.cutmix):
            raise UserError(
                f"train.batch_size={batch_size} is larger than the {len(train_dataset)} training images, which "
                "mixup and CutMix do not take"
            )
        super().__init__(classes, train_dataset, val_dataset, sampler, batch_size, data.workers, drop_last=drop_last)
