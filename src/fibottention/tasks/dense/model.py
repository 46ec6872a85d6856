"""A backbone and a head, for images of any size."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fibottention.adapters import SparsifyReport
from fibottention.tasks.config import attention_spec
from fibottention.tasks.dense.backbone import Backbone, build_backbone
from fibottention.tasks.dense.checkpoints import load_checkpoint
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.heads import DenseHead, Prediction, build_head
from fibottention.tasks.dense.sources.base import Scene

__all__ = ["DenseModel", "build_model"]

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


class DenseModel(nn.Module):
    """Detects or segments.

    Images of one size go through the model together, others one after the other: there is no padding between images,
    so that what is found in one does not depend on the others of its batch. Each is padded to a multiple of the largest
    stride, whatever the batch.

    Args:
        backbone: From images to maps.
        head: From maps to predictions.
        test_scales: Factors of the images' size over which a semantic prediction is averaged.
        test_flip: Whether it is averaged over mirrored images as well.
    """

    def __init__(
        self, backbone: Backbone, head: DenseHead, test_scales: list[float] | None = None, test_flip: bool = False
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.test_scales, self.test_flip = test_scales or [1.0], test_flip
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
        marks = (".rpb", "relative_position_bias_table", "pos_embed", "queries_", "level_embed")
        return {name for name, _ in self.named_parameters() if any(mark in name for mark in marks)}

    def predict(self, images: list[Tensor], sizes: list[tuple[int, int]] | None = None) -> list[Prediction]:
        """What is in images.

        Args:
            images: Of each image, ``(3, H, W)`` of uint8.
            sizes: Height and width of the predictions; those of the images if None.

        Returns:
            Of each image, its objects, its segments, or its ``map`` of classes ``(H, W)``.
        """
        sizes = [(image.shape[-2], image.shape[-1]) for image in images] if sizes is None else sizes
        found: list[Prediction] = [{}] * len(images)
        for places, size in _by_size(images):
            group = torch.stack([images[place] for place in places])
            for place, prediction in zip(places, self._predicted(group, size, [sizes[p] for p in places]), strict=True):
                found[place] = prediction
        return found

    def _predicted(self, group: Tensor, size: tuple[int, int], sizes: list[tuple[int, int]]) -> list[Prediction]:
        total: list[Tensor] = []
        predictions: list[Prediction] = []
        for scale in self.test_scales:
            scaled = group
            if scale != 1:
                shape = [max(1, round(side * scale)) for side in size]
                scaled = F.interpolate(group.float(), shape, mode="bilinear", align_corners=False, antialias=True)
            for flip in (False, True) if self.test_flip else (False,):
                pixels = self._prepared(scaled.flip(-1) if flip else scaled)
                shape = (scaled.shape[-2], scaled.shape[-1])
                predictions = self.head.predict(self.backbone(pixels), pixels, shape, sizes)
                if "map" not in predictions[0] and "boxes" not in predictions[0]:
                    scores = [p["scores"].flip(-1) if flip else p["scores"] for p in predictions]
                    total = [t + s for t, s in zip(total, scores, strict=True)] if total else scores
        return [{"map": scores.argmax(0)} for scores in total] if total else predictions

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


def build_model(config: DenseConfig, things: list[bool]) -> tuple[DenseModel, SparsifyReport | None]:
    """The model of a configuration, with its attention spec put in, and what that did.

    Args:
        config: All options.
        things: Per class, whether its objects can be counted.

    Raises:
        UserError: If the model is unknown, cannot be made so, or cannot take the spec.
    """
    backbone, report = build_backbone(config.model, attention_spec(config.attention))
    head = build_head(config, backbone, things)
    model = DenseModel(backbone, head, config.data.test_scales, config.data.test_flip)
    if config.model.checkpoint is not None:
        load_checkpoint(model, Path(config.model.checkpoint))
    return model, report
