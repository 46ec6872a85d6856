"""Action recognition from video among the tasks."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from fibottention.tasks.kinds import TaskKind
from fibottention.tasks.video.config import VideoConfig
from fibottention.tasks.video.data import ClipReader, EvalTransform
from fibottention.tasks.video.task import VideoTask

__all__ = ["KIND"]


def _open_input(config: VideoConfig) -> Callable[[Path], Tensor]:
    reader, transform = ClipReader(config.data), EvalTransform(config.data)
    return lambda path: transform(reader.read(path))


KIND = TaskKind(
    task=VideoTask,
    metrics={"top1": "top-1", "top5": "top-5", "mca": "mean class accuracy"},
    sample="videos",
    open_input=_open_input,
)
