"""Demonstrations unpacked into flat files, mapped into memory: many processes read them, piece by piece."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fibottention.errors import UserError
from fibottention.tasks.robot.formats import Demonstrations, open_demonstrations

__all__ = ["EpisodeStore", "checked_image", "checked_vector", "default_cache"]

_LAYOUT = 1  # of the files, for those of another version to be made anew


def default_cache() -> Path:
    """Folder of unpacked demonstrations in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fibottention" / "demonstrations"


class EpisodeStore:
    """Arrays of all steps, one episode after the other, in flat files.

    Attributes:
        lengths: Steps of each episode.
        names: What to call each episode.
        arrays: Arrays ``(steps, ...)`` by name, mapped into memory: images ``(steps, H, W, 3)`` uint8, vectors float32.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = json.loads((folder / "index.json").read_text())
        self.lengths: list[int] = index["lengths"]
        self.names: list[str] = index["names"]
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.arrays: dict[str, NDArray[Any]] = {
            name: np.memmap(folder / f"{i}.bin", dtype=dtype, mode="r", shape=(sum(self.lengths), *shape))
            for i, (name, (dtype, shape)) in enumerate(index["arrays"].items())
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)  # another process maps the files itself

    @classmethod
    def unpack(
        cls,
        path: Path,
        cameras: dict[str, str],
        vectors: dict[str, str],
        *,
        episodes: str | None = None,
        cache: Path | None = None,
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> "EpisodeStore":
        """Unpack demonstrations, or find them unpacked already.

        Args:
            path: The demonstrations.
            cameras: Column of each image by its name here.
            vectors: Column of each vector.
            episodes: Name of a filter of an HDF5 file.
            cache: Where to keep what is unpacked; `default_cache` if None.
            progress: Called with the number of episodes done and of all.

        Raises:
            UserError: If an episode cannot be read or holds something else, with its name.
        """
        what = [_LAYOUT, str(path.resolve()), _fingerprint(path), cameras, vectors, episodes]
        folder = (cache or default_cache()) / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
        if not (folder / "index.json").is_file():
            temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            try:
                temporary.mkdir(parents=True)
                with contextlib.closing(open_demonstrations(path, episodes)) as demonstrations:
                    _write(temporary, demonstrations, cameras, vectors, progress)
                with contextlib.suppress(OSError):  # another process has been faster
                    temporary.rename(folder)
                if not (folder / "index.json").is_file():
                    raise OSError(None, "a folder of that name is in the way")
            except OSError as error:
                raise UserError(f"data.cache: {folder} cannot be written: {error.strerror or error}") from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return cls(folder)


def _fingerprint(path: Path) -> list[Any]:
    """Sizes and times of the files, so that other demonstrations at the same place are noticed."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return [[str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _write(
    folder: Path,
    demonstrations: Demonstrations,
    cameras: dict[str, str],
    vectors: dict[str, str],
    progress: Callable[[int, int], object],
) -> None:
    columns = cameras | vectors
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    lengths = []
    files = {name: (folder / f"{i}.bin").open("wb") for i, name in enumerate(columns)}
    try:
        for episode, title in enumerate(demonstrations.names):
            found = demonstrations.read(episode, list(columns.values()))
            counts = set()
            for name, column in columns.items():
                array = (
                    checked_image(found[column], column, title)
                    if name in cameras
                    else checked_vector(found[column], column, title)
                )
                shape = (str(array.dtype), array.shape[1:])
                if shapes.setdefault(name, shape) != shape:
                    raise UserError(
                        f"{title}: {column} has shape {shape[1]} per step, and others have {shapes[name][1]}"
                    )
                files[name].write(np.ascontiguousarray(array).data)
                counts.add(len(array))
            if len(counts) > 1 or 0 in counts:
                listed = ", ".join(f"{column}: {len(found[column])}" for column in columns.values())
                raise UserError(f"{title}: its columns differ in their number of steps, or have none ({listed})")
            lengths.append(counts.pop())
            progress(episode + 1, len(demonstrations.names))
    finally:
        for file in files.values():
            file.close()
    index = {"lengths": lengths, "names": demonstrations.names, "arrays": shapes}
    (folder / "index.json").write_text(json.dumps(index))


def checked_image(array: NDArray[Any], column: str, episode: str) -> NDArray[np.uint8]:
    """Images ``(steps, H, W, 3)`` of uint8 from those of a column; UserError if it holds something else."""
    if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[-1] != 3:
        raise UserError(f"{episode}: {column} must hold images of shape (steps, height, width, 3), got {array.shape}")
    if array.dtype == np.uint8:
        return array
    if not np.isfinite(array).all() or array.min() < 0 or array.max() > 255:
        raise UserError(f"{episode}: the values of the images in {column} must be in 0 .. 255")
    scale = 255 if array.max() <= 1 else 1  # PushT's published images are 0 .. 255 in float32
    return (scale * array).round().astype(np.uint8)


def checked_vector(array: NDArray[Any], column: str, episode: str) -> NDArray[np.float32]:
    """Vectors ``(steps, n)`` of float32 from those of a column; UserError if it holds something else."""
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.number):
        raise UserError(f"{episode}: {column} must hold vectors of shape (steps, numbers), got {array.shape}")
    wrong = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(wrong):
        raise UserError(f"{episode}: {column} is not finite in step {wrong[0]} ({array[wrong[0]].tolist()})")
    return array.astype(np.float32)
