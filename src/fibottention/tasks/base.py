"""What runs need of a task, beside what the trainer needs."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from fibottention.adapters.report import SparsifyReport
from fibottention.training.run import Run

__all__ = ["RunTask"]


class RunTask(ABC):
    """Base of all tasks; each is also a `fibottention.training.engine.Task`.

    Attributes:
        model: The model.
        sparsify_report: What the attention spec did to the model; None if it has its own attention.
    """

    model: nn.Module
    sparsify_report: SparsifyReport | None = None

    @staticmethod
    def begin(config: Any) -> None:
        """Let the options of a new run take over what the weights that it starts from ask for."""
        return

    @classmethod
    @abstractmethod
    def restore_model(cls, config: Any, saved: dict[str, Any]) -> nn.Module:
        """The model of a run, without its weights.

        Args:
            config: All options.
            saved: What the run's best epoch kept: metrics and details.
        """

    @abstractmethod
    def overview(self) -> str:
        """What the model is trained on, in a few words."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What the run's summary says beside what all summaries do."""

    @abstractmethod
    def macs(self) -> int:
        """Multiply-accumulates of the model per sample."""

    @abstractmethod
    def save_samples(self, run: Run) -> None:
        """Keep a few validation samples for the report."""
