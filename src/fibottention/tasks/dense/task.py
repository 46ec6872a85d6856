"""Detection and segmentation for the trainer."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn

from fibottention.analysis.cost import forward_macs
from fibottention.errors import UserError
from fibottention.tasks.base import RunTask
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.data import Batch, DenseData
from fibottention.tasks.dense.metrics import make_metric
from fibottention.tasks.dense.model import DenseModel, build_model
from fibottention.training.engine import Evaluation
from fibottention.training.run import Run, write_atomically

__all__ = ["SCORES", "DenseTask"]

_SAMPLES = 6
SCORES = {"instance": "mask_ap", "semantic": "miou", "panoptic": "pq"}


class DenseTask(RunTask):
    """A detector or segmenter for the `Trainer`.

    Args:
        config: All options.
        train: Whether training data are needed.
        model: The model; made from the configuration if None.
    """

    sample_name = "images"
    is_stream = False

    def __init__(self, config: DenseConfig, *, train: bool = True, model: DenseModel | None = None) -> None:
        config.check()
        self.config = config
        train = train and config.train.epochs > 0
        self.data = DenseData(config, train=train)
        if train and config.model.head == "upernet":
            self._check_batches()
        self.model: nn.Module
        if model is not None:
            self.model = model
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.train.seed)
                self.model, self.sparsify_report = build_model(config, self.data.classes, self.data.val_source.things)
        state = PartialState()
        if config.model.head == "upernet" and state.num_processes > 1 and str(state.device).startswith("cuda"):
            # A process has few images. Those of a batch have one size, so that all processes take part as often.
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.train_loader, self.val_loader = self.data.train_loader, self.data.val_loader
        self.metric = make_metric(self.data.val_source)
        self._unreadable: set[tuple[int, bool]] = set()
        self._noted: list[Tensor] = []

    def _check_batches(self) -> None:
        batch, crop = self.config.train.batch_size, self.config.augment.crop
        if crop is None or min(batch, len(self.data.train_dataset)) < 2:
            raise UserError(
                "model.head=upernet normalizes over the batch, which needs augment.crop, so that all images have one "
                f"size, train.batch_size of at least 2, got {batch}, and as many images"
            )

    @classmethod
    def restore_model(cls, config: DenseConfig, saved: dict[str, Any]) -> nn.Module:
        """See `RunTask`."""
        return build_model(config, saved["classes"], saved["things"])[0]

    def overview(self) -> str:
        """See `RunTask`."""
        data, problems = self.data, self.data.problems()
        images = data.train_dataset if self.config.train.epochs else data.val_dataset
        text = f"{self.config.model.head}, {len(images)} images, {len(data.classes)} classes"
        if (names := self.config.model.head_classes) is not None:
            text += f" (by their names among the {len(names)} of the head)"
        if getattr(self.model, "has_new_classes", False):
            text += ", a new classifier"
        if problems:
            text += f", {len(problems)} annotations or images mended or left out (the first: {problems[0]})"
        return text

    def summary(self) -> dict[str, Any]:
        """See `RunTask`."""
        images = {"train_images": len(self.data.train_dataset)} if self.config.train.epochs else {}
        return {"classes": self.data.classes, **images}

    def macs(self) -> int:
        """Of the first validation image, whose objects a detector's cost depends on."""
        (image, _), _, _ = self.data.val_dataset[0]
        device = next(self.model.parameters()).device
        return forward_macs(self.model, lambda model: model.predict([image.to(device)]))

    def set_epoch(self, epoch: int) -> None:
        """See `Task`."""
        self.data.set_epoch(epoch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        self._noted.append(batch["unreadable"])
        return torch.stack(list(model(batch["images"], batch["scenes"]).values())).sum()

    def batch_length(self, batch: Batch) -> int:
        """See `Task`."""
        return len(batch["images"])

    def score(self, metrics: dict[str, float]) -> float:
        """See `Task`."""
        return metrics[SCORES[self.config.data.target]]

    def evaluate(self, model: Any, batches: Iterator[Batch], accelerator: Accelerator) -> Evaluation:
        """Predict at the size of the files, and compare by the metric of the target."""
        records: list[tuple[int, Any]] = []
        for batch in batches:
            self._unreadable.update((i, False) for i in batch["unreadable"].tolist() if i >= 0)
            readable = [place for place, index in enumerate(batch["indices"].tolist()) if index >= 0]
            if not readable:
                continue
            found = model.predict([batch["images"][place] for place in readable])
            for place, prediction in zip(readable, found, strict=True):
                record = self.metric.record(prediction, batch["scenes"][place])
                records.append((int(batch["indices"][place]), record))
        # The last batches of several processes repeat images; each counts once.
        by_image = dict(sorted(dict(gather_object(records)).items()))
        if not by_image:
            raise UserError("none of the validation images could be read")
        metrics, details = self.metric.summarize(by_image)
        source = self.data.val_source
        return Evaluation(
            metrics, {"images": len(by_image), "classes": source.classes, "things": source.things, **details}
        )

    def unreadable(self) -> list[str]:
        """See `Task`."""
        if self._noted:
            self._unreadable.update((i, True) for i in torch.cat(self._noted).unique().tolist() if i >= 0)
            self._noted.clear()
        return sorted(self.data.name(index, train) for index, train in self._unreadable)

    def save_samples(self, run: Run) -> None:
        """See `RunTask`; also what was wrong with the annotations."""
        source, saved = self.data.val_source, []
        count = min(_SAMPLES, len(source))
        for place in range(count):
            index = place * len(source) // count
            try:
                image, _ = source.load(index)
            except Exception:
                continue  # reported by the evaluation
            path = run.folder / "samples" / f"{place}.png"
            path.parent.mkdir(exist_ok=True)
            image.save(path)
            saved.append({"file": f"samples/{path.name}", "class": source.path(index).name})
        run.write_json("samples.json", saved)
        if problems := self.data.problems():
            text = "".join(f"{problem}\n" for problem in problems)
            write_atomically(run.folder / "annotation_problems.txt", lambda path: path.write_text(text))
