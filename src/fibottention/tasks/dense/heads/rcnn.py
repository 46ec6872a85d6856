"""Mask R-CNN and Cascade Mask R-CNN of torchvision's parts."""

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
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from fibottention.errors import UserError
from fibottention.tasks.dense.backbone import Backbone
from fibottention.tasks.dense.heads.base import DenseHead, Prediction
from fibottention.tasks.dense.heads.cascade import CascadeRoIHeads
from fibottention.tasks.dense.sources.base import Scene

__all__ = ["RcnnHead", "RcnnOptions"]

_MAPS = ["0", "1", "2", "3"]


@dataclass
class RcnnOptions:
    """Options of Mask R-CNN; the defaults are those of the published models.

    Attributes:
        channels: Channels of the feature pyramid.
        anchor_sizes: Sides of the anchors, in pixels, of the four maps and of one of half the last one's size.
        box_features: Channels of the box head.
        mask_layers: Convolutions of the mask head.
        proposal_samples: Anchors per image that the proposals are trained on.
        proposals: Proposals per image that are kept.
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
    proposals: int = 1000
    box_samples: int = 512
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    detections: int = 100


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
        if backbone.is_pyramid:
            channels = backbone.channels[0]
            self.pool, self.neck = LastLevelMaxPool(), None
        else:
            self.pool = None
            self.neck = FeaturePyramidNetwork(backbone.channels, channels, extra_blocks=LastLevelMaxPool())
        sizes = tuple((size,) for size in options.anchor_sizes)
        anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
        self.rpn = RegionProposalNetwork(
            anchors,
            RPNHead(channels, anchors.num_anchors_per_location()[0]),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=options.proposal_samples,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * options.proposals, "testing": options.proposals},
            post_nms_top_n={"training": options.proposals, "testing": options.proposals},
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
                "mask_roi_pool": MultiScaleRoIAlign(_MAPS, output_size=14, sampling_ratio=2),
                "mask_head": MaskRCNNHeads(channels, layers, dilation=1),
                "mask_predictor": MaskRCNNPredictor(channels, channels, num_classes + 1),
            }

        pool = MultiScaleRoIAlign(_MAPS, output_size=7, sampling_ratio=2)
        if is_cascade:
            self.roi_heads = CascadeRoIHeads(channels, num_classes, options.box_features, pool, mask_parts, common)
        else:
            self.roi_heads = RoIHeads(
                pool,
                TwoMLPHead(channels * 7 * 7, options.box_features),
                FastRCNNPredictor(options.box_features, num_classes + 1),
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
        self, features: list[Tensor], pixels: Tensor, size: tuple[int, int], sizes: list[tuple[int, int]]
    ) -> list[Prediction]:
        """See `DenseHead`."""
        maps, images = self._maps(features), ImageList(pixels, [size] * len(pixels))
        proposals, _ = self.rpn(images, maps)
        found, _ = self.roi_heads(maps, proposals, images.image_sizes)
        predictions = []
        for objects, wanted in zip(found, sizes, strict=True):
            scale = objects["boxes"].new_tensor([wanted[1] / size[1], wanted[0] / size[0]]).repeat(2)
            boxes = objects["boxes"] * scale
            masks = paste_masks_in_image(objects["masks"], boxes, wanted)[:, 0] > 0.5
            predictions.append(
                {"boxes": boxes, "labels": objects["labels"] - 1, "scores": objects["scores"], "masks": masks}
            )
        return predictions

    def _maps(self, features: list[Tensor]) -> dict[str, Tensor]:
        if self.neck is not None:
            return self.neck(OrderedDict(zip(_MAPS, features, strict=True)))
        assert self.pool is not None
        maps, names = self.pool(list(features), list(features), list(_MAPS))
        return dict(zip(names, maps, strict=True))
