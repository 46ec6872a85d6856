"""Images for a closer look at a trained model: from its validation data, or from a folder, with masks of objects."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from fibottention.errors import UserError
from fibottention.tasks.classification.config import ClassificationConfig
from fibottention.tasks.classification.data import eval_transform, open_image
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
        masks: Folder with a PNG of the same name per image, 0 outside the object; images without a mask are left out.

    Returns:
        Images ``(B, C, H, W)``, masks ``(B, H, W)`` or None, and sentences about what was left out.

    Raises:
        UserError: If there are no images that can be read, or one differs in size from its mask.
    """
    if not folder.is_dir():
        raise UserError(f"--images: {folder} is not a folder")
    if masks is not None and not masks.is_dir():
        raise UserError(f"--masks: {masks} is not a folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    left_out = []
    if masks is not None:
        with_mask = [path for path in paths if (masks / f"{path.stem}.png").is_file()]
        if len(with_mask) < len(paths):
            left_out.append(f"{len(paths) - len(with_mask)} images have no mask in {masks}")
        paths = with_mask
    if not paths:
        raise UserError(f"--images: {folder} holds no images" + (f" that have a mask in {masks}" if masks else ""))
    count = min(count, len(paths))
    transform = eval_transform(config.data, config.model.in_chans)
    chosen, images = [], []
    for i in range(count):
        path = paths[i * len(paths) // count]
        try:
            images.append(transform(open_image(_read(path), config.model.in_chans)))
            chosen.append(path)
        except UserError as error:
            left_out.append(str(error))
    if not images:
        raise UserError(f"--images: none of the images in {folder} could be read")
    return torch.stack(images), None if masks is None else _masks(config, chosen, masks), left_out


def _masks(config: ClassificationConfig, paths: Sequence[Path], folder: Path) -> Tensor:
    """Masks resized and cropped as the images are."""
    size = config.data.image_size
    transform = v2.Compose(
        [
            v2.Resize(config.data.resize or size, v2.InterpolationMode.NEAREST),
            v2.CenterCrop(size),
            v2.PILToTensor(),
        ]
    )
    masks = []
    for path in paths:
        mask, image = _read(folder / f"{path.stem}.png"), _read(path)
        if mask.size != image.size:
            sizes = " pixels, the image ".join(f"{width} x {height}" for width, height in (mask.size, image.size))
            raise UserError(f"the mask of {path} is {sizes}")
        # The numbers of a palette are classes, 0 the outside; an alpha channel says nothing about the object.
        values = np.asarray(mask.convert(mask.mode.removesuffix("A")) if mask.mode in ("LA", "RGBA") else mask)
        inside = (values if values.ndim == 2 else values.max(-1)) > 0
        masks.append(transform(Image.fromarray(inside.astype(np.uint8))).amax(0) > 0)
    return torch.stack(masks)


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except Exception as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error
