"""Images for a closer look at a trained model: from its validation data, or from a folder, with masks of objects."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from fibottention.errors import UserError
from fibottention.tasks.classification.config import ClassificationConfig
from fibottention.tasks.classification.data import eval_transform, open_image
from fibottention.tasks.classification.object_masks import open_masks, read_image
from fibottention.tasks.classification.sources import open_source

__all__ = ["images_from_folder", "validation_images"]

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}


def validation_images(config: ClassificationConfig, count: int) -> tuple[Tensor, Tensor]:
    """Some validation images, spread evenly, as the model gets them; unreadable ones are left out.

    Args:
        config: The configuration of the run.
        count: At most how many.

    Returns:
        Images ``(B, C, H, W)`` and classes ``(B,)``.

    Raises:
        UserError: If the data cannot be opened or come as a stream, or no image can be read.
    """
    if config.data.name.split("/")[0].lower() in ("wds", "hfids"):
        raise UserError(f"data.name={config.data.name} comes as a stream; name a folder of images with --images")
    source = open_source(config.data, train=False)
    transform = eval_transform(config.data, config.model.in_chans)
    count = min(count, len(source))
    images, targets = [], []
    for i in range(count):
        try:
            image, target = source.load(i * len(source) // count)
            images.append(transform(open_image(image, config.model.in_chans)))
            targets.append(target)
        except Exception:
            continue  # evaluation names the unreadable ones
    if not images:
        raise UserError(f"none of the validation images of data.name={config.data.name} could be read")
    return torch.stack(images), torch.tensor(targets)


def images_from_folder(
    config: ClassificationConfig, count: int, folder: Path, masks: Path | None
) -> tuple[Tensor, Tensor | None, list[str]]:
    """Images of a folder, spread evenly, as the model gets them, and masks of objects in them.

    Args:
        config: The configuration of the model's run.
        count: At most how many.
        folder: Folder of images.
        masks: Where the objects are, see `open_masks`; images of which that is not known are left out.

    Returns:
        Images ``(B, C, H, W)``, masks ``(B, H, W)`` or None, and sentences about what was left out.

    Raises:
        UserError: If there are no images that can be used.
    """
    if not folder.is_dir():
        raise UserError(f"--images: {folder} is not a folder")
    known = None if masks is None else open_masks(masks, folder)
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    left_out = []
    if known is not None:
        left_out += known.problems
        with_mask = [path for path in paths if known.has(path)]
        if len(with_mask) < len(paths):
            left_out.append(f"{len(paths) - len(with_mask)} images have no mask in {masks}")
        paths = with_mask
    if not paths:
        raise UserError(f"--images: {folder} holds no images" + (f" that have a mask in {masks}" if masks else ""))
    count = min(count, len(paths))
    transform = eval_transform(config.data, config.model.in_chans)
    images, masks_of = [], []
    for i in range(count):
        path = paths[i * len(paths) // count]
        try:
            image = read_image(path)
            if known is not None:
                masks_of.append(_mask(config, known.inside(path, image.height, image.width)))
            images.append(transform(open_image(image, config.model.in_chans)))
        except UserError as error:
            left_out.append(str(error))
    if not images:
        raise UserError(f"--images: none of the images in {folder} could be used; {left_out[-1]}")
    return torch.stack(images), None if known is None else torch.stack(masks_of), left_out


def _mask(config: ClassificationConfig, inside: np.ndarray) -> Tensor:
    """A mask resized and cropped as the images are."""
    size = config.data.image_size
    transform = v2.Compose(
        [
            v2.Resize(config.data.resize or size, v2.InterpolationMode.NEAREST),
            v2.CenterCrop(size),
            v2.PILToTensor(),
        ]
    )
    return transform(Image.fromarray(inside.astype(np.uint8))).amax(0) > 0
