"""Instances in the form of COCO: one JSON file with images, annotations and categories."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as coco_mask

from fibottention.errors import UserError
from fibottention.tasks.dense.sources.base import Scene, SceneSource

__all__ = ["CocoInstances", "is_id", "read_categories", "read_coco", "read_images", "to_rle"]

_BEYOND = 1.0  # pixels that a box may go beyond its image, from rounding


def read_coco(path: Path, keys: tuple[str, ...] = ("images", "annotations", "categories")) -> dict[str, Any]:
    """The content of a JSON file with the lists that COCO's files have.

    Raises:
        UserError: If it has not.
    """
    try:
        content = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    for key in keys:
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{path} is not a file of COCO's form: it has no list of {key}")
    return content


def read_categories(content: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The categories in the order of their ids, which may have gaps.

    Raises:
        UserError: If there is none, or one has no name or the id of another.
    """
    categories = content["categories"]
    if not categories or not all(_is_number(c.get("id")) and isinstance(c.get("name"), str) for c in categories):
        raise UserError(f"{path} must have categories with a number as id and a name")
    seen: set[int] = set()
    for category in categories:
        if category["id"] in seen:
            raise UserError(f"{path}: two categories have the id {category['id']}")
        seen.add(category["id"])
    return sorted(categories, key=lambda category: category["id"])


