"""Which videos train and which test: the protocols of published data sets, read from the names of their files."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fibottention.errors import UserError
from fibottention.specs import nearest

__all__ = ["Split", "data_set_names", "protocol_names", "split_random", "split_videos", "take_validation"]

# Source: shared by several independent public copies of the protocols.
_NTU60_TRAIN_PERFORMERS = frozenset((1, 2, 4, 5, 8, 9, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 31, 34, 35, 38))
_NTU120_TRAIN_PERFORMERS = _NTU60_TRAIN_PERFORMERS.union(
    (45, 46, 47, 49, 50, 52, 53, 54, 55, 56, 57, 58, 59, 70, 74, 78, 80, 81, 82, 83, 84, 85, 86, 89, 91, 92, 93, 94),
    (95, 97, 98, 100, 103),
)
_SMARTHOME_TRAIN_PERSONS = frozenset((3, 4, 6, 7, 9, 12, 13, 15, 17, 19, 25))


@dataclass(frozen=True)
class Split:
    """Videos by what they are for.

    Attributes:
        train: Paths and class numbers.
        val: Likewise; empty if the protocol has no validation videos.
        test: Likewise.
        classes: Names of the classes.
        left_out: Files whose names are not those of the data set, or that a protocol leaves out.
    """

    train: tuple[tuple[Path, int], ...]
    val: tuple[tuple[Path, int], ...]
    test: tuple[tuple[Path, int], ...]
    classes: tuple[str, ...]
    left_out: tuple[Path, ...]


@dataclass(frozen=True)
class _Clip:
    """What the name of a file says."""

    action: str
    numbers: Mapping[str, int]


_Part = str | None  # train, val, test, or left out


@dataclass(frozen=True)
class _DataSet:
    """How the files of a data set are named, and its protocols.

    Attributes:
        parse: What the name of a file says; None if it is not one of the data set.
        protocols: Which part a clip belongs to, by protocol.
    """

    parse: Callable[[Path], _Clip | None]
    protocols: Mapping[str, Callable[[Mapping[str, int]], _Part]]


def _ntu(path: Path) -> _Clip | None:
    found = re.fullmatch(r"S(\d{3})C(\d{3})P(\d{3})R(\d{3})A(\d{3})(_\w+)?", path.stem)
    if found is None:
        return None
    setup, camera, performer, replication = (int(found[i]) for i in range(1, 5))
    numbers = {"setup": setup, "camera": camera, "performer": performer, "replication": replication}
    return _Clip(f"A{found[5]}", numbers)


def _smarthome(path: Path) -> _Clip | None:
    found = re.fullmatch(r"(.+)_p(\d+)_r(\d+)_v(\d+)_c(\d+)", path.stem)
    if found is None:
        return None
    return _Clip(
        found[1], dict(zip(("person", "repetition", "view", "camera"), map(int, found.groups()[1:]), strict=True))
    )


def _nucla(path: Path) -> _Clip | None:
    """``a01/v01_s01_e00.avi``, or all of it in the name, ``a01_s01_e00_v01.avi``."""
    words = re.findall(r"(?<![a-z0-9])([asev])(\d{2})(?![0-9])", f"{path.parent.name} {path.stem}")
    found = {letter: int(number) for letter, number in words}
    if len(words) != 4 or set(found) != set("asev"):
        return None
    return _Clip(f"a{found['a']:02d}", {"subject": found["s"], "environment": found["e"], "view": found["v"]})


def _train_if(name: str, wanted: Callable[[int], bool]) -> Callable[[Mapping[str, int]], _Part]:
    return lambda numbers: "train" if wanted(numbers[name]) else "test"


def _by_camera(train: Sequence[int], val: Sequence[int], test: Sequence[int]) -> Callable[[Mapping[str, int]], _Part]:
    cameras = {**dict.fromkeys(train, "train"), **dict.fromkeys(val, "val"), **dict.fromkeys(test, "test")}
    return lambda numbers: cameras.get(numbers["camera"])


_DATA_SETS: dict[str, _DataSet] = {
    "ntu60": _DataSet(
        _ntu,
        {
            "cross-subject": _train_if("performer", _NTU60_TRAIN_PERFORMERS.__contains__),
            "cross-view": _train_if("camera", (2, 3).__contains__),
        },
    ),
    "ntu120": _DataSet(
        _ntu,
        {
            "cross-subject": _train_if("performer", _NTU120_TRAIN_PERFORMERS.__contains__),
            "cross-setup": _train_if("setup", lambda setup: setup % 2 == 0),
        },
    ),
    "smarthome": _DataSet(
        _smarthome,
        {
            "cross-subject": _train_if("person", _SMARTHOME_TRAIN_PERSONS.__contains__),
            "cross-view-1": _by_camera((1,), (5,), (2,)),
            "cross-view-2": _by_camera((1, 3, 4, 6, 7), (5,), (2,)),
        },
    ),
    "nucla": _DataSet(
        _nucla,
        {
            "cross-view": _train_if("view", (1, 2).__contains__),
            "cross-subject": _train_if("subject", lambda subject: subject % 2 == 1),
        },
    ),
}


def data_set_names() -> list[str]:
    """Names of the data sets with protocols."""
    return list(_DATA_SETS)


def protocol_names(data_set: str) -> list[str]:
    """Names of the protocols of a data set."""
    return list(_DATA_SETS[data_set].protocols)


def split_videos(
    paths: Sequence[Path],
    data_set: str,
    protocol: str,
    *,
    test_subjects: Sequence[int] | None = None,
    actions: Sequence[str] | None = None,
) -> Split:
    """Split videos as a protocol of a data set says, by the names of their files.

    Args:
        paths: The videos.
        data_set: ntu60, ntu120, smarthome or nucla.
        protocol: cross-subject, and what else the data set has; see `protocol_names`.
        test_subjects: For nucla's cross-subject, which has no published list: the subjects to test on; those with even
            numbers if None.
        actions: Names of the actions to keep; all that the training videos have if None.

    Raises:
        UserError: If there is no such protocol, no file is named as in the data set, or a part is empty.
    """
    if data_set not in _DATA_SETS:
        raise UserError(f"there are no protocols for {data_set!r}{nearest(data_set, data_set_names())}")
    kind = _DATA_SETS[data_set]
    if protocol not in kind.protocols:
        raise UserError(f"{data_set} has no protocol {protocol!r}{nearest(protocol, protocol_names(data_set))}")
    part_of = kind.protocols[protocol]
    if test_subjects is not None:
        if (data_set, protocol) != ("nucla", "cross-subject"):
            raise UserError(f"--test-subjects is for nucla's cross-subject; {data_set} {protocol} has a published list")
        part_of = _train_if("subject", lambda subject: subject not in test_subjects)
    clips = {path: kind.parse(path) for path in paths}
    parts: dict[str, list[tuple[Path, str]]] = {"train": [], "val": [], "test": []}
    left_out = []
    if actions and (unknown := set(actions) - {clip.action for clip in clips.values() if clip is not None}):
        raise UserError(f"--actions: no video shows {min(unknown)}")
    for path, clip in clips.items():
        part = None if clip is None or (actions and clip.action not in actions) else part_of(clip.numbers)
        if data_set == "ntu60" and clip is not None and clip.action > "A060":
            part = None  # of NTU RGB+D 120
        if clip is None or part is None:
            left_out.append(path)
        else:
            parts[part].append((path, clip.action))
    if len(left_out) == len(paths):
        raise UserError(f"none of the {len(paths)} videos is named as those of {data_set}, such as {paths[0].name}")
    for part in ("train", "test"):
        if not parts[part]:
            raise UserError(f"{data_set} {protocol}: no video is left for the {part} list")
    # The cross-view protocols of Smarthome have only the actions that the training camera saw.
    classes = sorted({action for _, action in parts["train"]})
    numbers = {action: number for number, action in enumerate(classes)}
    for part in ("val", "test"):
        left_out += [path for path, action in parts[part] if action not in numbers]
    known = {
        part: tuple((path, numbers[action]) for path, action in own if action in numbers) for part, own in parts.items()
    }
    return Split(known["train"], known["val"], known["test"], tuple(classes), tuple(left_out))


def split_random(samples: Sequence[tuple[Path, int]], classes: Sequence[str], test_share: float, seed: int) -> Split:
    """Split videos at random, each class alike.

    Args:
        samples: Paths and class numbers.
        classes: Names of the classes.
        test_share: Share of each class to test on, at least one video where there are two.
        seed: Seed of the choice.

    Raises:
        UserError: If nothing is left to test on.
    """
    train, test = _share_out(samples, test_share, seed)
    if not test:
        raise UserError("there is no class with two videos, so none can be kept for the test")
    return Split(tuple(train), (), tuple(test), tuple(classes), ())


def take_validation(split: Split, share: float, seed: int) -> Split:
    """Take some of the training videos for validation, of each class alike."""
    train, val = _share_out(split.train, share, seed)
    return Split(tuple(train), tuple(val), split.test, split.classes, split.left_out)


def _share_out(
    samples: Sequence[tuple[Path, int]], share: float, seed: int
) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    by_class: dict[int, list[tuple[Path, int]]] = {}
    for sample in samples:
        by_class.setdefault(sample[1], []).append(sample)
    chosen: set[tuple[Path, int]] = set()
    for label, own in by_class.items():
        count = min(max(1, round(share * len(own))), len(own) - 1) if share > 0 else 0
        order = np.random.default_rng((seed, label)).permutation(len(own))
        chosen.update(own[int(place)] for place in order[:count])
    return [s for s in samples if s not in chosen], [s for s in samples if s in chosen]
