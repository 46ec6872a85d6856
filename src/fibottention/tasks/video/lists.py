"""Lists of videos with their labels: files of lines ``path label``, and folders of videos by action."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.training.run import write_atomically

__all__ = [
    "VIDEO_SUFFIXES",
    "VideoList",
    "find_videos",
    "read_folder",
    "read_list",
    "read_names",
    "with_classes",
    "write_list",
]

_LABEL_DIGITS = 5  # more classes than a hundred thousand are a mistake
VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")


@dataclass(frozen=True)
class VideoList:
    """Videos and their classes.

    Attributes:
        samples: Path and class of each video.
        classes: Names of the classes.
    """

    samples: tuple[tuple[Path, int], ...]
    classes: tuple[str, ...]


def find_videos(folder: Path) -> list[Path]:
    """The video files in a folder and those below it, by their suffix, in the order of their names."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in VIDEO_SUFFIXES and p.is_file())


def read_list(path: Path, root: Path | None = None) -> VideoList:
    """Read a list of lines ``path label``.

    Path and label are separated by a tab, a comma or the last space of the line, the same way in the whole file; where
    more than one way would do, that one is taken whose files exist. Paths with commas may be quoted. Labels are whole
    numbers from 0; a file ``classes.txt`` beside the list may name them, one a line.

    Args:
        path: The list.
        root: Folder at which relative paths begin; that of the list if None, or if a file is not there.

    Raises:
        UserError: If a line cannot be read or the list is empty; videos are looked for when they are read.
    """
    lines = _read_lines(path, "list")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"the list {path} is empty")
    folders = [path.parent] if root is None else [root, path.parent]
    readings = []
    for split in (_by_tab, _by_comma, _by_space):
        parsed = [split(line) for _, line in numbered]
        if all(part is not None for part in parsed):
            readings.append([part for part in parsed if part is not None])
    if not readings:
        number, line = _first_bad(numbered)
        raise UserError(f"{path}, line {number}: each line must be a path and a label from 0, got {line!r:.120}")
    best = max(readings, key=lambda reading: sum(_is_there(_locate(name, folders)) for name, _ in reading[:200]))
    samples = tuple((_locate(name, folders), label) for name, label in best)
    return VideoList(samples, _class_names(path.parent, samples))


def _read_lines(path: Path, what: str) -> list[str]:
    """The lines of a text file, which may have the marks of Windows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the {what} {path} cannot be read: {getattr(error, 'strerror', None) or 'not text'}"
        ) from error
    return text.replace("\r\n", "\n").split("\n")


def read_names(path: Path) -> list[str]:
    """The names in a file, one a line.

    Raises:
        UserError: If it cannot be read, or has none.
    """
    names = [line.strip() for line in _read_lines(path, "file") if line.strip()]
    if not names:
        raise UserError(f"{path} holds no names")
    return names


def with_classes(videos: VideoList, classes: Sequence[str], path: Path) -> VideoList:
    """Videos of a list whose labels shall stand for given classes.

    Raises:
        UserError: If a label is none of them, or the list's own ``classes.txt`` has other names.
    """
    largest = max(label for _, label in videos.samples)
    if largest >= len(classes):
        raise UserError(f"the list {path} has a label {largest}, but the training videos have {len(classes)} classes")
    if (path.parent / "classes.txt").is_file() and videos.classes != tuple(classes):
        differing = [a for a, b in zip(videos.classes, classes, strict=False) if a != b]
        more = f", such as {differing[0]}" if differing else ""
        raise UserError(f"{path.parent / 'classes.txt'} has other classes than the training videos{more}")
    return VideoList(videos.samples, tuple(classes))


def _first_bad(numbered: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """The line that the way of most of the others cannot read."""
    counts = {split: sum(split(line) is not None for _, line in numbered) for split in (_by_tab, _by_comma, _by_space)}
    split = max(counts, key=lambda way: counts[way])
    return next((number, line) for number, line in numbered if split(line) is None)


def _by_tab(line: str) -> tuple[str, int] | None:
    return _label(line.rpartition("\t"))


def _by_comma(line: str) -> tuple[str, int] | None:
    try:
        row = next(csv.reader([line]))
    except (csv.Error, StopIteration):
        return None
    if len(row) == 2 and line.lstrip().startswith('"'):
        return _label((row[0], ",", row[1]))
    return _label(line.rpartition(","))


def _by_space(line: str) -> tuple[str, int] | None:
    return _label(line.strip().rpartition(" "))


def _label(parts: tuple[str, str, str]) -> tuple[str, int] | None:
    name, _, label = (part.strip() for part in parts)
    return (name, int(label)) if name and label.isdecimal() and len(label) <= _LABEL_DIGITS else None


def _locate(name: str, folders: Sequence[Path]) -> Path:
    """The file of a path in a list, in the first folder that has it."""
    candidates = [folder / name for folder in folders]
    return next((candidate for candidate in candidates if _is_there(candidate)), candidates[0])


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _class_names(folder: Path, samples: Sequence[tuple[Path, int]]) -> tuple[str, ...]:
    """Names of the classes that a list has, as ``classes.txt`` says, or else their numbers."""
    count = max(label for _, label in samples) + 1
    file = folder / "classes.txt"
    if not file.is_file():
        return tuple(str(number) for number in range(count))
    names = read_names(file)
    if len(names) < count:
        raise UserError(f"{file} names {len(names)} classes, but there is a label {count - 1}")
    if len(set(names)) < len(names):
        raise UserError(f"{file} has the same name twice: {max(names, key=names.count)}")
    return tuple(names)


def read_folder(folder: Path, classes: Sequence[str] | None = None, keep: Sequence[str] | None = None) -> VideoList:
    """Read a folder with one folder of videos per action.

    Args:
        folder: The folder.
        classes: The actions there must be; the names of the folders if None.
        keep: The actions to read; all if None.

    Raises:
        UserError: If there are no such folders, one is empty, or they are others than there must be.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise UserError(f"{folder} needs one folder of videos per action, but has no folders")
    if keep is not None:
        if missing := sorted(set(keep) - set(names)):
            raise UserError(f"{folder} has no folder {missing[0]}{nearest(missing[0], names)}")
        names = [name for name in names if name in keep]
    known = list(names if classes is None else classes)
    if unknown := sorted(set(names) - set(known)):
        raise UserError(f"{folder} has the action {unknown[0]}, which the training videos do not have")
    found = {name: find_videos(folder / name) for name in names}
    if classes is None and (empty := [name for name, paths in found.items() if not paths]):
        raise UserError(f"{folder / empty[0]} holds no videos ({', '.join(VIDEO_SUFFIXES)})")
    samples = tuple((path, known.index(name)) for name in names for path in found[name])
    return VideoList(samples, tuple(known))


def write_list(samples: Sequence[tuple[str, int]], path: Path) -> None:
    """Write a list of lines ``path label``, in a way in which `read_list` understands its paths.

    Args:
        samples: Paths as they shall be in the list, and labels.
        path: The file.
    """
    separator = "\t" if any(" " in name or "," in name for name, _ in samples) else " "
    text = "".join(f"{name}{separator}{label}\n" for name, label in samples)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