def read_images(content: dict[str, Any], folder: Path, path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The images whose files are there, in the order of their ids; the others are noted.

    Raises:
        UserError: If two images have one id, one lacks a field, or no file is there.
    """
    seen: set[int] = set()
    found = []
    for image in content["images"]:
        sides = [image.get(name) for name in ("height", "width")]
        if not is_id(image.get("id")) or not all(map(_is_number, sides)) or not isinstance(image.get("file_name"), str):
            raise UserError(f"{path}: each image must have id, height, width and file_name, got {image!r:.80}")
        if image["id"] in seen:
            raise UserError(f"{path}: two images have the id {image['id']}, so their annotations cannot be told apart")
        seen.add(image["id"])
        if (folder / image["file_name"]).is_file():
            found.append(image)
        else:
            problems.append(f"image {image['id']}: there is no file {folder / image['file_name']}; it is left out")
    if not found:
        raise UserError(f"none of the {len(content['images'])} images of {path} is in {folder}")
    return sorted(found, key=lambda image: (isinstance(image["id"], str), image["id"]))


def is_id(value: Any) -> bool:
    """Whether a value can name an image: a whole number, or text, as in files made of ADE20K."""
    return _is_number(value) or isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def to_rle(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Polygons, or counts in either form, as COCO's compressed counts, in a form that JSON can hold."""
    to_counts: Any = coco_mask.frPyObjects
    if isinstance(segmentation, list):
        rle = coco_mask.merge(to_counts(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        rle = to_counts(segmentation, height, width)
    else:
        return {"size": [height, width], "counts": segmentation["counts"]}
    return {"size": [height, width], "counts": rle["counts"].decode()}


def _checked_rle(segmentation: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """Counts of a file in compressed form.

    Raises:
        ValueError: If they make no mask of an image of this size.
    """
    try:
        rle = to_rle(segmentation, height, width)
        coco_mask.decode(for_tools(rle))  # which checks that there are as many pixels
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, MemoryError, OverflowError) as error:
        raise ValueError("its mask cannot be decoded") from error
    return rle


class CocoInstances(SceneSource):
    """Boxes and masks of objects.

    What is wrong with an annotation is noted in ``problems``: one without a usable mask, or of an unknown image or
    category, is left out, a box that goes beyond its image is cut.

    Args:
        folder: Folder of the images.
        path: The JSON file.
        target: ``"instance"``.

    Raises:
        UserError: If the file is not of COCO's form or no image is there.
    """

    targets = ("instance",)

    def __init__(self, folder: Path, path: Path, target: str = "instance") -> None:
        super().__init__(target)
        self.folder = folder
        content = read_coco(path)
        categories = read_categories(content, path)
        self.classes = [category["name"] for category in categories]
        self.things = [True] * len(categories)
        self.images = read_images(content, folder, path, self.problems)
        labels = {category["id"]: number for number, category in enumerate(categories)}
        known = {image["id"] for image in content["images"]}
        of_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in self.images}
        sizes = {image["id"]: (image["height"], image["width"]) for image in self.images}
        seen: set[Any] = set()
        for annotation in content["annotations"]:
            number, image = (annotation[n] if is_id(annotation.get(n)) else None for n in ("id", "image_id"))
            if number in seen:
                self.problems.append(f"annotation {number}: another one has its id; both are used")
            if number is not None:
                seen.add(number)
            if image in of_image:
                try:
                    record = self._record(annotation, labels, *sizes[image])
                except ValueError as error:
                    self.problems.append(f"annotation {number} of image {image}: {error}; it is left out")
                else:
                    of_image[image].append(record)
            elif image not in known:
                self.problems.append(f"annotation {number}: there is no image {image}; it is left out")
        # As text, since so many small objects would take ten times the memory, in every process that loads images.
        self._records = [json.dumps(of_image[image["id"]]).encode() for image in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def path(self, index: int) -> Path:
        """See `SceneSource`."""
        return self.folder / self.images[index]["file_name"]

    def has_objects(self, index: int) -> bool:
        """See `SceneSource`."""
        return any(not record["crowd"] for record in self.records(index))

    def records(self, index: int) -> list[dict[str, Any]]:
        """See `SceneSource`; areas are those of the file, and so are boxes that are in their image."""
        return json.loads(self._records[index])

    def scene(self, index: int) -> Scene:
        """See `SceneSource`."""
        records = self.records(index)
        height, width = self.images[index]["height"], self.images[index]["width"]
        masks = [coco_mask.decode(for_tools(to_rle(record["segmentation"], height, width))) for record in records]
        stacked = np.stack(masks) if masks else np.zeros((0, height, width), np.uint8)
        boxes = torch.tensor([record["box"] for record in records], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        return {
            "boxes": boxes,
            "labels": torch.tensor([record["label"] for record in records], dtype=torch.int64),
            "masks": torch.from_numpy(stacked).bool(),
            "crowd": torch.tensor([record["crowd"] for record in records], dtype=torch.bool),
        }

    def _record(self, annotation: dict[str, Any], labels: dict[int, int], height: int, width: int) -> dict[str, Any]:
        """What is kept of an annotation.

        Raises:
            ValueError: If it cannot be used.
        """
        category, segmentation = annotation.get("category_id"), annotation.get("segmentation")
        if not _is_number(category) or category not in labels:
            raise ValueError(f"there is no category {category}")
        if annotation.get("iscrowd", 0) not in (0, 1):
            raise ValueError(f"iscrowd must be 0 or 1, got {annotation['iscrowd']!r}")
        if isinstance(segmentation, list):
            usable = [p for p in segmentation if isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0]
            if not usable:
                raise ValueError("it has no polygon of three points or more")
            if len(usable) < len(segmentation):
                number = annotation.get("id")
                self.problems.append(f"annotation {number}: a polygon of fewer than three points is left out")
            low, high = -max(height, width), 2 * max(height, width)
            if not all(_is_finite(x) and low <= x <= high for polygon in usable for x in polygon):
                raise ValueError("its polygon must be of numbers, and near its image")
            segmentation = usable
        elif not isinstance(segmentation, dict) or "counts" not in segmentation:
            raise ValueError("it has no mask (segmentation)")
        elif segmentation.get("size") not in ([height, width], (height, width)):
            raise ValueError(f"its mask has size {segmentation.get('size')}, its image [{height}, {width}]")
        else:
            segmentation = _checked_rle(segmentation, height, width)
        box, area = annotation.get("bbox"), annotation.get("area")
        if box is None or "area" not in annotation:
            rle = for_tools(to_rle(segmentation, height, width))
            box = [float(x) for x in coco_mask.toBbox(rle)] if box is None else box
            area = annotation.get("area", float(coco_mask.area(rle)))
        if area is None or not _is_finite(area) or area < 0:
            raise ValueError(f"its area must be a number, at least 0, got {area!r}")
        return {
            "label": labels[category],
            "box": self._inside(annotation.get("id"), box, height, width),
            "segmentation": segmentation,
            "area": area,
            "crowd": bool(annotation.get("iscrowd", 0)),
        }

    def _inside(self, number: Any, box: Any, height: int, width: int) -> list[float]:
        """A box cut to its image, if it goes beyond it by more than rounding does."""
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_finite, box)):
            raise ValueError(f"its box must be four numbers, got {box!r}")
        left, top, wide, high = box
        cut = [max(left, 0.0), max(top, 0.0), min(left + wide, width), min(top + high, height)]
        if cut[2] <= cut[0] or cut[3] <= cut[1]:
            place = "is empty" if wide <= 0 or high <= 0 else f"is outside its image of {width} x {height} pixels"
            raise ValueError(f"its box {box} {place}")
        beyond = max(-left, -top, left + wide - width, top + high - height)
        if beyond <= _BEYOND:
            return box
        self.problems.append(
            f"annotation {number}: its box {box} goes beyond its image of {width} x {height} pixels and is cut"
        )
        return [cut[0], cut[1], cut[2] - cut[0], cut[3] - cut[1]]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def for_tools(rle: dict[str, Any]) -> dict[str, Any]:
    """Compressed counts as COCO's tools take them."""
    return {"size": rle["size"], "counts": rle["counts"].encode()}
