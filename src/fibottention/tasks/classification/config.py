"""Options of image classification."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fibottention.errors import UserError
from fibottention.specs import AttentionSpec, make_spec
from fibottention.training.config import OptimConfig, TrainConfig

__all__ = ["AugmentConfig", "ClassificationConfig", "DataConfig", "ModelConfig", "attention_spec", "check_ranges"]


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
        mean: Mean per channel; that of the data set, or ImageNet's, if null.
        std: Standard deviation per channel; that of the data set, or ImageNet's, if null.
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
        drop_path: Stochastic depth rate.
        drop: Dropout rate before the classifier.
        match_macs: Set the size of the attention spec (its window, number of keys, ...) so that attention costs about
            this share of dense attention's multiply-accumulates; the spec's own size if null.
        options: Further arguments of the model, for example {depth: 4, embed_dim: 64, num_heads: 4, patch_size: 2}.
            Streamed data need num_classes here.
    """

    name: str = "vit_base_patch16_224"
    pretrained: bool = False
    checkpoint: str | None = None
    in_chans: Literal[1, 3] = 3
    drop_path: float = 0.0
    drop: float = 0.0
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
class ClassificationConfig:
    """All options of an image classification run.

    Attributes:
        data: Images and labels.
        model: The model.
        attention: Name and fields of the attention spec; ``{"name": "none"}`` leaves the model as it is.
        optim: Optimizer and schedule.
        augment: Augmentation.
        train: Training loop.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: dict[str, Any] = field(default_factory=lambda: {"name": "fibottention"})
    optim: OptimConfig = field(default_factory=OptimConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain data for YAML."""
        return _plain(asdict(self))


def attention_spec(options: dict[str, Any]) -> AttentionSpec | None:
    """The spec of the attention options, None for the name ``none``.

    Raises:
        UserError: If a name or field is not valid.
    """
    if str(options.get("name", "")).lower() in ("none", ""):
        if len(options) > 1:
            raise UserError(f"attention.name=none leaves the model as it is and takes no options, got {options}")
        return None
    try:
        return make_spec(options)
    except ValueError as error:
        raise UserError(f"attention: {error}") from error


# Option, smallest and largest value; None is no bound. A value of null is always allowed.
_RANGES: tuple[tuple[str, float | None, float | None], ...] = (
    ("data.image_size", 1, None),
    ("data.workers", 0, None),
    ("data.limit", 1, None),
    ("model.drop_path", 0, 0.99),
    ("model.drop", 0, 0.99),
    ("model.match_macs", 1e-6, 1),
    ("optim.weight_decay", 0, None),
    ("optim.momentum", 0, 1),
    ("optim.decay_epochs", 1e-6, None),
    ("optim.clip_grad", 1e-12, None),
    ("optim.layer_decay", 1e-6, 1),
    ("optim.lr", 0, None),
    ("optim.base_lr", 0, None),
    ("optim.warmup_lr", 0, None),
    ("optim.min_lr", 0, None),
    ("augment.flip", 0, 1),
    ("augment.color_jitter", 0, None),
    ("augment.repeats", 1, None),
    ("augment.random_erasing", 0, 1),
    ("augment.mixup", 0, None),
    ("augment.cutmix", 0, None),
    ("augment.mix_probability", 0, 1),
    ("augment.label_smoothing", 0, 0.99),
    ("train.epochs", 1, None),
    ("train.batch_size", 1, None),
    ("train.gradient_accumulation", 1, None),
    ("train.seed", 0, None),
)


def check_ranges(config: ClassificationConfig) -> None:
    """Check that the numbers of a configuration are in their ranges.

    Raises:
        UserError: Naming the first option that is not.
    """
    for option, low, high in _RANGES:
        group, name = option.split(".")
        value = getattr(getattr(config, group), name)
        if value is None or ((low is None or value >= low) and (high is None or value <= high)):
            continue
        allowed = f"at least {low:g}" if high is None else f"in {low:g} .. {high:g}"
        raise UserError(f"{option} must be {allowed}, got {value}")
    low, high = config.augment.scale
    if not 0 < low <= high <= 1:
        raise UserError(f"augment.scale must be two numbers 0 < low <= high <= 1, got {[low, high]}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
