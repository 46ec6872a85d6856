"""The boxes and masks of Cascade Mask R-CNN (arXiv 1906.09756), which torchvision does not have."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, generalized_box_iou_loss

from fibottention.tasks.dense.heads.base import widened

__all__ = ["CascadeRoIHeads"]

_OVERLAPS = (0.5, 0.6, 0.7)
_BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
_LOSS_WEIGHTS = (1.0, 0.5, 0.25)
_BOX_CONVOLUTIONS = 4
_GIOU_WEIGHT = 10.0

_Targets = list[dict[str, Tensor]]


class _Predictor(nn.Module):
    """Scores of the classes, and one box for all of them."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(features, num_classes)
        self.bbox_pred = nn.Linear(features, 4)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.bbox_pred.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return widened((self.cls_score(x), self.bbox_pred(x)))


class CascadeRoIHeads(nn.Module):
    """Three stages of boxes, each on the boxes of the one before and trained at a larger overlap.

    Box heads of four convolutions and one linear layer with the GIoU loss, as in the published models of Swin and
    DiNAT; here one box serves all classes. Scores are averaged over the stages, and so are masks.

    Args:
        channels: Channels of the maps.
        num_classes: Number of classes.
        box_features: Channels of the linear layer of the box heads.
        box_pool: Takes the features of a box from the maps.
        mask_parts: Makes pool, head and predictor of the masks of a stage.
        common: Further arguments of torchvision's ``RoIHeads``.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int,
        box_features: int,
        box_pool: MultiScaleRoIAlign,
        mask_parts: Callable[[], dict[str, Any]],
        common: dict[str, Any],
    ) -> None:
        super().__init__()
        stages = []
        for overlap, weights in zip(_OVERLAPS, _BOX_WEIGHTS, strict=True):
            convolutions = [channels] * _BOX_CONVOLUTIONS
            head = FastRCNNConvFCHead((channels, 7, 7), convolutions, [box_features], nn.BatchNorm2d)
            thresholds = {"fg_iou_thresh": overlap, "bg_iou_thresh": overlap, "bbox_reg_weights": weights}
            predictor = _Predictor(box_features, num_classes + 1)
            stages.append(RoIHeads(box_pool, head, predictor, **{**common, **thresholds}, **mask_parts()))
        self.stages = nn.ModuleList(stages)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: _Targets | None = None,
    ) -> tuple[_Targets, dict[str, Tensor]]:
        """As torchvision's ``RoIHeads``: objects in evaluation, losses in training."""
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, image_shapes, targets)
        return self._objects(features, proposals, image_shapes), {}

    def _stages(self) -> Sequence[Any]:
        return list(self.stages)

    def _losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: _Targets,
    ) -> dict[str, Tensor]:
        losses = {}
        for number, (stage, weight) in enumerate(zip(self._stages(), _LOSS_WEIGHTS, strict=True), 1):
            proposals, matched, labels, wanted = stage.select_training_samples(proposals, targets)
            scores, deltas = _box_outputs(stage, features, proposals, image_shapes)
            all_labels = torch.cat(labels)
            positive = (all_labels > 0).nonzero().flatten()
            boxes = _decoded(stage, deltas, proposals)
            true = _decoded(stage, torch.cat(wanted), proposals)
            overlap_loss = generalized_box_iou_loss(boxes[positive], true[positive], reduction="sum")
            losses[f"loss_classifier_{number}"] = weight * F.cross_entropy(scores, all_labels)
            losses[f"loss_box_{number}"] = weight * _GIOU_WEIGHT * overlap_loss / len(all_labels)
            losses[f"loss_mask_{number}"] = weight * self._mask_loss(
                stage, features, proposals, image_shapes, targets, matched, labels
            )
            proposals = _refined(boxes, proposals, image_shapes)
        return losses

    @staticmethod
    def _mask_loss(
        stage: Any,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: _Targets,
        matched: list[Tensor],
        labels: list[Tensor],
    ) -> Tensor:
        positive = [(of_image > 0).nonzero().flatten() for of_image in labels]
        boxes = [proposal[kept] for proposal, kept in zip(proposals, positive, strict=True)]
        matched = [of_image[kept] for of_image, kept in zip(matched, positive, strict=True)]
        logits = _mask_logits(stage, features, boxes, image_shapes)
        masks, classes = [target["masks"] for target in targets], [target["labels"] for target in targets]
        return maskrcnn_loss(logits, boxes, masks, classes, matched)

    def _objects(
        self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> _Targets:
        *earlier, last = self._stages()
        probabilities = []
        for stage in earlier:
            scores, deltas = _box_outputs(stage, features, proposals, image_shapes)
            probabilities.append(scores.softmax(-1))
            proposals = _refined(_decoded(stage, deltas, proposals), proposals, image_shapes)
        scores, deltas = _box_outputs(last, features, proposals, image_shapes)
        probabilities.append(scores.softmax(-1))
        # Their softmax gives the mean probabilities back.
        logits = torch.stack(probabilities).mean(0).clamp(min=1e-12).log()
        found = last.postprocess_detections(logits, deltas.repeat(1, logits.shape[1]), proposals, image_shapes)
        boxes, scores, labels = found
        masks = [maskrcnn_inference(_mask_logits(s, features, boxes, image_shapes), labels) for s in self._stages()]
        return [
            {"boxes": b, "scores": s, "labels": c, "masks": torch.stack(m).mean(0)}
            for b, s, c, *m in zip(boxes, scores, labels, *masks, strict=True)
        ]


def _box_outputs(
    stage: Any, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    return stage.box_predictor(stage.box_head(stage.box_roi_pool(features, proposals, image_shapes)))


def _mask_logits(
    stage: Any, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
) -> Tensor:
    return stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, boxes, image_shapes)))


def _decoded(stage: Any, deltas: Tensor, proposals: list[Tensor]) -> Tensor:
    return stage.box_coder.decode(deltas, proposals)[:, 0]


def _refined(boxes: Tensor, proposals: list[Tensor], image_shapes: list[tuple[int, int]]) -> list[Tensor]:
    """The boxes of each image, cut to it."""
    parts = boxes.detach().split([len(proposal) for proposal in proposals])
    return [clip_boxes_to_image(part, shape) for part, shape in zip(parts, image_shapes, strict=True)]
