"""UperNet, Mask2Former and OneFormer of transformers, over maps that are computed already."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoBackbone,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    OneFormerConfig,
    OneFormerForUniversalSegmentation,
    PreTrainedConfig,
    PreTrainedModel,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)
from transformers.backbone_utils import BackboneConfigMixin
from transformers.modeling_outputs import BackboneOutput

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.dense.backbone import Backbone
from fibottention.tasks.dense.heads.base import DenseHead, Prediction, padded_to, resized_scores
from fibottention.tasks.dense.sources.base import VOID, Scene, mask_boxes

__all__ = ["Mask2FormerHead", "OneFormerHead", "UperNetHead", "head_defaults"]

_OBJECTS = 100  # most per image
_IGNORED = -100  # in the place of void, since a head may have a class of that number
_SURE = 0.8  # smallest score of a segment of a panoptic prediction
_SEEN = 0.8  # least share of a segment's mask that other segments do not cover
# "the task is panoptic" and so on in CLIP's tokens, which transformers' processor of OneFormer pads with zeros.
_TASK_TOKENS = {
    "panoptic": [49406, 518, 10549, 533, 1072, 24755, 49407],
    "instance": [49406, 518, 10549, 533, 34572, 49407],
    "semantic": [49406, 518, 10549, 533, 29119, 1550, 49407],
}
# What the data and the backbone decide, and OneFormer's training with texts.
_RESERVED = {
    "num_labels",
    "backbone_config",
    "id2label",
    "label2id",
    "loss_ignore_index",
    "auxiliary_in_channels",
    "is_training",
}


class _GivenMapsConfig(BackboneConfigMixin, PreTrainedConfig):
    model_type = "fibottention_given_maps"

    def __init__(self, channels: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.channels = channels or [1]
        self.stage_names = [f"stage{level}" for level in range(1, len(self.channels) + 1)]
        self._out_features, self._out_indices = self.stage_names, list(range(len(self.channels)))


class _GivenMaps(PreTrainedModel):
    """A backbone for transformers' heads that gives the maps it was given before."""

    config_class = _GivenMapsConfig

    def __init__(self, config: _GivenMapsConfig) -> None:
        super().__init__(config)
        self.channels = config.channels
        self.maps: tuple[Tensor, ...] = ()
        self.post_init()

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BackboneOutput:
        return BackboneOutput(feature_maps=cast(Any, self.maps))

    def forward_with_filtered_kwargs(self, pixel_values: Tensor, **kwargs: Any) -> BackboneOutput:
        return self(pixel_values)


class _Mask2FormerConfig(Mask2FormerConfig):
    backbones_supported: ClassVar[list[str]] = [_GivenMapsConfig.model_type]


class _OneFormerConfig(OneFormerConfig):
    backbones_supported: ClassVar[list[str]] = [_GivenMapsConfig.model_type]


_CONFIGS: dict[str, type[Any]] = {
    "upernet": UperNetConfig,
    "mask2former": _Mask2FormerConfig,
    "oneformer": _OneFormerConfig,
}
AutoBackbone.register(_GivenMapsConfig, _GivenMaps, exist_ok=True)


@contextmanager
def _given(backbone: Any, maps: list[Tensor]) -> Iterator[None]:
    """Let a backbone give these maps, which it forgets afterwards, since they hold the graph of a whole step."""
    backbone.maps = tuple(maps)
    try:
        yield
    finally:
        backbone.maps = ()


def head_defaults(head: str) -> dict[str, Any]:
    """The options of ``"upernet"``, ``"mask2former"`` or ``"oneformer"`` and their defaults."""
    return {name: value for name, value in _CONFIGS[head]().to_dict().items() if name not in _RESERVED}


def _make_config(head: str, backbone: Backbone, num_classes: int, options: dict[str, Any], **fixed: Any) -> Any:
    cls, defaults = _CONFIGS[head], head_defaults(head)
    for name in options:
        if name not in defaults:
            where = f"see transformers.{cls.__name__.removeprefix('_')}"
            raise UserError(f"model.head_options has no {name}{nearest(name, list(defaults), where)}")
    maps = _GivenMapsConfig(backbone.channels)
    for name, value in options.items():
        is_count = type(defaults[name]) is int and defaults[name] >= 1
        if is_count and isinstance(value, int | float) and value < 1:
            raise UserError(f"model.head_options.{name} must be at least 1, got {value}")
    # YAML has 0 and 1 where transformers wants 0.0 and 1.0.
    given = {n: float(v) if type(v) is int and type(defaults[n]) is float else v for n, v in options.items()}
    try:
        return cls(backbone_config=maps, num_labels=num_classes, **fixed, **given)
    except Exception as error:  # whatever the configuration makes of its arguments
        raise UserError(f"model.head_options: {' '.join(str(error).split())}") from error


