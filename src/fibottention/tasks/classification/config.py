"""Options of image classification."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fibottention.errors import UserError
from fibottention.models.neighborhood_registry import is_neighborhood_model
from fibottention.tasks.config import Range, TaskConfig

__all__ = ["AugmentConfig", "ClassificationConfig", "DataConfig", "ModelConfig"]


@dataclass
class DataConfig:
    """Images and labels.

    Attributes:
        name: fashion-mnist-subset (embedded), fashion-mnist, mnist, cifar10, cifar100, tiny-imagenet, folder (one
            folder per class under train/ and val/), or torch/NAME, hfds/NAME, hfids/NAME, wds/NAME as timm reads them.
        root: Folder with the data; not needed for the embedded set.
        train_split: Name of the training split or folder, for folder and timm's readers; train if null.
        val_split: Name of the validation split or folder, likewise; val, validation or test if null.
        image_size: Side of the image given to the model, in pixels.
        resize: Side to which the shorter side is resized before the centre crop in evaluation; image_size if null.
        mean: Mean per channel; if null that of the weights to start from (timm's, or of a run), else that of the data
            set, or ImageNet's.
        std: Standard deviation per channel, likewise.
        interpolation: bicubic, bilinear, nearest or random (training only).
        workers: Processes that load images.
        strict: Stop at the first image that cannot be read, instead of listing them at the end.
        limit: Use only this many training images (and a sixth as many validation images), evenly spread; all if null.
    """

    name: str = "fashion-mnist-subset"
    root: str | None = None
    train_split: str | None = None
    val_split: str | None = None
    image_size: int = 224
    resize: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    interpolation: Literal["bicubic", "bilinear", "nearest", "random"] = "bicubic"
    workers: int = 2
    strict: bool = False
    limit: int | None = None


@dataclass
class ModelConfig:
    """The model, by timm's name.

    Attributes:
        name: Any model of timm.list_models().
        pretrained: Load timm's pretrained weights.
        checkpoint: File of weights (.safetensors or .pth) to start from; the classifier may differ.
        in_chans: Input channels: 3, or 1 for grey images.
        drop_path: Stochastic depth rate; the model's own if null.
        drop: Dropout rate before the classifier; likewise.
        match_macs: Set the size of the attention spec (its window, number of keys, ...) so that attention costs about
            this share of dense attention's multiply-accumulates; the spec's own size if null.
        options: Further arguments of the model, for example {depth: 4, embed_dim: 64, num_heads: 4, patch_size: 2}.
            Streamed data need num_classes here.
    """

    name: str = "vit_base_patch16_224"
    pretrained: bool = False
    checkpoint: str | None = None
    in_chans: Literal[1, 3] = 3
    drop_path: float | None = None
    drop: float | None = None
    match_macs: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class AugmentConfig:
    """Augmentation of training images (timm's) and label smoothing.

    Attributes:
        crop: resized (random resized crop), padded (pad by an eighth, random crop), or none (resize and centre crop).
        scale: Range of the area of a random resized crop.
        flip: Probability of a horizontal flip.
        color_jitter: Strength of colour jitter, if there is no auto_augment.
        auto_augment: Policy in timm's notation, for example rand-m9-mstd0.5-inc1, or cifar, AutoAugment's policy for
            CIFAR; none if null.
        repeats: How often an image is seen in an epoch, each time augmented anew; the epoch has as many images in all.
        random_erasing: Probability of random erasing.
        mixup: Mixup alpha.
        cutmix: CutMix alpha.
        mix_probability: Probability of mixup or CutMix per batch.
        label_smoothing: Label smoothing.
    """

    crop: Literal["resized", "padded", "none"] = "resized"
    scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    repeats: int = 1
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    label_smoothing: float = 0.1


@dataclass
class ClassificationConfig(TaskConfig):
    """All options of an image classification run.

    Attributes:
        data: Images and labels.
        model: The model.
        attention: Name and fields of the attention spec; ``{"name": "none"}`` leaves the model as it is.
        optim: Optimizer and schedule.
        augment: Augmentation.
        train: Training loop.
    """

    task: ClassVar[str] = "classification"
    ranges: ClassVar[tuple[Range, ...]] = (
        ("data.image_size", 1, None),
        ("data.limit", 1, None),
        ("model.drop_path", 0, 0.99),
        ("model.drop", 0, 0.99),
        ("model.match_macs", 1e-6, 1),
        ("augment.flip", 0, 1),
        ("augment.color_jitter", 0, None),
        ("augment.repeats", 1, None),
        ("augment.random_erasing", 0, 1),
        ("augment.mixup", 0, None),
        ("augment.cutmix", 0, None),
        ("augment.mix_probability", 0, 1),
        ("augment.label_smoothing", 0, 0.99),
    )

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def settle(self, chosen: set[str]) -> None:
        """See `TaskConfig`; NAT and DiNAT have an attention of their own."""
        if "attention" not in chosen and is_neighborhood_model(self.model.name):
            self.attention = {"name": "none"}

    def check(self) -> None:
        """See `TaskConfig`."""
        super().check()
        low, high = self.augment.scale
        if not 0 < low <= high <= 1:
            raise UserError(f"augment.scale must be two numbers 0 < low <= high <= 1, got {[low, high]}")
