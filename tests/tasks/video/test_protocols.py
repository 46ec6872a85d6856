from collections import Counter
from pathlib import Path

import pytest

from fibottention.errors import UserError
from fibottention.tasks.video.protocols import split_random, split_videos, take_validation

# Source of the lists and counts: the data sets' published protocols (facts, video_protocols).
NTU60_SUBJECTS = {1, 2, 4, 5, 8, 9, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 31, 34, 35, 38}


def ntu(setups=(1,), cameras=(1, 2, 3), performers=range(1, 41), actions=(1, 60)):
    return [
        Path(f"nturgb/S{s:03d}C{c:03d}P{p:03d}R001A{a:03d}_rgb.avi")
        for s in setups
        for c in cameras
        for p in performers
        for a in actions
    ]


def performer(path):
    return int(path.name[9:12])


def test_ntu60_cross_subject():
    split = split_videos(ntu(), "ntu60", "cross-subject")
    assert {performer(path) for path, _ in split.train} == NTU60_SUBJECTS
    assert {performer(path) for path, _ in split.test} == set(range(1, 41)) - NTU60_SUBJECTS
    assert len(split.train) == len(split.test) == 20 * 3 * 2
    assert split.classes == ("A001", "A060")
    assert not split.val
    assert not split.left_out


def test_ntu60_cross_view():
    split = split_videos(ntu(), "ntu60", "cross-view")
    assert {path.name[5:8] for path, _ in split.train} == {"002", "003"}
    assert {path.name[5:8] for path, _ in split.test} == {"001"}
    assert len(split.train) == 2 * len(split.test)


def test_ntu60_leaves_out_the_actions_of_ntu120():
    split = split_videos(ntu(actions=(1, 61)), "ntu60", "cross-subject")
    assert split.classes == ("A001",)
    assert all(path.stem.endswith("A061_rgb") for path in split.left_out)


def test_ntu120_cross_subject():
    split = split_videos(ntu(performers=range(1, 107), cameras=(1,)), "ntu120", "cross-subject")
    train = {performer(path) for path, _ in split.train}
    assert len(train) == 53
    assert train >= NTU60_SUBJECTS
    assert {100, 103, 45, 97} <= train
    assert {3, 106, 99} <= {performer(path) for path, _ in split.test}


def test_ntu120_cross_setup():
    split = split_videos(ntu(setups=range(1, 33), performers=(1,)), "ntu120", "cross-setup")
    assert {int(path.name[1:4]) for path, _ in split.train} == set(range(2, 33, 2))
    assert {int(path.name[1:4]) for path, _ in split.test} == set(range(1, 33, 2))


SMARTHOME_PERSONS = (2, 3, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 25)


def smarthome(actions=("Walk", "Cook.Cleanup"), cameras=range(1, 8)):
    return [
        Path(f"{action}_p{person:02d}_r00_v01_c{camera:02d}.mp4")
        for action in actions
        for person in SMARTHOME_PERSONS
        for camera in cameras
    ]


def test_smarthome_cross_subject():
    split = split_videos(smarthome(), "smarthome", "cross-subject")
    persons = {int(path.stem.split("_p")[1][:2]) for path, _ in split.train}
    assert persons == {3, 4, 6, 7, 9, 12, 13, 15, 17, 19, 25}
    assert len({int(path.stem.split("_p")[1][:2]) for path, _ in split.test}) == 7
    assert split.classes == ("Cook.Cleanup", "Walk")


@pytest.mark.parametrize(("protocol", "cameras"), [("cross-view-1", {1}), ("cross-view-2", {1, 3, 4, 6, 7})])
def test_smarthome_cross_view(protocol, cameras):
    videos = [*smarthome(), Path("Jump_p02_r00_v01_c02.mp4")]  # never seen by a training camera
    split = split_videos(videos, "smarthome", protocol)
    camera = {name: {int(path.stem[-2:]) for path, _ in getattr(split, name)} for name in ("train", "val", "test")}
    assert camera == {"train": cameras, "val": {5}, "test": {2}}
    assert split.classes == ("Cook.Cleanup", "Walk")
    assert videos[-1] in split.left_out