def _make_net(cls: type[Any], config: Any) -> Any:
    try:
        return cls(config)
    except Exception as error:  # whatever the model's constructor makes of sizes that do not fit together
        raise UserError(f"model.head_options do not fit together: {' '.join(str(error).split())}") from error


def _count_masks(labels: list[Tensor], device: torch.device) -> Tensor:
    """The masks that the losses are a mean over, of this process, as gradients are averaged over processes.

    transformers' own count waits for all processes, which may have another number of sizes of images, and divides by
    the number of processes twice.
    """
    return torch.tensor(max(1.0, float(sum(len(of_image) for of_image in labels))), device=device)


class UperNetHead(DenseHead):
    """UperNet with its auxiliary head, for semantic segmentation.

    Args:
        backbone: What gives the maps.
        num_classes: Classes of the head.
        options: Arguments of transformers' ``UperNetConfig``.
        places: Number of each class of the data among those of the head.
    """

    def __init__(self, backbone: Backbone, num_classes: int, options: dict[str, Any], places: Sequence[int]) -> None:
        super().__init__()
        if num_classes < 2:
            raise UserError("model.head=upernet needs at least 2 classes, and the data have one")
        self.register_buffer("places", torch.tensor(places), persistent=False)
        config = _make_config("upernet", backbone, num_classes, options, loss_ignore_index=_IGNORED)
        self.net: Any = _make_net(UperNetForSemanticSegmentation, config)

    def losses(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], scenes: list[Scene]
    ) -> dict[str, Tensor]:
        """See `DenseHead`."""
        labels = torch.stack([padded_to(scene["map"], pixels, VOID) for scene in scenes])
        labels = torch.where(labels == VOID, _IGNORED, self.places[labels.clamp(max=len(self.places) - 1)])
        if bool((labels != _IGNORED).any()):
            return {"loss_class": self._run(features, pixels, labels=labels).loss}
        # The mean over no pixels is no number; all parameters have a gradient of zero instead.
        return {"loss_class": 0 * self._run(features, pixels, labels=torch.zeros_like(labels)).loss}

    def _run(self, features: list[Tensor], pixels: Tensor, **labels: Any) -> Any:
        with _given(self.net.backbone, features):
            return self.net(pixels, **labels)

    def predict(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], wanted: tuple[int, int]
    ) -> list[Prediction]:
        """See `DenseHead`."""
        logits = self._run(features, pixels).logits
        return [{"scores": resized_scores(of_image, size, wanted).softmax(0)[self.places]} for of_image in logits]

    places: Tensor


