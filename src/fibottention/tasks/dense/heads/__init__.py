"""Heads: from feature maps to objects, classes and segments."""

from fibottention.errors import UserError
from fibottention.tasks.dense.backbone import Backbone
from fibottention.tasks.dense.config import DenseConfig, DenseModelConfig
from fibottention.tasks.dense.heads.base import DenseHead, Prediction, make_options
from fibottention.tasks.dense.heads.rcnn import RcnnHead, RcnnOptions

__all__ = ["DenseHead", "Prediction", "build_head", "pyramid_channels"]


_RCNN = ("mask_rcnn", "cascade_mask_rcnn")


def pyramid_channels(config: DenseModelConfig) -> int:
    """Channels of the maps that a plain vision transformer gives a head.

    Raises:
        UserError: If an option of the head is not valid.
    """
    options = config.head_options if config.head in _RCNN else {}
    return make_options(RcnnOptions, options).channels


def build_head(config: DenseConfig, backbone: Backbone, classes: list[str], things: list[bool]) -> DenseHead:
    """The head of a configuration.

    Args:
        config: All options.
        backbone: What gives the maps.
        classes: Names of the classes.
        things: Per class, whether its objects can be counted.

    Raises:
        UserError: If an option of the head is not valid.
    """
    options = config.model.head_options
    if config.model.head in _RCNN:
        is_cascade = config.model.head == "cascade_mask_rcnn"
        return RcnnHead(backbone, len(things), make_options(RcnnOptions, options), is_cascade=is_cascade)
    from fibottention.tasks.dense.heads.transformers_heads import Mask2FormerHead, OneFormerHead, UperNetHead

    names = classes if config.model.head_classes is None else config.model.head_classes
    if absent := [name for name in classes if name not in names]:
        raise UserError(f"model.head_classes lacks the class {absent[0]} of the data")
    places = [names.index(name) for name in classes]
    if config.model.head == "upernet":
        return UperNetHead(backbone, len(names), options, places)
    head = {"mask2former": Mask2FormerHead, "oneformer": OneFormerHead}[config.model.head]
    return head(backbone, things, options, config.data.target, places, len(names))
