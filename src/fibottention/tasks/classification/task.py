"""Image classification: model, loss and metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import Mixup
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from fibottention.adapters.report import SparsifyReport
from fibottention.adapters.timm import sparsify
from fibottention.errors import UserError
from fibottention.models.neighborhood_checkpoints import convert_checkpoint
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer
from fibottention.specs import AttentionSpec, Dense, fit_share, nearest
from fibottention.tasks.classification.config import AugmentConfig, ClassificationConfig, attention_spec
from fibottention.tasks.classification.data import ClassificationData
from fibottention.training.engine import Evaluation
from fibottention.training.run import load_weights

__all__ = ["ClassificationTask", "build_model", "load_into"]


def build_model(config: ClassificationConfig, num_classes: int) -> tuple[nn.Module, SparsifyReport | None]:
    """The model of a configuration, with its attention spec put in, and what that did.

    Raises:
        UserError: If the model is unknown, cannot be made so, or cannot take the spec.
    """
    model_config, spec = config.model, attention_spec(config.attention)
    name = model_config.name.split(".")[0]
    if not timm.is_model(name):
        raise UserError(f"no model is named {model_config.name!r}{nearest(name, timm.list_models(), 'see timm')}")
    for reserved, instead in (("in_chans", "model.in_chans"), ("img_size", "data.image_size")):
        if reserved in model_config.options:
            raise UserError(f"model.options must not hold {reserved}; use {instead}")
    if model_config.options.get("num_classes", num_classes) != num_classes:
        raise UserError(
            f"model.options.num_classes={model_config.options['num_classes']} differs from the {num_classes} classes "
            "of the data"
        )
    options = {"num_classes": num_classes, "in_chans": model_config.in_chans, **model_config.options}
    if model_config.drop_path:
        options["drop_path_rate"] = model_config.drop_path
    if model_config.drop:
        options["drop_rate"] = model_config.drop
    model = _create(model_config.name, model_config.pretrained, options, config.data.image_size)
    report = None
    if spec is None and model_config.match_macs is not None:
        raise UserError("model.match_macs needs an attention spec, got attention.name=none")
    if spec is not None:
        try:
            if model_config.match_macs is not None:
                spec = _matched(model, spec, model_config.match_macs)
            report = sparsify(model, spec)
        except ValueError as error:
            raise UserError(f"attention {spec.name} in {model_config.name}: {error}") from error
    if model_config.checkpoint is not None:
        weights = load_weights(Path(model_config.checkpoint))
        if isinstance(model, NeighborhoodTransformer):
            weights = convert_checkpoint(weights, model)
        load_into(model, weights, model_config.checkpoint, new_classifier=True)
    return model, report


def _matched(model: nn.Module, spec: AttentionSpec, share: float) -> AttentionSpec:
    """The spec sized for a model; dense attention, which others are measured by, stays as it is."""
    if isinstance(spec, Dense):
        return spec
    most = max(layer.num_tokens for layer in sparsify(model, Dense()).layers)
    return fit_share(spec, share, lambda candidate: sparsify(model, candidate).density, most)


def _create(name: str, pretrained: bool, options: dict[str, Any], image_size: int) -> nn.Module:
    """The model of timm for an image size; convolutional models, which take any, have no such argument."""
    for sized in (True, False):
        arguments: dict[str, Any] = {**options, "img_size": image_size} if sized else options
        try:
            return timm.create_model(name, pretrained=pretrained, **arguments)
        except Exception as error:  # whatever the model's constructor makes of its arguments
            if not (sized and isinstance(error, TypeError) and "'img_size'" in str(error)):
                raise UserError(f"model {name} cannot be made: {' '.join(str(error).split())}") from error
    raise AssertionError("unreachable")


def load_into(model: nn.Module, weights: dict[str, Tensor], source: object, *, new_classifier: bool = False) -> None:
    """Load weights into a model, or say which do not fit.

    Args:
        model: The model.
        weights: Tensors by name.
        source: What to call the weights in a message.
        new_classifier: Leave out classifier weights of another shape (another number of classes).

    Raises:
        UserError: If names or shapes differ.
    """
    own = model.state_dict()
    classifier = getattr(model, "default_cfg", {}).get("classifier") or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)

    def is_classifier(name: str) -> bool:
        return new_classifier and any(name.startswith(f"{head}.") for head in heads)

    kept = {k: v for k, v in weights.items() if not (is_classifier(k) and k in own and own[k].shape != v.shape)}
    missing = [k for k in own if k not in kept and not is_classifier(k)]
    unexpected = [k for k in kept if k not in own]
    shapes = [k for k in kept if k in own and own[k].shape != kept[k].shape]
    problems = []
    for label, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(f"{len(names)} {label} ({shown})")
    if problems:
        raise UserError(f"the weights in {source} do not fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(kept, strict=False)


class ClassificationTask:
    """Image classification for the `Trainer`; see `fibottention.training.engine.Task`.

    Args:
        config: All options.
        train: Whether training images are needed.
        model: The model; made from the configuration if None.
    """

    main_metric = "top1"

    def __init__(self, config: ClassificationConfig, *, train: bool = True, model: nn.Module | None = None) -> None:
        self.data = ClassificationData(config, train=train)
        self.num_classes = len(self.data.classes)
        if self.num_classes < 2:
            raise UserError(f"the data have only one class ({self.data.classes[0]}); classification needs at least 2")
        self.sparsify_report: SparsifyReport | None = None
        if model is None:
            # Weights are drawn in a fork of the generator, so the same seed gives the same weights whatever ran before.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.train.seed)
                model, self.sparsify_report = build_model(config, self.num_classes)
        self.model = model
        self.train_loader, self.val_loader = self.data.train_loader, self.data.val_loader
        self.is_stream = self.data.is_stream
        self.label_smoothing = config.augment.label_smoothing
        self.mixup = _mixup(config.augment, self.num_classes, config.train.batch_size)
        self._noted: list[tuple[Tensor, bool]] = []
        self._unreadable: set[tuple[int, bool]] = set()

    def set_epoch(self, epoch: int) -> None:
        """See `Task`."""
        self.unreadable()  # takes up what the last epoch noted
        self.data.set_epoch(epoch)

    def batch_length(self, batch: list[Tensor]) -> int:
        """See `Task`."""
        return len(batch[1])

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """See `Task`."""
        images, targets, unreadable = batch
        self._note(unreadable, train=True)
        smoothing = self.label_smoothing
        if self.mixup is not None:
            images, targets = self.mixup(images, targets)
            smoothing = 0.0
        return F.cross_entropy(model(images), targets, label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, batches: Iterator[list[Tensor]], accelerator: Accelerator) -> Evaluation:
        """Top-1, top-5, loss and confusion matrix over the images that can be read."""
        classes, device = self.num_classes, accelerator.device
        # Every process sees all gathered images, so the metrics must not be added up over processes again.
        common: dict[str, Any] = {"num_classes": classes, "validate_args": False, "sync_on_compute": False}
        top1 = MulticlassAccuracy(average="micro", **common).to(device)
        top5 = MulticlassAccuracy(average="micro", top_k=min(5, classes), **common).to(device)
        confusion = MulticlassConfusionMatrix(**common).to(device)
        loss_sum, count = 0.0, 0
        for images, targets, unreadable in batches:
            self._note(unreadable, train=False)
            logits = model(images).float()
            # Gathering drops the images that were repeated to fill the last batch of all processes.
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
            raise UserError("none of the validation images could be read")
        return Evaluation(
            {
                "val_loss": loss_sum / count,
                "top1": 100 * float(top1.compute()),
                "top5": 100 * float(top5.compute()),
            },
            {"images": count, "classes": self.data.classes, "confusion": confusion.compute().tolist()},
        )

    def _note(self, unreadable: Tensor, train: bool) -> None:
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


def _mixup(augment: AugmentConfig, num_classes: int, batch_size: int) -> Mixup | None:
    if not augment.mixup and not augment.cutmix:
        return None
    if batch_size % 2:
        raise UserError(f"train.batch_size must be even with augment.mixup or augment.cutmix, got {batch_size}")
    return Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        prob=augment.mix_probability,
        label_smoothing=augment.label_smoothing,
        num_classes=num_classes,
    )
