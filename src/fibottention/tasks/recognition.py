"""What image classification and action recognition share: labels, metrics, samples that cannot be read."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from fibottention.adapters.report import SparsifyReport
from fibottention.analysis.cost import whole_model_macs
from fibottention.errors import UserError
from fibottention.tasks.base import RunTask
from fibottention.tasks.labelled_data import LabelledData
from fibottention.training.engine import Evaluation
from fibottention.training.run import Run

__all__ = ["RecognitionTask"]


class RecognitionTask(RunTask):
    """Base of tasks with one label per sample; see `fibottention.training.engine.Task`.

    A subclass has ``input_shape``, the shape of a sample without the batch, besides what is abstract here.

    Args:
        config: All options.
        train: Whether training data are needed.
        model: The model; made from the configuration if None.
        classes: Names of the classes of a model that was trained before.
    """

    sample_name = "samples"
    input_shape: tuple[int, ...]

    def __init__(
        self,
        config: Any,
        *,
        train: bool = True,
        model: nn.Module | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        data = self.data = self.make_data(config, train and config.train.epochs > 0, classes)
        self.num_classes = len(data.classes)
        if self.num_classes < 2:
            raise UserError(f"the data have only one class ({data.classes[0]}); {self.sample_name} need at least 2")
        if model is None:
            # Weights are drawn in a fork of the generator, so the same seed gives the same weights whatever ran before.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.train.seed)
                model, self.sparsify_report = self.build_model(config, self.num_classes)
        self.model = model
        self.train_loader, self.val_loader = data.train_loader, data.val_loader
        self.is_stream = data.is_stream
        self._noted: list[tuple[Tensor, bool]] = []
        self._unreadable: set[tuple[int, bool]] = set()

    @staticmethod
    @abstractmethod
    def make_data(config: Any, train: bool, classes: Sequence[str] | None) -> LabelledData:
        """The data of a configuration; without training data, labels may need the classes to mean the same."""

    @staticmethod
    @abstractmethod
    def build_model(config: Any, num_classes: int) -> tuple[nn.Module, SparsifyReport | None]:
        """The model of a configuration, with its attention spec put in, and what that did.

        Raises:
            UserError: If the model is unknown, cannot be made so, or cannot take the spec.
        """

    @classmethod
    def restore_model(cls, config: Any, saved: dict[str, Any]) -> nn.Module:
        """See `RunTask`."""
        return cls.build_model(config, len(saved["classes"]))[0]

    def overview(self) -> str:
        """See `RunTask`."""
        return f"{self.num_classes} classes"

    def summary(self) -> dict[str, Any]:
        """See `RunTask`."""
        return {"classes": self.data.classes}

    def macs(self) -> int:
        """See `RunTask`."""
        return whole_model_macs(self.model, self.input_shape)

    def score(self, metrics: dict[str, float]) -> float:
        """See `Task`."""
        return metrics["top1"]

    @abstractmethod
    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """See `Task`."""

    @abstractmethod
    def save_samples(self, run: Run) -> None:
        """See `RunTask`; of different classes where they come so."""

    def set_epoch(self, epoch: int) -> None:
        """See `Task`."""
        self.unreadable()  # takes up what the last epoch noted
        self.data.set_epoch(epoch)

    def batch_length(self, batch: list[Tensor]) -> int:
        """See `Task`."""
        return len(batch[1])

    @staticmethod
    def logits(model: nn.Module, samples: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of a batch in evaluation."""
        return model(samples)

    def metrics(self, confusion: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Further metrics and details from the confusion matrix, true classes in rows."""
        return {}, {}

    def evaluate(self, model: nn.Module, batches: Iterator[list[Tensor]], accelerator: Accelerator) -> Evaluation:
        """Top-1, top-5, loss and confusion matrix over the samples that can be read."""
        classes, device = self.num_classes, accelerator.device
        # Every process sees all gathered samples, so the metrics must not be added up over processes again.
        common: dict[str, Any] = {"num_classes": classes, "validate_args": False, "sync_on_compute": False}
        top1 = MulticlassAccuracy(average="micro", **common).to(device)
        top5 = MulticlassAccuracy(average="micro", top_k=min(5, classes), **common).to(device)
        confusion = MulticlassConfusionMatrix(**common).to(device)
        loss_sum, count = 0.0, 0
        for samples, targets, unreadable in batches:
            self.note(unreadable, train=False)
            logits = self.logits(model, samples).float()
            # Gathering drops the samples that were repeated to fill the last batch of all processes.
            logits, targets = accelerator.gather_for_metrics((logits, targets))
            readable = targets >= 0
            logits, targets = logits[readable], targets[readable]
            if not len(targets):
                continue
            loss_sum += F.cross_entropy(logits, targets, reduction="sum").item()
            count += len(targets)
            for metric in (top1, top5, confusion):
                metric.update(logits, targets)
        if not count:
            raise UserError(f"none of the validation {self.sample_name} could be read")
        matrix = confusion.compute().cpu()
        further, details = self.metrics(matrix)
        return Evaluation(
            {
                "val_loss": loss_sum / count,
                "top1": 100 * float(top1.compute()),
                "top5": 100 * float(top5.compute()),
                **further,
            },
            {self.sample_name: count, "classes": self.data.classes, "confusion": matrix.tolist(), **details},
        )

    def note(self, unreadable: Tensor, train: bool) -> None:
        """Remember the samples of a batch that could not be read."""
        # Looking at the numbers now would wait for the device in every step.
        self._noted.append((unreadable, train))

    def unreadable(self) -> list[str]:
        """See `Task`."""
        for train in (False, True):
            noted = [tensor for tensor, of_train in self._noted if of_train == train]
            if noted:
                self._unreadable.update((i, train) for i in torch.cat(noted).unique().tolist() if i >= 0)
        self._noted.clear()
        return sorted(self.data.name(index, train) for index, train in self._unreadable)
