"""Mask R-CNN and Cascade Mask R-CNN of torchvision's parts."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, paste_masks_in_image
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import LevelMapper

from fibottention.errors import UserError
from fibottention.tasks.dense.backbone import Backbone
from fibottention.tasks.dense.heads.base import DenseHead, Prediction, widened
from fibottention.tasks.dense.heads.cascade import CascadeRoIHeads
from fibottention.tasks.dense.sources.base import Scene

__all__ = ["RcnnHead", "RcnnOptions"]

_MAPS = ["0", "1", "2", "3"]


@dataclass
class RcnnOptions:
    """Options of Mask R-CNN.

    The defaults are the published models'. Otherwise it is as torchvision has it: two samples per bin of a box's
    features, smooth L1 loss of boxes, and an object that no proposal overlaps enough teaches no box.

    Attributes:
        channels: Channels of the feature pyramid.
        anchor_sizes: Sides of the anchors, in pixels, of the four maps and of one of half the last one's size.
        box_features: Channels of the box head.
        mask_layers: Convolutions of the mask head.
        proposal_samples: Anchors per image that the proposals are trained on.
        train_proposals: Proposals per image that are kept in training.
        proposals: Proposals per image that are kept in evaluation.
        box_samples: Proposals per image that the boxes are trained on.
        score_threshold: Smallest score of an object that is found.
        nms_threshold: Overlap above which the lesser of two boxes of a class is dropped.
        detections: Most objects per image.
    """

    channels: int = 256
    anchor_sizes: list[int] = field(default_factory=lambda: [32, 64, 128, 256, 512])
    box_features: int = 1024
    mask_layers: int = 4
    proposal_samples: int = 256
    train_proposals: int = 1000
    proposals: int = 1000
    box_samples: int = 512
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    detections: int = 100


class _RPNHead(RPNHead):
    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return widened(super().forward(x))


class _BoxPredictor(FastRCNNPredictor):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return widened(super().forward(x))


class _MaskPredictor(MaskRCNNPredictor):
    def forward(self, input: Tensor) -> Tensor:
        return widened(super().forward(input))


def _roi_pool(backbone: Backbone, size: int) -> MultiScaleRoIAlign:
    """Takes the features of a box from the map that fits its size."""
    pool = MultiScaleRoIAlign(_MAPS, output_size=size, sampling_ratio=2)
    # It would guess the strides from the first image, of which the padding is not known to it.
    pool.scales = [1 / stride for stride in backbone.strides]
    levels = [int(math.log2(stride)) for stride in backbone.strides]
    pool.map_levels = LevelMapper(k_min=levels[0], k_max=levels[-1])
    return pool


class RcnnHead(DenseHead):
    """Feature pyramid, proposals, boxes and masks.

    Args:
        backbone: What gives the maps; a simple pyramid gets no other one.
        num_classes: Number of classes.
        options: The rest.
        is_cascade: Whether boxes are refined in three stages (Cascade Mask R-CNN).
    """

    def __init__(self, backbone: Backbone, num_classes: int, options: RcnnOptions, *, is_cascade: bool) -> None:
        super().__init__()
        if len(options.anchor_sizes) != len(_MAPS) + 1:
            raise UserError(
                f"model.head_options.anchor_sizes must be {len(_MAPS) + 1} numbers, got {options.anchor_sizes}"
            )
        channels = options.channels
        if backbone.has_simple_pyramid:
            self.pool, self.neck = LastLevelMaxPool(), None
        else:
            self.pool = None
            self.neck = FeaturePyramidNetwork(backbone.channels, channels, extra_blocks=LastLevelMaxPool())
        sizes = tuple((size,) for size in options.anchor_sizes)
        anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
        self.rpn = RegionProposalNetwork(
            anchors,
            _RPNHead(channels, anchors.num_anchors_per_location()[0]),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=options.proposal_samples,
            positive_fraction=0.5,
            pre_nms_top_n={"training": min(2000, 2 * options.train_proposals), "testing": options.proposals},
            post_nms_top_n={"training": options.train_proposals, "testing": options.proposals},
            nms_thresh=0.7,
        )
        common: dict[str, Any] = {
            "fg_iou_thresh": 0.5,
            "bg_iou_thresh": 0.5,
            "batch_size_per_image": options.box_samples,
            "positive_fraction": 0.25,
            "score_thresh": options.score_threshold,
            "nms_thresh": options.nms_threshold,
            "detections_per_img": options.detections,
        }

        def mask_parts() -> dict[str, Any]:
            layers = [channels] * options.mask_layers
            return {
                "mask_roi_pool": _roi_pool(backbone, 14),
                "mask_head": MaskRCNNHeads(channels, layers, dilation=1),
                "mask_predictor": _MaskPredictor(channels, channels, num_classes + 1),
            }

        pool = _roi_pool(backbone, 7)
        if is_cascade:
            self.roi_heads = CascadeRoIHeads(channels, num_classes, options.box_features, pool, mask_parts, common)
        else:
            self.roi_heads = RoIHeads(
                pool,
                TwoMLPHead(channels * 7 * 7, options.box_features),
                _BoxPredictor(options.box_features, num_classes + 1),
                bbox_reg_weights=None,
                **common,
                **mask_parts(),
            )

    def losses(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], scenes: list[Scene]
    ) -> dict[str, Tensor]:
        """See `DenseHead`."""
        targets = [
            {"boxes": scene["boxes"], "labels": scene["labels"] + 1, "masks": scene["masks"].to(torch.uint8)}
            for scene in scenes
        ]
        maps, images = self._maps(features), ImageList(pixels, [size] * len(pixels))
        proposals, losses = self.rpn(images, maps, targets)
        _, more = self.roi_heads(maps, proposals, images.image_sizes, targets)
        return {**losses, **more}

    def predict(
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], wanted: tuple[int, int]
    ) -> list[Prediction]:
        """See `DenseHead`."""
        maps, images = self._maps(features), ImageList(pixels, [size] * len(pixels))
        proposals, _ = self.rpn(images, maps)
        found, _ = self.roi_heads(maps, proposals, images.image_sizes)
        predictions = []
        for objects in found:
            scale = objects["boxes"].new_tensor([wanted[1] / size[1], wanted[0] / size[0]]).repeat(2)
            boxes = clip_boxes_to_image(objects["boxes"] * scale, wanted)
            masks = paste_masks_in_image(objects["masks"], boxes, wanted)[:, 0] > 0.5
            predictions.append(
                {"boxes": boxes, "labels": objects["labels"] - 1, "scores": objects["scores"], "masks": masks}
            )
        return predictions

    def _maps(self, features: list[Tensor]) -> dict[str, Tensor]:
        if self.neck is not None:
            return widened(dict(self.neck(OrderedDict(zip(_MAPS, features, strict=True)))))
        assert self.pool is not None
        maps, names = self.pool(list(features), list(features), list(_MAPS))
        return widened(dict(zip(names, maps, strict=True)))
