"""Clips of videos for training, evaluation and prediction."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from fibottention.errors import UserError
from fibottention.tasks.labelled_data import EpochSampler, LabelledData, LabelledDataset
from fibottention.tasks.video.config import VideoConfig, VideoDataConfig
from fibottention.tasks.video.decode import check_backend, open_video
from fibottention.tasks.video.lists import VideoList, read_folder, read_list, with_classes
from fibottention.tasks.video.sampling import clip_indices, view_starts

__all__ = ["ClipReader", "EvalTransform", "TrainTransform", "VideoData", "VideoSource", "open_videos"]


class ClipReader:
    """Reads the clips of a video: a random one in training, evenly spread ones in evaluation.

    Args:
        data: How to sample and decode.
        scale: Range of the shorter side in training, in pixels; None is evaluation.
    """

    def __init__(self, data: VideoDataConfig, scale: tuple[int, int] | None = None) -> None:
        self.data, self.scale = data, scale

    def read(self, path: Path) -> Tensor:
        """Clips of a video as ``(views, T, 3, H, W)`` of uint8; one view in training.

        Draws from torch's global generator in training, which the caller seeds.

        Raises:
            UserError: Saying what is wrong with the file.
        """
        data = self.data
        if self.scale is None:
            starts, short_side = view_starts(data.views), data.resize or data.image_size
        else:
            starts = torch.rand(1).numpy()
            short_side = int(torch.randint(self.scale[0], self.scale[1] + 1, ()))
        with open_video(path, data.backend) as video:
            places = [clip_indices(video.times, start, data.num_frames, data.rate, data.fps) for start in starts]
            needed = np.unique(np.concatenate(places))
            frames = video.frames(needed.tolist(), short_side)
        return torch.stack([frames[torch.from_numpy(np.searchsorted(needed, own))] for own in places])


class VideoSource:
    """The videos of a list; see `LabelledSource`."""

    def __init__(self, videos: VideoList, reader: ClipReader) -> None:
        self.samples, self.reader = videos.samples, reader
        self.classes: Sequence[str] = videos.classes

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int) -> tuple[Tensor, int]:
        """See `LabelledSource`."""
        path, target = self.samples[index]
        return self.reader.read(path), target

    def name(self, index: int) -> str:
        """See `LabelledSource`."""
        return str(self.samples[index][0])


class TrainTransform:
    """Random crop, flip and colours of a clip ``(1, T, 3, H, W)``, the same for all frames: ``(T, 3, S, S)``."""

    def __init__(self, config: VideoConfig) -> None:
        strength = config.augment.color_jitter
        steps: list[Callable[..., Any]] = [
            v2.RandomCrop(config.data.image_size),
            v2.RandomHorizontalFlip(config.augment.flip),
            *([v2.ColorJitter(strength, strength, strength, strength / 4)] if strength else []),
            _normalize(config.data),
        ]
        self.steps = v2.Compose(steps)

    def __call__(self, clips: Tensor) -> Tensor:
        """See the class."""
        return self.steps(clips[0])


class EvalTransform:
    """The crops of clips ``(views, T, 3, H, W)``, normalized: ``(views * crops, T, 3, S, S)``."""

    def __init__(self, data: VideoDataConfig) -> None:
        self.normalize, self.size = _normalize(data), data.image_size
        self.positions = (0.5,) if data.crops == 1 else (0.0, 0.5, 1.0)

    def __call__(self, clips: Tensor) -> Tensor:
        """See the class."""
        height, width = clips.shape[-2:]
        size, crops = self.size, []
        for position in self.positions:
            # The shorter side is cropped in the middle.
            top = round((height - size) * (position if height > width else 0.5))
            left = round((width - size) * (position if width >= height else 0.5))
            crops.append(clips[..., top : top + size, left : left + size])
        return self.normalize(torch.stack(crops, 1).flatten(0, 1))


def _normalize(data: VideoDataConfig) -> Callable[[Any], Tensor]:
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)])


def open_videos(data: VideoDataConfig, train: bool, classes: Sequence[str] | None = None) -> VideoList:
    """The training or validation videos of a configuration.

    Args:
        data: Where they are.
        train: Whether those for training.
        classes: The classes that labels stand for; those of the list or folder itself if None.

    Raises:
        UserError: If lists or folders are missing or cannot be read, or have other classes.
    """
    check_backend(data.backend)
    root = None if data.root is None else Path(data.root).expanduser()
    if root is not None and not root.is_dir():
        raise UserError(f"data.root={data.root} is not a folder")
    if data.name == "folder":
        if root is None:
            raise UserError("data.root must be given for data.name=folder: the folder that holds train and val")
        folder = _find(root, data, train, ("train",), ("val", "validation", "test"), Path.is_dir)
        videos = read_folder(folder, classes)
    else:
        path = _find(root, data, train, ("train.csv",), ("val.csv", "test.csv"), Path.is_file)
        videos = read_list(path, root)
        if classes is not None:
            videos = with_classes(videos, classes, path)
    limit = None if data.limit is None else (data.limit if train else max(1, data.limit // 6))
    if limit is not None and limit < len(videos.samples):
        # Evenly spread over the classes, which may lie one after the other.
        order = sorted(videos.samples, key=lambda sample: sample[1])
        chosen = [order[index * len(order) // limit] for index in range(limit)]
        videos = VideoList(tuple(chosen), videos.classes)
    return videos


def _find(
    root: Path | None,
    data: VideoDataConfig,
    train: bool,
    train_names: tuple[str, ...],
    val_names: tuple[str, ...],
    is_there: Callable[[Path], bool],
) -> Path:
    """The list or folder of a split."""
    option, given = ("train_split", data.train_split) if train else ("val_split", data.val_split)
    names = (
        ((given, f"{given}.csv") if data.name == "list" else (given,))
        if given
        else (train_names if train else val_names)
    )
    for name in names:
        for path in (Path(name).expanduser(), *([root / name] if root is not None else [])):
            if (given or root is None or path != Path(name)) and is_there(path):
                return path
    what = "list" if data.name == "list" else "folder"
    where = "here" if root is None else f"in data.root={data.root}"
    hint = f"; name it with data.{option}" if not given else ""
    raise UserError(f"data.{option}: there is no {what} {given or ' or '.join(names)} {where}{hint}")


class VideoData(LabelledData):
    """Loaders of the training and validation clips of a configuration."""

    def __init__(self, config: VideoConfig, *, train: bool = True, classes: Sequence[str] | None = None) -> None:
        config.check()
        data = config.data
        train_videos = open_videos(data, train=True) if train else None
        if train_videos is not None:
            classes = train_videos.classes
        val_videos = open_videos(data, train=False, classes=classes)
        train_videos = train_videos or val_videos
        side = data.resize or data.image_size
        blank = torch.zeros(data.views, data.num_frames, 3, side, side, dtype=torch.uint8)
        common: dict[str, Any] = {"blank": blank, "seed": config.train.seed, "strict": data.strict}
        train_dataset = LabelledDataset(
            VideoSource(train_videos, ClipReader(data, config.train_scale)),
            TrainTransform(config),
            train=True,
            **common,
        )
        val_dataset = LabelledDataset(
            VideoSource(val_videos, ClipReader(data)), EvalTransform(data), train=False, **common
        )
        super().__init__(
            list(train_videos.classes),
            train_dataset,
            val_dataset,
            EpochSampler(len(train_dataset), config.train.seed),
            config.train.batch_size,
            data.workers,
            drop_last=len(train_dataset) >= config.train.batch_size,
            val_batch_size=max(1, config.train.batch_size // (data.views * data.crops)),
        )