class _QueryHead(DenseHead):
    """Queries, each with a class and a mask.

    Args:
        backbone: What gives the maps.
        things: Per class, whether its objects can be counted.
        options: Arguments of transformers' configuration.
        target: ``"instance"``, ``"semantic"`` or ``"panoptic"``.
        places: Number of each class of the data among those of the head.
        num_classes: Classes of the head.
    """

    name: ClassVar[str]
    net_class: ClassVar[type[Any]]

    def __init__(
        self,
        backbone: Backbone,
        things: list[bool],
        options: dict[str, Any],
        target: str,
        places: Sequence[int],
        num_classes: int,
    ) -> None:
        super().__init__()
        self.net: Any = _make_net(self.net_class, _make_config(self.name, backbone, num_classes, options))
        self.net.criterion.get_num_masks = _count_masks
        self.things, self.target = things, target
        self.register_buffer("places", torch.tensor(places), persistent=False)

    def losses(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], scenes: list[Scene]
    ) -> dict[str, Tensor]:
        """See `DenseHead`."""
        pairs = [self._masks(scene) for scene in scenes]
        masks = [padded_to(mask.float(), pixels, 0.0) for mask, _ in pairs]
        labels = [self.places[of_image] for _, of_image in pairs]
        output = self._run(features, pixels, mask_labels=masks, class_labels=labels)
        return {"loss_queries": output.loss.squeeze()}

    def _run(self, features: list[Tensor], pixels: Tensor, **inputs: Any) -> Any:
        with _given(self.net.model.pixel_level_module.encoder, features):
            return self.net(pixels, **inputs)

    @staticmethod
    def _masks(scene: Scene) -> tuple[Tensor, Tensor]:
        """The masks ``(N, H, W)`` that queries are to find, and their classes."""
        if "masks" in scene:
            return scene["masks"], scene["labels"]
        pixels = scene["map"]
        if "labels" not in scene:
            labels = pixels.unique()
            labels = labels[labels != VOID]
            return pixels == labels[:, None, None], labels
        numbers = torch.arange(1, len(scene["labels"]) + 1, device=pixels.device)
        masks = pixels == numbers[:, None, None]
        kept = masks.flatten(1).any(1) & ~scene["crowd"]
        return masks[kept], scene["labels"][kept]

    def predict(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], wanted: tuple[int, int]
    ) -> list[Prediction]:
        """See `DenseHead`."""
        output = self._run(features, pixels)
        read = {"instance": self._instances, "semantic": self._semantic, "panoptic": self._panoptic}[self.target]
        predictions = []
        for classes, masks in zip(output.class_queries_logits, output.masks_queries_logits, strict=True):
            masks = torch.nn.functional.interpolate(
                masks[None].float(), pixels.shape[-2:], mode="bilinear", align_corners=False
            )[0]
            # The last one is that there is nothing; the probabilities of classes that are not wanted are lost.
            scores = classes.float().softmax(-1)
            scores = torch.cat([scores[:, self.places], scores[:, -1:]], dim=1)
            predictions.append(read(scores, resized_scores(masks, size, wanted)))
        return predictions

    @staticmethod
    def _semantic(classes: Tensor, masks: Tensor) -> Prediction:
        return {"scores": torch.einsum("qc,qhw->chw", classes[:, :-1], masks.sigmoid())}

    @staticmethod
    def _instances(classes: Tensor, masks: Tensor) -> Prediction:
        """The best pairs of query and class, scored by the class and by how sure the mask is inside."""
        probabilities = classes[:, :-1]
        scores, places = probabilities.flatten().topk(min(_OBJECTS, probabilities.numel()))
        labels, masks = places % probabilities.shape[1], masks[places // probabilities.shape[1]]
        inside = masks > 0
        area = inside.flatten(1).sum(1)
        sure = (masks.sigmoid() * inside).flatten(1).sum(1) / area.clamp(min=1)
        found = area > 0
        inside = inside[found]
        return {"boxes": mask_boxes(inside), "labels": labels[found], "scores": (scores * sure)[found], "masks": inside}

    def _panoptic(self, classes: Tensor, masks: Tensor) -> Prediction:
        """Sure queries share the pixels by score; segments of which others cover much are left out."""
        scores, labels = classes.max(-1)
        kept = (labels != len(self.things)) & (scores > _SURE)
        scores, labels, shares = scores[kept], labels[kept], masks[kept].sigmoid()
        numbers = torch.zeros(masks.shape[-2:], dtype=torch.int64, device=masks.device)
        found: list[tuple[int, float]] = []
        stuff: dict[int, int] = {}
        if len(scores):
            owner = (scores[:, None, None] * shares).argmax(0)
            for query, (label, score) in enumerate(zip(labels.tolist(), scores.tolist(), strict=True)):
                own, whole = owner == query, shares[query] >= 0.5
                visible = own & whole
                if not visible.any() or own.sum() / whole.sum() < _SEEN:
                    continue
                number = stuff.get(label)
                if number is None:
                    found.append((label, score))
                    number = len(found)
                    if not self.things[label]:
                        stuff[label] = number
                numbers[visible] = number
        return {
            "map": numbers,
            "labels": torch.tensor([label for label, _ in found], dtype=torch.int64, device=masks.device),
            "scores": torch.tensor([score for _, score in found], device=masks.device),
        }

    places: Tensor


class Mask2FormerHead(_QueryHead):
    """Mask2Former (arXiv 2112.01527); see `_QueryHead`."""

    name = "mask2former"
    net_class = Mask2FormerForUniversalSegmentation


class OneFormerHead(_QueryHead):
    """OneFormer (arXiv 2211.06220), told its target; see `_QueryHead`.

    It learns without the contrast between its queries and texts about the image.
    """

    name = "oneformer"
    net_class = OneFormerForUniversalSegmentation

    def __init__(
        self,
        backbone: Backbone,
        things: list[bool],
        options: dict[str, Any],
        target: str,
        places: Sequence[int],
        num_classes: int,
    ) -> None:
        super().__init__(backbone, things, options, target, places, num_classes)
        del self.net.criterion.logit_scale  # of the contrast
        # As in the released code; transformers' 0.02 leaves all queries alike.
        decoder, module = self.net.model.pixel_level_module.decoder, self.net.model.transformer_module
        for table in (decoder.level_embed, module.level_embed.weight, module.queries_embedder.weight):
            nn.init.normal_(table)
        length, words = self.net.config.task_seq_len, _TASK_TOKENS[target]
        if length < len(words):
            raise UserError(f"model.head_options.task_seq_len must be at least {len(words)}, got {length}")
        tokens = torch.tensor([[*words, *[0] * (length - len(words))]])
        self.register_buffer("task", tokens, persistent=False)

    def _run(self, features: list[Tensor], pixels: Tensor, **inputs: Any) -> Any:
        return super()._run(features, pixels, task_inputs=self.task.expand(len(pixels), -1), **inputs)

    task: Tensor
