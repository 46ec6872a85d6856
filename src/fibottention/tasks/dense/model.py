"""A backbone and a head, for images of any size."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2.functional import resize

from fibottention.adapters import SparsifyReport
from fibottention.tasks.config import attention_spec
from fibottention.tasks.dense.augment import fitted
from fibottention.tasks.dense.backbone import Backbone, build_backbone
from fibottention.tasks.dense.checkpoints import load_checkpoint
from fibottention.tasks.dense.config import DenseConfig, DenseDataConfig
from fibottention.tasks.dense.heads import DenseHead, Prediction, build_head, pyramid_channels
from fibottention.tasks.dense.published import adopt_published
from fibottention.tasks.dense.sources.base import Scene

__all__ = ["DenseModel", "build_model"]

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


class DenseModel(nn.Module):
    """Detects or segments.

    Images of one size go through the model together, others one after the other: there is no padding between images,
    so that what is found in one does not depend on the others of its batch. Each is padded to a multiple of the largest
    stride, whatever the batch.

    Attributes:
        has_new_classes: Whether it began from weights for other classes.

    Args:
        backbone: From images to maps.
        head: From maps to predictions.
        data: To which size images are brought for predictions, and over which sizes semantic ones are averaged.
    """

    def __init__(self, backbone: Backbone, head: DenseHead, data: DenseDataConfig | None = None) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.data = data or DenseDataConfig(test_size=None)
        self.has_new_classes = False
        data_config = getattr(backbone.model, "default_cfg", None) or {}
        for name, default in (("mean", _MEAN), ("std", _STD)):
            values = torch.tensor(data_config.get(name, default))[:, None, None]
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: list[Tensor], scenes: list[Scene]) -> dict[str, Tensor]:
        """The losses of a batch, each a mean over the images.

        Args:
            images: Of each image, ``(3, H, W)`` of uint8.
            scenes: What is in them.
        """
        total: dict[str, Tensor] = {}
        for places, size in _by_size(images):
            pixels = self._prepared([images[place] for place in places])
            losses = self.head.losses(self.backbone(pixels), pixels, size, [scenes[place] for place in places])
            for name, loss in losses.items():
                share = loss * (len(places) / len(images))
                total[name] = total[name] + share if name in total else share
        return total

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay, beside norms and biases: position and bias tables, queries."""
        marks = (".rpb", "relative_position_bias_table", "queries_", "level_embed")
        found = {name for name, _ in self.named_parameters() if any(mark in name for mark in marks)}
        own = getattr(self.backbone.model, "no_weight_decay", set)()
        return found | {f"backbone.model.{name}" for name in own}

    @torch.no_grad()
    def predict(self, images: list[Tensor]) -> list[Prediction]:
        """What is in images.

        Args:
            images: Of each image, ``(3, H, W)`` of uint8.

        Returns:
            Of each image, its objects, its segments, or its ``map`` of classes ``(H, W)``, at its own size.
        """
        found: list[Prediction] = [{}] * len(images)
        for places, size in _by_size(images):
            group = torch.stack([images[place] for place in places])
            for place, prediction in zip(places, self._predicted(group, size), strict=True):
                found[place] = prediction
        return found

    def _predicted(self, group: Tensor, size: tuple[int, int]) -> list[Prediction]:
        total: list[Tensor] = []
        predictions: list[Prediction] = []
        for scale in self.data.test_scales:
            scaled = self._scaled(group, scale)
            shape = (scaled.shape[-2], scaled.shape[-1])
            for flip in (False, True) if self.data.test_flip else (False,):
                pixels = self._prepared(scaled.flip(-1) if flip else scaled)
                predictions = self.head.predict(self.backbone(pixels), pixels, shape, size)
                if "labels" not in predictions[0]:
                    scores = [p["scores"].flip(-1) if flip else p["scores"] for p in predictions]
                    total = [t + s for t, s in zip(total, scores, strict=True)] if total else scores
        return [{"map": scores.argmax(0)} for scores in total] if total else predictions

    def _scaled(self, images: Tensor, scale: float) -> Tensor:
        """Images at the size for predictions, times a factor."""
        height, width = images.shape[-2:]
        shorter = scale * (self.data.test_size or min(height, width))
        longest = math.inf if self.data.test_size is None else scale * self.data.max_size
        wanted = fitted(height, width, shorter, longest)
        return images if wanted == (height, width) else resize(images, list(wanted))

    def _prepared(self, images: list[Tensor] | Tensor) -> Tensor:
        """Normalized pixels, padded with zeros at the right and at the bottom."""
        pixels = torch.stack(images) if isinstance(images, list) else images
        pixels = (pixels.to(self.mean.dtype) / 255 - self.mean) / self.std
        stride = self.backbone.strides[-1]
        height, width = pixels.shape[-2:]
        return F.pad(pixels, (0, -width % stride, 0, -height % stride))

    mean: Tensor
    std: Tensor


def _by_size(images: list[Tensor]) -> list[tuple[list[int], tuple[int, int]]]:
    """Places of the images of each size, and the size."""
    groups: dict[tuple[int, int], list[int]] = {}
    for place, image in enumerate(images):
        groups.setdefault((image.shape[-2], image.shape[-1]), []).append(place)
    return [(places, size) for size, places in groups.items()]


def build_model(
    config: DenseConfig, classes: list[str], things: list[bool]
) -> tuple[DenseModel, SparsifyReport | None]:
    """The model of a configuration, with its attention spec put in, and what that did.

    Args:
        config: All options; with a checkpoint in transformers' layout they take over its sizes, so that a run can be
            opened without it.
        classes: Names of the classes.
        things: Per class, whether its objects can be counted.

    Raises:
        UserError: If the model is unknown, cannot be made so, or cannot take the spec.
    """
    source = None if config.model.checkpoint is None else Path(config.model.checkpoint)
    if source is not None and source.is_dir():
        adopt_published(config.model, source, classes)
    backbone, report = build_backbone(config.model, attention_spec(config.attention), pyramid_channels(config.model))
    head = build_head(config, backbone, classes, things)
    model = DenseModel(backbone, head, config.data)
    if source is not None:
        model.has_new_classes = load_checkpoint(model, source, new_classes=config.train.epochs > 0)
    return model, report
