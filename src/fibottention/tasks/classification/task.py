"""Image classification: model, loss and metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from fibottention.adapters.report import SparsifyReport
from fibottention.adapters.timm import sparsify
from fibottention.errors import UserError
from fibottention.models.neighborhood_checkpoints import convert_checkpoint
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer
from fibottention.specs import AttentionSpec, Dense, fit_share
from fibottention.tasks.classification.config import AugmentConfig, ClassificationConfig
from fibottention.tasks.classification.data import ClassificationData, normalization
from fibottention.tasks.config import attention_spec
from fibottention.tasks.options import make_config
from fibottention.tasks.recognition import RecognitionTask
from fibottention.tasks.timm_model import check_timm_name, create_timm_model
from fibottention.tasks.weights import check_classes, load_into
from fibottention.training.run import Run, load_weights

__all__ = ["ClassificationTask", "build_model"]

_SAMPLES = 6


def build_model(config: ClassificationConfig, num_classes: int) -> tuple[nn.Module, SparsifyReport | None]:
    """The model of a configuration, with its attention spec put in, and what that did.

    Raises:
        UserError: If the model is unknown, cannot be made so, or cannot take the spec.
    """
    model_config, spec = config.model, attention_spec(config.attention)
    name = model_config.name.split(".")[0]
    if name in ("timesformer", "videomae", "vivit"):
        raise UserError(f"model.name={name} is for videos: take a video recipe, or --task video")
    check_timm_name(model_config.name)
    for reserved, instead in (("in_chans", "model.in_chans"), ("img_size", "data.image_size")):
        if reserved in model_config.options:
            raise UserError(f"model.options must not hold {reserved}; use {instead}")
    if model_config.options.get("num_classes", num_classes) != num_classes:
        raise UserError(
            f"model.options.num_classes={model_config.options['num_classes']} differs from the {num_classes} classes "
            "of the data"
        )
    options = {"num_classes": num_classes, "in_chans": model_config.in_chans, **model_config.options}
    if model_config.drop_path is not None:
        options["drop_path_rate"] = model_config.drop_path
    if model_config.drop is not None:
        options["drop_rate"] = model_config.drop
    sized = {"img_size": config.data.image_size}
    model = create_timm_model(model_config.name, model_config.pretrained, options, sized)
    if model_config.pretrained and model_config.checkpoint is None and not config.train.epochs:
        check_classes(model_config.name, model.pretrained_cfg["num_classes"], num_classes)
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
        load_into(model, weights, model_config.checkpoint, new_classifier=config.train.epochs > 0)
    return model, report


def _matched(model: nn.Module, spec: AttentionSpec, share: float) -> AttentionSpec:
    """The spec sized for a model; dense attention, which others are measured by, stays as it is."""
    if isinstance(spec, Dense):
        return spec
    most = max(layer.num_tokens for layer in sparsify(model, Dense()).layers)
    return fit_share(spec, share, lambda candidate: sparsify(model, candidate).density, most)


class ClassificationTask(RecognitionTask):
    """Image classification for the `Trainer`; see `RecognitionTask`."""

    sample_name = "images"

    def __init__(self, config: ClassificationConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.label_smoothing = config.augment.label_smoothing
        self.mixup = _mixup(config.augment, self.num_classes, config.train.batch_size) if config.train.epochs else None
        self.input_shape = (config.model.in_chans, config.data.image_size, config.data.image_size)

    @staticmethod
    def begin(config: ClassificationConfig) -> None:
        """See `RunTask`: images are normalized as they were for the weights."""
        found = _statistics(config)
        if found is not None and len(found[0]) == config.model.in_chans:
            config.data.mean, config.data.std = config.data.mean or found[0], config.data.std or found[1]

    @staticmethod
    def make_data(config: ClassificationConfig, train: bool, classes: Sequence[str] | None) -> ClassificationData:
        """See `RecognitionTask`."""
        return ClassificationData(config, train=train)

    @staticmethod
    def build_model(config: ClassificationConfig, num_classes: int) -> tuple[nn.Module, SparsifyReport | None]:
        """See `RecognitionTask`."""
        return build_model(config, num_classes)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """See `Task`."""
        images, targets, unreadable = batch
        self.note(unreadable, train=True)
        smoothing = self.label_smoothing
        if self.mixup is not None:
            images, targets = self.mixup(images, targets)
            smoothing = 0.0
        return F.cross_entropy(model(images), targets, label_smoothing=smoothing)

    def save_samples(self, run: Run) -> None:
        """See `RecognitionTask`."""
        if self.is_stream:
            return
        source, classes, saved = self.data.val_dataset.source, self.data.classes, []
        looked_at = min(len(source), 200)
        for i in range(looked_at):
            if len(saved) == _SAMPLES:
                break
            try:
                image, target = source.load(i * len(source) // looked_at)
            except Exception:
                continue  # reported by the evaluation
            if classes[target] not in [entry["class"] for entry in saved]:
                path = run.folder / "samples" / f"{len(saved)}.png"
                path.parent.mkdir(exist_ok=True)
                image.convert("RGB").save(path)
                saved.append({"file": f"samples/{path.name}", "class": classes[target]})
        run.write_json("samples.json", saved)


def _statistics(config: ClassificationConfig) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation that the weights of a configuration were trained with, if that is known."""
    if config.model.checkpoint is not None:
        parents = Path(config.model.checkpoint).absolute().parents
        runs = [
            Run(parent) for parent in parents if (parent / "best.json").is_file() or (parent / "checkpoints").is_dir()
        ]
        if not runs or not runs[0].config_path.is_file():
            return None
        saved = runs[0].read_yaml()
        if saved.get("task") != config.task:
            return None
        other = make_config({key: saved[key] for key in ("task", "data", "model") if key in saved})
        return normalization(other.data, other.model.in_chans)
    if not config.model.pretrained:
        return None
    check_timm_name(config.model.name)
    try:
        weights = timm.get_pretrained_cfg(config.model.name)
    except RuntimeError as error:  # a tag that the model has not
        raise UserError(f"model {config.model.name} cannot be made: {error}") from error
    return None if weights is None else (list(weights.mean), list(weights.std))


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
