"""Options of detection and segmentation."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fibottention.errors import UserError
from fibottention.models.neighborhood_registry import is_neighborhood_model
from fibottention.tasks.config import Range, TaskConfig
from fibottention.training.config import OptimConfig, TrainConfig

__all__ = ["DenseAugmentConfig", "DenseConfig", "DenseDataConfig", "DenseModelConfig"]

_TARGETS = {
    "mask_rcnn": ("instance",),
    "cascade_mask_rcnn": ("instance",),
    "upernet": ("semantic",),
    "mask2former": ("instance", "semantic", "panoptic"),
    "oneformer": ("instance", "semantic", "panoptic"),
}


@dataclass
class DenseDataConfig:
    """Images and what is in them.

    Attributes:
        format: coco (instances: COCO's own or any JSON file of its form), coco_panoptic, ade20k (ADEChallengeData2016)
            or cityscapes.
        root: Folder of the data set, in its published layout.
        target: What is learned: instance (boxes and masks of objects), semantic (a class per pixel) or panoptic (both).
        train_images: Folder of the training images, within root, if it is not the published one; for the coco formats.
        train_annotations: JSON file of the training annotations, likewise.
        val_images: Folder of the validation images, likewise.
        val_annotations: JSON file of the validation annotations, likewise.
        test_size: Length to which the shorter side of an image is brought in evaluation; as it is if null.
        max_size: Longest side of a resized image, in training and, times the factor of test_scales, in evaluation.
        test_scales: Factors of test_size whose class probabilities are averaged; for semantic segmentation.
        test_flip: Average those of mirrored images as well; for semantic segmentation.
        strict: Stop at the first annotation that is wrong, instead of leaving it out.
        limit: Use only this many training images (and a sixth as many validation images), evenly spread; all if null.
        workers: Processes that load images.
    """

    format: Literal["coco", "coco_panoptic", "ade20k", "cityscapes"] = "coco"
    root: str | None = None
    target: Literal["instance", "semantic", "panoptic"] = "instance"
    train_images: str | None = None
    train_annotations: str | None = None
    val_images: str | None = None
    val_annotations: str | None = None
    test_size: int | None = 800
    max_size: int = 1333
    test_scales: list[float] = field(default_factory=lambda: [1.0])
    test_flip: bool = False
    strict: bool = False
    limit: int | None = None
    workers: int = 2


@dataclass
class DenseAugmentConfig:
    """Augmentation of training images.

    Attributes:
        sizes: Lengths of the shorter side of a training image, of which one is drawn (multi-scale training).
        jitter: In the place of sizes: an image is fitted into the crop, times a factor drawn from this range
            (large-scale jitter).
        crop: Height and width of the random crop of each image, which is padded to it if it is smaller; the whole image
            if null.
        crop_first: Crop half of the images to 384 .. 600 pixels a side before they are resized, as DETR does.
        max_class_share: Largest share of one class in a crop, which is else drawn again up to ten times; for semantic
            segmentation.
        flip: Probability of a horizontal flip.
        color: Change brightness, contrast, saturation and hue as SSD does (without its swap of the colours).
    """

    sizes: list[int] = field(default_factory=lambda: list(range(480, 801, 32)))
    jitter: tuple[float, float] | None = None
    crop: tuple[int, int] | None = None
    crop_first: bool = False
    max_class_share: float = 1.0
    flip: float = 0.5
    color: bool = False


@dataclass
class DenseModelConfig:
    """A backbone and a head.

    Attributes:
        name: Backbone: any NAT, DiNAT, Swin or other pyramid of timm's, or a plain vision transformer, which gets a
            simple feature pyramid.
        head: mask_rcnn, cascade_mask_rcnn, upernet, mask2former or oneformer.
        pretrained: Load timm's pretrained weights into the backbone.
        backbone_checkpoint: File of weights (.safetensors or .pth) of the backbone to start from: of a classifier that
            was trained here, or one of NAT or DiNAT in any published layout.
        checkpoint: File of weights of a whole model to start from; for upernet, mask2former and oneformer also a folder
            in transformers' layout, whose sizes options and head_options then take over. The classes may differ.
        drop_path: Stochastic depth rate of the backbone.
        options: Further arguments of the backbone, for example {dilations: [[1, 28, 1], ...]}.
        head_options: Further arguments of the head: those of transformers' configuration for upernet, mask2former and
            oneformer; for the others those of `fibottention.tasks.dense.heads.rcnn.RcnnOptions`, such as channels.
        head_classes: Names of the classes of a head of transformers', if they are more than those of the data or in
            another order.
    """

    name: str = "dinat_tiny"
    head: Literal["mask_rcnn", "cascade_mask_rcnn", "upernet", "mask2former", "oneformer"] = "mask_rcnn"
    pretrained: bool = False
    backbone_checkpoint: str | None = None
    checkpoint: str | None = None
    drop_path: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    head_options: dict[str, Any] = field(default_factory=dict)
    head_classes: list[str] | None = None


def _optim() -> OptimConfig:
    return OptimConfig(
        lr=1e-4, weight_decay=0.05, schedule="multistep", milestones=[27, 33], warmup_epochs=0, warmup_steps=500
    )


@dataclass
class DenseConfig(TaskConfig):
    """All options of a detection or segmentation run.

    Attributes:
        data: Images and annotations.
        model: Backbone and head.
        attention: The attention spec of the backbone; ``{"name": "none"}`` leaves it as it is.
        augment: Augmentation.
        optim: Optimizer and schedule.
        train: Training loop.
    """

    task: ClassVar[str] = "dense"
    source: ClassVar[tuple[str, str]] = ("format", "root")
    ranges: ClassVar[tuple[Range, ...]] = (
        ("data.test_size", 1, None),
        ("data.max_size", 1, None),
        ("data.limit", 1, None),
        ("augment.flip", 0, 1),
        ("augment.max_class_share", 0.01, 1),
        ("model.drop_path", 0, 0.99),
    )

    data: DenseDataConfig = field(default_factory=DenseDataConfig)
    model: DenseModelConfig = field(default_factory=DenseModelConfig)
    augment: DenseAugmentConfig = field(default_factory=DenseAugmentConfig)
    optim: OptimConfig = field(default_factory=_optim)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=36, batch_size=2))

    def settle(self, chosen: set[str]) -> None:
        """See `TaskConfig`; NAT and DiNAT have an attention of their own."""
        if "attention" not in chosen and is_neighborhood_model(self.model.name):
            self.attention = {"name": "none"}

    def check(self) -> None:
        """See `TaskConfig`."""
        super().check()
        data, augment, head = self.data, self.augment, self.model.head
        if data.target not in _TARGETS[head]:
            raise UserError(
                f"data.target={data.target} cannot be learned by model.head={head}, which is for "
                f"{' and '.join(_TARGETS[head])}"
            )
        for option, values in (("augment.sizes", augment.sizes), ("data.test_scales", data.test_scales)):
            if not values or min(values) <= 0:
                raise UserError(f"{option} must be numbers above 0, at least one, got {values}")
        if (len(data.test_scales) > 1 or data.test_flip) and data.target != "semantic":
            raise UserError("data.test_scales and data.test_flip are for data.target=semantic")
        if augment.crop is not None and min(augment.crop) < 1:
            raise UserError(f"augment.crop must be two numbers from 1 on, got {list(augment.crop)}")
        if augment.jitter is not None:
            if augment.crop is None:
                raise UserError("augment.jitter needs augment.crop, into which images are fitted")
            if not 0 < augment.jitter[0] <= augment.jitter[1]:
                raise UserError(f"augment.jitter must be two numbers 0 < low <= high, got {list(augment.jitter)}")
        names = self.model.head_classes
        if names is not None and head not in ("upernet", "mask2former", "oneformer"):
            raise UserError(f"model.head_classes is for upernet, mask2former and oneformer, got model.head={head}")
        if names is not None and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"model.head_classes must be different names, got {twice} twice")
        if augment.max_class_share < 1 and (augment.crop is None or data.target != "semantic"):
            raise UserError("augment.max_class_share needs augment.crop and data.target=semantic")
        places = ("train_images", "train_annotations", "val_images", "val_annotations")
        given = [place for place in places if getattr(data, place) is not None]
        if given and not data.format.startswith("coco"):
            raise UserError(f"data.{given[0]} is for data.format=coco and coco_panoptic, got {data.format}")
