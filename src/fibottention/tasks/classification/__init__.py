"""Image classification."""

from fibottention.tasks.classification.config import ClassificationConfig
from fibottention.tasks.classification.task import ClassificationTask

__all__ = ["ClassificationConfig", "ClassificationTask"]
