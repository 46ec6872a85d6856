"""Options of action recognition from video."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fibottention.errors import UserError
from fibottention.tasks.config import Range, TaskConfig

__all__ = ["VideoAugmentConfig", "VideoConfig", "VideoDataConfig", "VideoModelConfig"]


@dataclass
class VideoDataConfig:
    """Videos and labels.

    Attributes:
        name: list (files of lines ``path label``) or folder (one folder of videos per action under train/ and val/).
        root: Folder with the data: paths in lists begin there if they do not begin at the list; with lists, the folder
            that holds them if a list is not found as it is named.
        train_split: List of the training videos, or their folder; train.csv or train if null.
        val_split: List of the validation videos, or their folder; the first there is of val.csv and test.csv, or of
            val, validation and test, if null.
        num_frames: Frames per clip.
        rate: Distance of two frames of a clip, in frames of the video.
        fps: Frames per second that rate counts in; those of each video if null.
        image_size: Side of the frames given to the model, in pixels.
        resize: Length of a frame's shorter side before the crop in evaluation; image_size if null.
        views: Clips per video in evaluation, spread evenly over its time; their scores are averaged.
        crops: Crops per clip in evaluation: 1 (centre) or 3 (along the longer side).
        mean: Mean per channel.
        std: Standard deviation per channel.
        backend: pyav, or torchcodec (needs that package and FFmpeg).
        workers: Processes that decode videos.
        strict: Stop at the first video that cannot be read, instead of listing them at the end.
        limit: Use only this many training videos (and a sixth as many validation videos), evenly spread; all if null.
    """

    name: Literal["list", "folder"] = "list"
    root: str | None = None
    train_split: str | None = None
    val_split: str | None = None
    num_frames: int = 8
    rate: float = 32
    fps: float | None = None
    image_size: int = 224
    resize: int | None = None
    views: int = 1
    crops: Literal[1, 3] = 1
    mean: list[float] = field(default_factory=lambda: [0.45, 0.45, 0.45])
    std: list[float] = field(default_factory=lambda: [0.225, 0.225, 0.225])
    backend: Literal["pyav", "torchcodec"] = "pyav"
    workers: int = 2
    strict: bool = False
    limit: int | None = None


@dataclass
class VideoModelConfig:
    """The model, of transformers.

    Attributes:
        name: timesformer, videomae or vivit.
        pretrained: Folder with a pretrained model of that kind, or its name on the hub; its classifier may be for other
            classes, and a TimeSformer's number of frames another.
        checkpoint: File of weights (.safetensors or .pth) to start from; the classifier may differ.
        drop_path: Stochastic depth rate; only TimeSformer has it.
        options: Further fields of the model's configuration, for example {hidden_size: 96, num_hidden_layers: 4,
            num_attention_heads: 4, intermediate_size: 384, patch_size: 16, attention_type: joint_space_time}.
    """

    name: Literal["timesformer", "videomae", "vivit"] = "timesformer"
    pretrained: str | None = None
    checkpoint: str | None = None
    drop_path: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class VideoAugmentConfig:
    """Augmentation of training clips, and label smoothing.

    Attributes:
        scale: Range of the length of a frame's shorter side before the random crop, in pixels; if null, as published
            for crops of 224, 256 to 320, and in proportion for other sizes.
        flip: Probability of a horizontal flip of the clip.
        color_jitter: Strength of random changes of brightness, contrast, saturation and (a quarter as strong) hue, the
            same for all frames of a clip.
        label_smoothing: Label smoothing.
    """

    scale: tuple[int, int] | None = None
    flip: float = 0.5
    color_jitter: float = 0.0
    label_smoothing: float = 0.0


@dataclass
class VideoConfig(TaskConfig):
    """All options of an action recognition run.

    Attributes:
        data: Videos and labels.
        model: The model.
        attention: The attention spec in space; with joint space-time attention, of all tokens of a clip.
        temporal_attention: The attention spec in time, for TimeSformer's divided attention; ``{"name": "none"}`` leaves
            it dense.
        optim: Optimizer and schedule.
        augment: Augmentation.
        train: Training loop.
    """

    task: ClassVar[str] = "video"
    ranges: ClassVar[tuple[Range, ...]] = (
        ("data.num_frames", 1, None),
        ("data.rate", 1e-3, None),
        ("data.fps", 1e-3, None),
        ("data.image_size", 1, None),
        ("data.views", 1, None),
        ("data.limit", 1, None),
        ("model.drop_path", 0, 0.99),
        ("augment.flip", 0, 1),
        ("augment.color_jitter", 0, 1),
        ("augment.label_smoothing", 0, 0.99),
    )

    data: VideoDataConfig = field(default_factory=VideoDataConfig)
    model: VideoModelConfig = field(default_factory=VideoModelConfig)
    temporal_attention: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    augment: VideoAugmentConfig = field(default_factory=VideoAugmentConfig)

    def check(self) -> None:
        """See `TaskConfig`."""
        super().check()
        data, size = self.data, self.data.image_size
        if data.resize is not None and data.resize < size:
            raise UserError(f"data.resize must be at least data.image_size={size}, got {data.resize}")
        low, high = self.train_scale
        if not size <= low <= high:
            raise UserError(
                f"augment.scale must be two lengths from data.image_size={size} on, the smaller first, got "
                f"{[low, high]}"
            )
        for name, values in (("mean", data.mean), ("std", data.std)):
            if len(values) != 3:
                raise UserError(f"data.{name} must have 3 numbers, got {values}")
        if min(data.std) <= 0:
            raise UserError(f"data.std must be above 0, got {data.std}")

    @property
    def train_scale(self) -> tuple[int, int]:
        """Range of the shorter side in training; as published, 256 to 320 for crops of 224."""
        size = self.data.image_size
        return self.augment.scale or (round(size * 256 / 224), round(size * 320 / 224))
