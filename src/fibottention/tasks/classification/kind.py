"""Image classification among the tasks."""

from collections.abc import Callable
from pathlib import Path

from PIL import Image
from torch import Tensor

from fibottention.errors import UserError
from fibottention.tasks.classification.config import ClassificationConfig
from fibottention.tasks.classification.data import eval_transform, open_image
from fibottention.tasks.classification.task import ClassificationTask
from fibottention.tasks.kinds import TaskKind

__all__ = ["KIND"]


def _open_input(config: ClassificationConfig) -> Callable[[Path], Tensor]:
    transform = eval_transform(config.data, config.model.in_chans)

    def read(path: Path) -> Tensor:
        try:
            with Image.open(path) as image:
                return transform(open_image(image, config.model.in_chans))
        except Exception as error:
            raise UserError(f"not a readable image ({type(error).__name__})") from error

    return read


KIND = TaskKind(
    task=ClassificationTask,
    metrics={"top1": "top-1", "top5": "top-5"},
    sample="images",
    open_input=_open_input,
)
