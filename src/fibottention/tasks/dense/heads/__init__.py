"""Heads: from feature maps to objects, classes and segments."""

from fibottention.tasks.dense.backbone import Backbone
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.heads.base import DenseHead, Prediction, make_options

__all__ = ["DenseHead", "Prediction", "build_head"]


def build_head(config: DenseConfig, backbone: Backbone, things: list[bool]) -> DenseHead:
    """The head of a configuration.

    Args:
        config: All options.
        backbone: What gives the maps.
        things: Per class, whether its objects can be counted.

    Raises:
        UserError: If an option of the head is not valid.
    """
    options = config.model.head_options
    if config.model.head in ("mask_rcnn", "cascade_mask_rcnn"):
        from fibottention.tasks.dense.heads.rcnn import RcnnHead, RcnnOptions

        is_cascade = config.model.head == "cascade_mask_rcnn"
        return RcnnHead(backbone, len(things), make_options(RcnnOptions, options), is_cascade=is_cascade)
    from fibottention.tasks.dense.heads.transformers_heads import Mask2FormerHead, UperNetHead

    if config.model.head == "upernet":
        return UperNetHead(backbone, len(things), options)
    return Mask2FormerHead(backbone, things, options, config.data.target)
