"""What a file of demonstrations is, and which format a path has."""

import importlib
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.robot.environments import EnvironmentSpec
from fibottention.tasks.robot.record import Episode

__all__ = [
    "FORMATS",
    "Demonstrations",
    "column_parts",
    "open_demonstrations",
    "part",
    "split_column",
    "write_demonstrations",
]

FORMATS = {"zarr": ".zarr", "hdf5": ".hdf5", "lerobot": ""}
_MODULES = {"zarr": "diffusion_policy", "hdf5": "robomimic", "lerobot": "lerobot"}


class Demonstrations(Protocol):
    """Recorded episodes, read one by one.

    Attributes:
        format: zarr, hdf5 or lerobot.
        names: What to call each episode in a message.
        seeds: What began each episode, for those that were recorded here; else None.
        columns: Names of what there is of each step.
    """

    format: str
    names: list[str]
    seeds: list[int] | None
    columns: list[str]

    def read(self, episode: int, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Arrays ``(T, ...)`` of an episode by column.

        Args:
            episode: Number of the episode, from 0.
            columns: Columns, a part of one written as ``state[:2]``.

        Raises:
            UserError: If the episode cannot be read.
        """
        ...

    def close(self) -> None:
        """Give the files back."""
        ...


def open_demonstrations(path: str | Path, episodes: str | None = None) -> Demonstrations:
    """Open the demonstrations at a path, whichever format they are in.

    Args:
        path: A folder ``*.zarr`` (or a ``.zip`` of it), a file ``*.hdf5``, or the folder of a LeRobot data set.
        episodes: Name of a filter of an HDF5 file, such as ``train``: only its episodes.

    Raises:
        UserError: If there are none that can be read.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"data.path={path} does not exist")
    if (path / "meta" / "info.json").is_file():
        kind = "lerobot"
    elif path.is_file() and path.suffix in (".hdf5", ".h5", ".hdf"):
        kind = "hdf5"
    elif path.suffix == ".zip" or any((path / name).is_file() for name in (".zgroup", "zarr.json")):
        kind = "zarr"
    else:
        raise UserError(
            f"data.path={path} holds no demonstrations: it is neither a zarr folder (.zgroup or zarr.json), nor a "
            ".hdf5 file, nor a LeRobot folder (meta/info.json)"
        )
    if episodes is not None and kind != "hdf5":
        raise UserError(f"data.filter={episodes} is for HDF5 files, and {path} is {kind}")
    options = {"episodes": episodes} if episodes is not None else {}
    return importlib.import_module(f"fibottention.tasks.robot.formats.{_MODULES[kind]}").Reader(path, **options)


def write_demonstrations(path: Path, kind: str, episodes: Iterable[Episode], spec: EnvironmentSpec) -> None:
    """Write demonstrations, whole or not at all.

    Args:
        path: A new file or folder.
        kind: zarr, hdf5 or lerobot.
        episodes: The episodes.
        spec: Where they were recorded.

    Raises:
        UserError: If there is something at the path.
    """
    if path.exists():
        raise UserError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    _remove(temporary)
    try:
        module = importlib.import_module(f"fibottention.tasks.robot.formats.{_MODULES[kind]}")
        module.write(temporary, episodes, spec)
        temporary.rename(path)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def split_column(text: str, known: Sequence[str], source: object) -> tuple[str, slice]:
    """A column and the part of it that is meant, of a text such as ``state`` or ``state[:2]``.

    Raises:
        UserError: If it is not written so or there is no such column.
    """
    name, which = column_parts(text)
    if name not in known:
        raise UserError(
            f"{source} has no column {name!r}{nearest(name, list(known))}; it has {', '.join(sorted(known))}"
        )
    return name, which


def column_parts(text: str) -> tuple[str, slice]:
    """The name and the part in a text such as ``state[:2]``."""
    match = re.fullmatch(r"(.+?)(?:\[(\d*):(\d*)\])?", text)
    name, start, stop = match.groups() if match else (text, None, None)
    return name, slice(int(start) if start else None, int(stop) if stop else None)


def part(array: NDArray[Any], which: slice) -> NDArray[Any]:
    """A part of the last dimension; the array itself if all of it is meant.

    Raises:
        UserError: If the array does not reach so far.
    """
    if which.stop is not None and (array.ndim < 2 or which.stop > array.shape[-1]):
        raise UserError(f"the part {which.start or 0} to {which.stop} of {array.shape[-1]} numbers")
    return array if which == slice(None) else array[..., which]
