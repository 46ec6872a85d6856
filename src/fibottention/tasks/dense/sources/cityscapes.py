"""Cityscapes: 19 classes, 8 of them things, in the fine annotations."""

from pathlib import Path

import numpy as np
import torch

from fibottention.errors import UserError
from fibottention.tasks.dense.sources.base import VOID, Scene, SceneSource, map_labels, mask_boxes, read_label_map

__all__ = ["Cityscapes"]

# Published label ids of the classes that are evaluated; those from 24 on are things.
_IDS = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
_FIRST_THING = 24
_LARGEST_ID = 33


class Cityscapes(SceneSource):
    """Objects, segments or the class of each pixel, all from the ``instanceIds`` images.

    Objects are the eight classes of things; those marked as a group are crowds.

    Args:
        root: Folder with ``leftImg8bit`` and ``gtFine``.
        train: Whether the training images are meant.
        target: ``"instance"``, ``"semantic"`` or ``"panoptic"``.

    Raises:
        UserError: If a folder is missing or no image has an annotation.
    """

    targets = ("instance", "semantic", "panoptic")

    def __init__(self, root: Path, train: bool, target: str = "panoptic") -> None:
        super().__init__(target)
        split = "train" if train else "val"
        images, maps = root / "leftImg8bit" / split, root / "gtFine" / split
        for folder in (images, maps):
            if not folder.is_dir():
                raise UserError(f"data.root: the folder {folder} does not exist")
        ids = {name: number for name, number in _IDS.items() if target != "instance" or number >= _FIRST_THING}
        self.classes = list(ids)
        self.things = [number >= _FIRST_THING for number in ids.values()]
        labels = {number: label for label, number in enumerate(ids.values())}
        self._table = [labels.get(number, VOID) for number in range(_LARGEST_ID + 1)] + [VOID]
        self._images = []
        for path in sorted(images.glob("*/*_leftImg8bit.png")):
            stem = path.name.removesuffix("_leftImg8bit.png")
            numbers = maps / path.parent.name / f"{stem}_gtFine_instanceIds.png"
            if numbers.is_file():
                self._images.append((path, numbers))
            else:
                self.problems.append(f"{path}: there is no {numbers}; it is left out")
        if not self._images:
            raise UserError(f"{images} has no image with its instanceIds in {maps}")

    def __len__(self) -> int:
        return len(self._images)

    def path(self, index: int) -> Path:
        """See `SceneSource`."""
        return self._images[index][0]

    def scene(self, index: int) -> Scene:
        """See `SceneSource`."""
        numbers = read_label_map(self._images[index][1]).astype(np.int64)
        # An object has 1000 times its label id plus a number of its own; a group, or stuff, has the label id alone.
        ids = np.where(numbers >= 1000, numbers // 1000, numbers)
        classes = map_labels(ids, self._table)
        if self.target == "semantic":
            return {"map": classes}
        numbers[classes.numpy() == VOID] = 0
        found, inverse = np.unique(numbers, return_inverse=True)
        kept = found[found > 0]
        of_pixel = torch.from_numpy(inverse.reshape(numbers.shape)) + (0 if 0 in found else 1)
        labels = map_labels(np.where(kept >= 1000, kept // 1000, kept), self._table)
        crowd = torch.from_numpy((kept < 1000) & (kept >= _FIRST_THING))
        if self.target == "panoptic":
            return {"map": of_pixel, "labels": labels, "crowd": crowd}
        masks = of_pixel == torch.arange(1, len(kept) + 1)[:, None, None]
        return {"boxes": mask_boxes(masks), "labels": labels, "masks": masks, "crowd": crowd}