NUCLA_ACTIONS = (1, 2, 3, 4, 5, 6, 8, 9, 11, 12)


@pytest.mark.parametrize(
    "name", ["a{a:02d}/v{v:02d}_s{s:02d}_e{e:02d}.avi", "view_{v}/a{a:02d}_s{s:02d}_e{e:02d}_v{v:02d}.mp4"]
)
def test_nucla(name):
    videos = [
        Path(name.format(a=a, v=v, s=s, e=e))
        for a in NUCLA_ACTIONS
        for v in (1, 2, 3)
        for s in range(1, 11)
        for e in (0, 1)
    ]
    split = split_videos(videos, "nucla", "cross-view")
    assert len(split.train) == 2 * len(split.test) == 2 * 10 * 10 * 2
    assert all("v03" in path.name for path, _ in split.test)
    assert split.classes == tuple(f"a{number:02d}" for number in NUCLA_ACTIONS)
    assert Counter(label for _, label in split.test) == dict.fromkeys(range(10), 20)
    subjects = split_videos(videos, "nucla", "cross-subject", test_subjects=[10])
    assert all("s10" in path.name for path, _ in subjects.test)
    assert len(subjects.test) == 10 * 3 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ntu6", "cross-view"), "there are no protocols for 'ntu6'; did you mean 'ntu60'?"),
        (("ntu60", "cross-vew"), "ntu60 has no protocol 'cross-vew'; did you mean 'cross-view'?"),
        (("smarthome", "cross-subject"), "none of the 240 videos is named as those of smarthome, such as S001"),
    ],
)
def test_bad_requests(arguments, message):
    with pytest.raises(UserError, match=message):
        split_videos(ntu(), *arguments)


def test_an_empty_part_is_an_error():
    with pytest.raises(UserError, match="ntu60 cross-view: no video is left for the test list"):
        split_videos(ntu(cameras=(2, 3)), "ntu60", "cross-view")
    with pytest.raises(UserError, match="--test-subjects is for nucla's cross-subject"):
        split_videos(ntu(), "ntu60", "cross-subject", test_subjects=[3])


def test_some_actions_only():
    split = split_videos(smarthome(), "smarthome", "cross-view-1", actions=["Walk"])
    assert split.classes == ("Walk",)
    assert all(path.name.startswith("Walk") for path, _ in (*split.train, *split.val, *split.test))
    with pytest.raises(UserError, match="--actions: no video shows Wlak"):
        split_videos(smarthome(), "smarthome", "cross-view-1", actions=["Walk", "Wlak"])


def test_random_split_takes_of_each_class_alike():
    samples = [(Path(f"{label}/{number}.mp4"), label) for label in range(3) for number in range(10 * (label + 1))]
    split = split_random(samples, ("a", "b", "c"), 0.2, seed=1)
    assert Counter(label for _, label in split.test) == {0: 2, 1: 4, 2: 6}
    assert sorted([*split.train, *split.test]) == sorted(samples)
    assert split == split_random(samples, ("a", "b", "c"), 0.2, seed=1)
    assert split != split_random(samples, ("a", "b", "c"), 0.2, seed=2)
    more = take_validation(split, 0.25, seed=0)
    assert Counter(label for _, label in more.val) == {0: 2, 1: 4, 2: 6}
    assert sorted([*more.train, *more.val]) == sorted(split.train)
    assert more.test == split.test


def test_classes_of_one_video_stay_in_training():
    split = split_random([(Path("a"), 0), (Path("b"), 1), (Path("c"), 1)], ("x", "y"), 0.5, seed=0)
    assert len(split.test) == 1
    assert (Path("a"), 0) in split.train
    with pytest.raises(UserError, match="no class with two videos"):
        split_random([(Path("a"), 0), (Path("b"), 1)], ("x", "y"), 0.5, seed=0)
