"""Readers of annotated images in their published layouts."""

from pathlib import Path

from fibottention.errors import UserError
from fibottention.tasks.dense.config import DenseDataConfig
from fibottention.tasks.dense.sources.ade20k import Ade20k
from fibottention.tasks.dense.sources.base import SceneSource
from fibottention.tasks.dense.sources.cityscapes import Cityscapes
from fibottention.tasks.dense.sources.coco import CocoInstances
from fibottention.tasks.dense.sources.coco_panoptic import CocoPanoptic

__all__ = ["SceneSource", "open_source"]


def open_source(config: DenseDataConfig, train: bool) -> SceneSource:
    """The training or validation images of a configuration.

    Args:
        config: Options of the data.
        train: Whether the training images are meant.

    Raises:
        UserError: If the folder or its annotations cannot be used.
    """
    if config.root is None:
        raise UserError("data.root must name the folder of the data set")
    root = Path(config.root)
    if not root.is_dir():
        raise UserError(f"data.root: the folder {root} does not exist")
    if config.format in ("ade20k", "cityscapes"):
        classes = {"ade20k": Ade20k, "cityscapes": Cityscapes}
        return classes[config.format](root, train, config.target)
    split = "train" if train else "val"
    kind = {"coco": "instances", "coco_panoptic": "panoptic"}[config.format]
    given = (config.train_images, config.train_annotations) if train else (config.val_images, config.val_annotations)
    images = root / (given[0] or f"{split}2017")
    annotations = root / (given[1] or f"annotations/{kind}_{split}2017.json")
    option = f"data.{split}_images"
    if not images.is_dir():
        raise UserError(f"{option}: the folder {images} does not exist")
    if not annotations.is_file():
        raise UserError(f"data.{split}_annotations: the file {annotations} does not exist")
    source = {"coco": CocoInstances, "coco_panoptic": CocoPanoptic}[config.format]
    return source(images, annotations, config.target)
