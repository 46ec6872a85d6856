import multiprocessing
import os
import pickle

import numpy as np
import pytest

from fibottention.errors import UserError
from fibottention.tasks.robot.environments import environment_spec
from fibottention.tasks.robot.formats import FORMATS, write_demonstrations
from fibottention.tasks.robot.store import EpisodeStore, checked_image
from tests.robots import changed, make_episodes, write

SPEC = environment_spec("pusht")


def unpack(path, kind, cache, **options):
    columns = SPEC.columns[kind]
    vectors = {name: columns[name] for name in ("agent_pos", "action")}
    return EpisodeStore.unpack(path, {"image": columns["image"]}, vectors, cache=cache, **options)


def test_all_formats_unpack_to_the_same_arrays(tmp_path):
    for kind in FORMATS:
        episodes = write(tmp_path / f"demos{FORMATS[kind]}", kind)
        store = unpack(tmp_path / f"demos{FORMATS[kind]}", kind, tmp_path / "cache")
        assert store.lengths == [20, 3, 31]
        assert store.starts.tolist() == [0, 20, 23, 54]
        for name in ("image", "agent_pos"):
            expected = np.concatenate([episode.observations[name] for episode in episodes])
            assert np.array_equal(store.arrays[name], expected)
            assert store.arrays[name].dtype == expected.dtype
        assert np.array_equal(store.arrays["action"], np.concatenate([e.actions for e in episodes]))


def test_arrays_are_mapped_not_loaded_and_not_writable(tmp_path):
    write(tmp_path / "demos.zarr", "zarr")
    store = unpack(tmp_path / "demos.zarr", "zarr", tmp_path / "cache")
    assert all(isinstance(array, np.memmap) for array in store.arrays.values())
    with pytest.raises(ValueError, match="read-only"):
        store.arrays["action"][0] = 0


def test_it_is_unpacked_once_and_anew_when_the_file_changes(tmp_path):
    write(tmp_path / "demos.hdf5", "hdf5")
    calls = []
    for _ in range(2):
        unpack(tmp_path / "demos.hdf5", "hdf5", tmp_path / "cache", progress=lambda done, total: calls.append(done))
    assert calls == [1, 2, 3]
    (tmp_path / "demos.hdf5").unlink()
    write(tmp_path / "demos.hdf5", "hdf5", lengths=(5, 6))
    os.utime(tmp_path / "demos.hdf5", ns=(1, 1))
    assert unpack(tmp_path / "demos.hdf5", "hdf5", tmp_path / "cache").lengths == [5, 6]


def test_another_process_maps_the_files_itself(tmp_path):
    write(tmp_path / "demos.zarr", "zarr")
    store = unpack(tmp_path / "demos.zarr", "zarr", tmp_path / "cache")
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).arrays["image"], store.arrays["image"])


def test_floats_may_go_to_1_or_255():
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    images[0, 0, 0] = 255
    for values in (images.astype(np.float32), (images / 255).astype(np.float32), images.transpose(0, 3, 1, 2)):
        assert np.array_equal(checked_image(values, "image", "episode 0"), images)
    for values in (images - 300.0, images * 2.0, np.where(images > 250, np.nan, images)):
        with pytest.raises(UserError, match=r"episode 0: the values of the images in image must be in 0 .. 255"):
            checked_image(values, "image", "episode 0")


def _unpack_too(work):
    return unpack(*work).lengths


def test_processes_that_unpack_at_the_same_time(tmp_path):
    write(tmp_path / "demos.zarr", "zarr")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(_unpack_too, [(tmp_path / "demos.zarr", "zarr", tmp_path / "cache")] * 4)
    assert found == [[20, 3, 31]] * 4
    assert len(list((tmp_path / "cache").iterdir())) == 1


def put(where, value):
    def change(arrays):
        arrays[where][1] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("actions", np.nan), r"actions is not finite in step 1 \(\[nan, nan\]\)"),
        (put("actions", np.inf), "actions is not finite in step 1"),
        (
            lambda a: a["observations"].update(agent_pos=a["observations"]["agent_pos"][:5]),
            "differ in their number of steps",
        ),
        (
            lambda a: a["observations"].update(image=a["observations"]["image"][:, :50]),
            r"has shape \(50, 96, 3\) per step",
        ),
        (lambda a: a["observations"].update(image=a["observations"]["image"][..., 0]), "must hold images of shape"),
        (
            lambda a: a["observations"].update(agent_pos=a["observations"]["agent_pos"][:, :1]),
            r"has shape \(1,\) per step",
        ),
    ],
)
def test_an_episode_that_cannot_be_used_is_named_and_nothing_is_kept(tmp_path, change, message):
    episodes = make_episodes(SPEC, (6, 8, 5))
    episodes[1] = changed(episodes[1], change)
    write_demonstrations(tmp_path / "demos.hdf5", "hdf5", episodes, SPEC)
    with pytest.raises(UserError, match=f"^demo_1: .*{message}"):
        unpack(tmp_path / "demos.hdf5", "hdf5", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
