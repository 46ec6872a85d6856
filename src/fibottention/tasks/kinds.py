"""The tasks by name; each is imported when it is used."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fibottention.tasks.config import TaskConfig

__all__ = ["TaskKind", "config_class", "task_kind", "task_names"]

_CONFIGS = {
    "classification": "ClassificationConfig",
    "video": "VideoConfig",
    "robot": "RobotConfig",
    "dense": "DenseConfig",
}


@dataclass(frozen=True)
class TaskKind:
    """What commands and runs need to know of a kind of task; the module ``kind`` of the task's package has one.

    Attributes:
        task: The class of the task.
        metrics: Names of the metrics in the log, and what to call them; the first one chooses the best epoch.
        sample: What one sample of an evaluation is called, in the plural.
        open_input: For recognition, a reader of files for prediction, of a configuration: from a path to one sample as
            in evaluation; it raises UserError, saying what is wrong, for a file that cannot be read.
        shares: Metrics that go from 0 to 1; the others are in percent.
        score: Name of the metric that chooses the best epoch, of a configuration; the first one if None.
    """

    task: type[Any]
    metrics: dict[str, str]
    sample: str
    open_input: Callable[[Any], Callable[[Path], Tensor]] | None = None
    shares: tuple[str, ...] = ()
    score: Callable[[Any], str] | None = None

    def score_of(self, config: TaskConfig) -> str:
        """Name of the metric that chooses the best epoch."""
        return next(iter(self.metrics)) if self.score is None else self.score(config)

    def show(self, name: str, value: float) -> str:
        """A metric's value for people."""
        return f"{value:.3f}" if name in self.shares else f"{value:.2f} %"


def task_names() -> list[str]:
    """Names of the tasks."""
    return list(_CONFIGS)


def config_class(name: str) -> type[TaskConfig]:
    """The class of the options of a task."""
    return getattr(importlib.import_module(f"fibottention.tasks.{name}.config"), _CONFIGS[name])


def task_kind(name: str) -> TaskKind:
    """A task by name; imports what it needs."""
    return importlib.import_module(f"fibottention.tasks.{name}.kind").KIND
