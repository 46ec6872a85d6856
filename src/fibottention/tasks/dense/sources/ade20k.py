"""ADE20K's scene parsing set (ADEChallengeData2016): 150 classes, a PNG of their numbers per image."""

from pathlib import Path

from fibottention.errors import UserError
from fibottention.tasks.dense.sources.base import VOID, Scene, SceneSource, map_labels, read_label_map

__all__ = ["Ade20k"]

_CLASSES = 150
_FOLDERS = {True: "training", False: "validation"}


class Ade20k(SceneSource):
    """The class of each pixel; 0 in the PNG is void.

    Names of the classes are read from ``objectInfo150.txt`` if it is there; a file with fewer lines is a set of fewer
    classes.

    Args:
        root: Folder with ``images`` and ``annotations``.
        train: Whether the training images are meant.
        target: ``"semantic"``.

    Raises:
        UserError: If a folder is missing or no image has an annotation.
    """

    targets = ("semantic",)

    def __init__(self, root: Path, train: bool, target: str = "semantic") -> None:
        super().__init__(target)
        images, maps = (root / kind / _FOLDERS[train] for kind in ("images", "annotations"))
        for folder in (images, maps):
            if not folder.is_dir():
                raise UserError(f"data.root: the folder {folder} does not exist")
        names = root / "objectInfo150.txt"
        self.classes = [f"class {number}" for number in range(1, _CLASSES + 1)]
        if names.is_file():
            rows = names.read_text(errors="replace").strip().splitlines()[1:]
            self.classes = [row.split("\t")[-1].split(",")[0].strip() for row in rows]
            if not self.classes:
                raise UserError(f"{names} must have a line per class after its first one")
        self.things = [False] * len(self.classes)
        self._images = []
        for path in sorted(images.glob("*.jpg")):
            if (maps / f"{path.stem}.png").is_file():
                self._images.append((path, maps / f"{path.stem}.png"))
            else:
                self.problems.append(f"{path}: there is no {maps / path.stem}.png; it is left out")
        if not self._images:
            raise UserError(f"{images} has no .jpg with a .png of the same name in {maps}")
        self._table = [VOID, *range(len(self.classes)), VOID]

    def __len__(self) -> int:
        return len(self._images)

    def path(self, index: int) -> Path:
        """See `SceneSource`."""
        return self._images[index][0]

    def scene(self, index: int) -> Scene:
        """See `SceneSource`."""
        return {"map": map_labels(read_label_map(self._images[index][1]), self._table)}
