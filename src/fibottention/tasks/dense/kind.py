"""Detection and segmentation among the tasks."""

from fibottention.tasks.dense.task import SCORES, DenseTask
from fibottention.tasks.kinds import TaskKind

__all__ = ["KIND"]

KIND = TaskKind(
    task=DenseTask,
    metrics={"mask_ap": "mask AP", "box_ap": "box AP", "miou": "mean IoU", "pq": "PQ"},
    sample="images",
    score=lambda config: SCORES[config.data.target],
)
