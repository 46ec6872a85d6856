"""Detection and segmentation among the tasks."""

from fibottention.tasks.dense.task import DenseTask
from fibottention.tasks.kinds import TaskKind

__all__ = ["KIND"]

KIND = TaskKind(
    task=DenseTask,
    metrics={"mask_ap": "mask AP", "box_ap": "box AP", "miou": "mean IoU", "pq": "PQ"},
    sample="images",
)
