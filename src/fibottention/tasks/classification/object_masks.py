"""Where the objects of images are: mask PNGs, boxes in PASCAL VOC's XML, or annotations in COCO's form."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from fibottention.errors import UserError

__all__ = ["ObjectMasks", "open_masks", "read_image"]


class ObjectMasks(ABC):
    """Masks of the objects of images, by the names of the images.

    Attributes:
        problems: Sentences about what was left out.
    """

    problems: list[str]

    @abstractmethod
    def has(self, path: Path) -> bool:
        """Whether something is known of an image."""

    @abstractmethod
    def inside(self, path: Path, height: int, width: int) -> np.ndarray:
        """``(height, width)``, True in an object of the image.

        Raises:
            UserError: If what is known cannot be read, or is of an image of another size.
        """


def open_masks(source: Path, images: Path) -> ObjectMasks:
    """The masks of a folder of PNGs or of VOC's XML files, or of a JSON file of COCO's form.

    Args:
        source: The folder or file.
        images: Folder of the images.

    Raises:
        UserError: If it is neither.
    """
    if source.suffix.lower() == ".json" and source.is_file():
        return _CocoMasks(source, images)
    if not source.is_dir():
        raise UserError(f"--masks: {source} is neither a folder nor a JSON file of COCO's form")
    return _VocBoxes(source) if any(source.glob("*.xml")) else _PngMasks(source)


def read_image(path: Path) -> Image.Image:
    """An image.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except Exception as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error


class _FolderMasks(ObjectMasks):
    """A file of the same name per image."""

    suffix: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, []

    def has(self, path: Path) -> bool:
        return self.file(path).is_file()

    def file(self, path: Path) -> Path:
        """The file of an image."""
        return self.folder / f"{path.stem}{self.suffix}"


class _PngMasks(_FolderMasks):
    """PNGs, 0 outside the object."""

    suffix = ".png"

    def inside(self, path: Path, height: int, width: int) -> np.ndarray:
        mask = read_image(self.file(path))
        if mask.size != (width, height):
            raise UserError(f"the mask of {path} is {mask.width} x {mask.height} pixels, the image {width} x {height}")
        # The numbers of a palette are classes, 0 the outside; an alpha channel says nothing about the object.
        values = np.asarray(mask.convert(mask.mode.removesuffix("A")) if mask.mode in ("LA", "RGBA") else mask)
        return (values if values.ndim == 2 else values.max(-1)) > 0


class _VocBoxes(_FolderMasks):
    """The boxes of PASCAL VOC, whose pixels count from 1."""

    suffix = ".xml"

    def inside(self, path: Path, height: int, width: int) -> np.ndarray:
        file = self.file(path)
        inside = np.zeros((height, width), dtype=bool)
        try:
            boxes = [
                [round(float(box.findtext(side, ""))) for side in ("xmin", "ymin", "xmax", "ymax")]
                for box in ElementTree.parse(file).iterfind("object/bndbox")
            ]
        except (ElementTree.ParseError, ValueError, OSError) as error:
            raise UserError(f"{file} is not an annotation of PASCAL VOC: {error}") from error
        for left, top, right, bottom in boxes:
            if right > width or bottom > height:
                raise UserError(f"{file} has a box beyond {path}, which is {width} x {height} pixels")
            inside[max(0, top - 1) : bottom, max(0, left - 1) : right] = True
        return inside


class _CocoMasks(ObjectMasks):
    """The masks of all objects of an image that are no crowd."""

    def __init__(self, file: Path, images: Path) -> None:
        from fibottention.tasks.dense.sources.coco import CocoInstances  # needs packages that PNGs do not

        self.source = CocoInstances(images, file)
        self.problems = self.source.problems
        self.places = {self.source.path(index): index for index in range(len(self.source))}

    def has(self, path: Path) -> bool:
        return path in self.places and self.source.has_objects(self.places[path])

    def inside(self, path: Path, height: int, width: int) -> np.ndarray:
        scene = self.source.scene(self.places[path])
        inside = scene["masks"][~scene["crowd"]].any(0).numpy()
        if inside.shape != (height, width):
            sizes = f"{inside.shape[1]} x {inside.shape[0]} pixels, the image {width} x {height}"
            raise UserError(f"the mask of {path} is {sizes}")
        return inside
