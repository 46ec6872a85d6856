"""Robot learning among the tasks."""

from fibottention.tasks.kinds import TaskKind
from fibottention.tasks.robot.task import RobotTask

__all__ = ["KIND"]

KIND = TaskKind(
    task=RobotTask,
    metrics={"test_mean_score": "mean score", "success": "success rate"},
    sample="episodes",
    shares=("test_mean_score",),
    score=lambda config: "val_loss" if config.rollout.environment is None else "test_mean_score",
)
