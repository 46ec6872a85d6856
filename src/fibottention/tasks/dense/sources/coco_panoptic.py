"""Panoptic annotations in the form of COCO: a JSON file of segments and a PNG of their ids per image."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fibottention.errors import UserError
from fibottention.tasks.dense.sources.base import VOID, Scene, SceneSource, read_label_map
from fibottention.tasks.dense.sources.coco import is_id, read_categories, read_coco, read_images

__all__ = ["CocoPanoptic"]


class CocoPanoptic(SceneSource):
    """Segments of things and stuff, or the class of each pixel.

    The PNGs lie in a folder of the JSON file's name, beside it or beside the folder of images.

    Args:
        folder: Folder of the images.
        path: The JSON file.
        target: ``"panoptic"`` or ``"semantic"``.

    Raises:
        UserError: If the file is not of COCO's form or no image is there.
    """

    targets = ("panoptic", "semantic")

    def __init__(self, folder: Path, path: Path, target: str = "panoptic") -> None:
        super().__init__(target)
        self.folder = folder
        content = read_coco(path)
        categories = read_categories(content, path)
        self.classes = [category["name"] for category in categories]
        self.things = [bool(category.get("isthing", 1)) for category in categories]
        self._labels = {category["id"]: number for number, category in enumerate(categories)}
        places = [path.with_suffix(""), folder.parent / path.stem]
        maps = next((place for place in places if place.is_dir()), None)
        if maps is None:
            raise UserError(f"the PNGs of {path} are in neither {places[0]} nor {places[1]}")
        images = read_images(content, folder, path, self.problems)
        by_image: dict[int, dict[str, Any]] = {}
        for annotation in content["annotations"]:
            segments, name = annotation.get("segments_info"), annotation.get("file_name")
            is_list = isinstance(segments, list) and all(isinstance(segment, dict) for segment in segments)
            if not is_list or not isinstance(name, str) or not is_id(annotation.get("image_id")):
                raise UserError(f"{path}: each annotation must have image_id, file_name and a list of segments_info")
            if annotation["image_id"] in by_image:
                raise UserError(f"{path}: two annotations are of the image {annotation['image_id']}")
            by_image[annotation["image_id"]] = annotation
        self._images: list[tuple[Path, Path, list[tuple[int, int, bool]]]] = []
        for image in images:
            annotation = by_image.get(image["id"])
            if annotation is None:
                self.problems.append(f"image {image['id']}: it has no annotation; it is left out")
            elif not (maps / annotation["file_name"]).is_file():
                place = maps / annotation["file_name"]
                self.problems.append(f"image {image['id']}: there is no file {place}; it is left out")
            else:
                segments = self._segments(annotation)
                self._images.append((folder / image["file_name"], maps / annotation["file_name"], segments))
        if not self._images:
            raise UserError(f"no image of {path} has a usable annotation; first: {self.problems[0]}")

    def _segments(self, annotation: dict[str, Any]) -> list[tuple[int, int, bool]]:
        """Id, class and whether it is a crowd, of each segment."""
        segments: dict[int, tuple[int, int, bool]] = {}
        for segment in annotation["segments_info"]:
            number, category = segment.get("id"), segment.get("category_id")
            wrong = None
            if not isinstance(number, int):
                wrong = "its id must be a number"
            elif number in segments:
                wrong = "another one has its id"
            elif not isinstance(category, int) or category not in self._labels:
                wrong = f"there is no category {category}"
            if wrong is None:
                segments[number] = (number, self._labels[category], bool(segment.get("iscrowd", 0)))
            else:
                self.problems.append(f"segment {number} of image {annotation['image_id']}: {wrong}; it is left out")
        return list(segments.values())

    def __len__(self) -> int:
        return len(self._images)

    def path(self, index: int) -> Path:
        """See `SceneSource`."""
        return self._images[index][0]

    def scene(self, index: int) -> Scene:
        """See `SceneSource`; pixels of ids that the JSON file does not have are void."""
        _, path, segments = self._images[index]
        colors = read_label_map(path)
        if colors.ndim != 3:
            raise ValueError(f"{path} must be an RGB image")
        ids = colors.astype(np.int64) @ np.array([1, 256, 256**2])
        found, inverse = np.unique(ids, return_inverse=True)
        numbers = {number: place for place, (number, _, _) in enumerate(segments, 1)}
        places = torch.tensor([numbers.get(number, 0) for number in found.tolist()])
        of_pixel = places[torch.from_numpy(inverse.reshape(ids.shape))]
        labels = torch.tensor([label for _, label, _ in segments], dtype=torch.int64)
        if self.target == "semantic":
            return {"map": torch.cat([torch.tensor([VOID]), labels])[of_pixel]}
        return {"map": of_pixel, "labels": labels, "crowd": torch.tensor([c for _, _, c in segments], dtype=torch.bool)}
