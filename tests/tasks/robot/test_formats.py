import json
import shutil

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zarr

from fibottention.errors import UserError
from fibottention.tasks.robot.environments import environment_spec
from fibottention.tasks.robot.formats import FORMATS, open_demonstrations, write_demonstrations
from tests.robots import make_episodes, write


def path_of(folder, kind):
    return folder / f"demos{FORMATS[kind]}"


@pytest.mark.parametrize("name", ["pusht", "lift"])
@pytest.mark.parametrize("kind", list(FORMATS))
def test_every_array_reads_back_equal(tmp_path, kind, name):
    episodes = write(path_of(tmp_path, kind), kind, name, lengths=(9, 1, 14))
    demonstrations = open_demonstrations(path_of(tmp_path, kind))
    columns = environment_spec(name).columns[kind]
    assert demonstrations.format == kind
    assert demonstrations.seeds == [100, 101, 102]
    assert len(demonstrations.names) == 3
    for number in (2, 0, 1, 2):  # not only in order
        found = demonstrations.read(number, list(columns.values()))
        for key, values in {**episodes[number].observations, "action": episodes[number].actions}.items():
            assert np.array_equal(found[columns[key]].astype(values.dtype), values), key


def test_the_zarr_folder_is_what_diffusion_policy_opens(tmp_path):
    episodes = write(tmp_path / "demos.zarr", "zarr")
    assert json.loads((tmp_path / "demos.zarr" / ".zgroup").read_text()) == {"zarr_format": 2}
    root = zarr.open_group(tmp_path / "demos.zarr", mode="r")
    assert root["meta/episode_ends"][:].tolist() == [20, 23, 54]
    assert root["data/img"].shape == (54, 96, 96, 3)
    assert np.array_equal(root["data/state"][20:23], episodes[1].states)


def test_a_published_zarr_has_floats_and_may_be_zipped(tmp_path):
    """pusht_cchi_v7_replay.zarr: images of 0 .. 255 in float32, five numbers of state, inside a .zip."""
    root = zarr.open_group(tmp_path / "pusht.zarr", mode="w", zarr_format=2)
    images = np.random.default_rng(0).integers(0, 256, (6, 96, 96, 3)).astype(np.float32)
    state = np.arange(30, dtype=np.float32).reshape(6, 5)
    for name, values in (("img", images), ("state", state), ("action", state[:, :2] + 1)):
        root.create_array(f"data/{name}", data=values)
    root.create_array("meta/episode_ends", data=np.array([4, 6]))
    shutil.make_archive(str(tmp_path / "pusht.zarr"), "zip", tmp_path, "pusht.zarr")
    shutil.make_archive(str(tmp_path / "flat.zarr"), "zip", tmp_path / "pusht.zarr")
    for path in (tmp_path / "pusht.zarr", tmp_path / "pusht.zarr.zip", tmp_path / "flat.zarr.zip"):
        demonstrations = open_demonstrations(path)
        found = demonstrations.read(1, ["img", "state[:2]", "action"])
        assert np.array_equal(found["img"], images[4:])
        assert found["state[:2]"].tolist() == [[20, 21], [25, 26]]
        assert demonstrations.seeds is None


def test_both_versions_of_zarr_are_read(tmp_path):
    for version in (2, 3):
        root = zarr.open_group(tmp_path / f"{version}.zarr", mode="w", zarr_format=version)
        root.create_array("data/action", data=np.arange(6.0).reshape(3, 2))
        root.create_array("meta/episode_ends", data=np.array([1, 3]))
        found = open_demonstrations(tmp_path / f"{version}.zarr").read(1, ["action"])["action"]
        assert found.tolist() == [[2, 3], [4, 5]]


def test_the_hdf5_file_has_robomimics_attributes_and_filters(tmp_path):
    episodes = write(tmp_path / "lift.hdf5", "hdf5", "lift", lengths=(4, 5, 6))
    with h5py.File(tmp_path / "lift.hdf5", "a") as file:
        data = file["data"]
        assert data.attrs["total"] == 15
        arguments = json.loads(data.attrs["env_args"])
        assert arguments["env_name"] == "Lift"
        assert data["demo_1"].attrs["num_samples"] == 5
        assert data["demo_2/dones"][:].tolist() == [0] * 5 + [1]
        file.create_dataset("mask/valid", data=np.array([b"demo_2", b"demo_0"]))
    chosen = open_demonstrations(tmp_path / "lift.hdf5", "valid")
    assert chosen.names == ["demo_0", "demo_2"]
    assert np.array_equal(chosen.read(1, ["actions"])["actions"], episodes[2].actions)
    with pytest.raises(UserError, match="has no filter 'vallid'.*did you mean"):
        open_demonstrations(tmp_path / "lift.hdf5", "vallid")
    # demo_10 comes after demo_9, not after demo_1.
    write(tmp_path / "many.hdf5", "hdf5", lengths=(1,) * 11)
    assert open_demonstrations(tmp_path / "many.hdf5").names[-2:] == ["demo_9", "demo_10"]


def test_the_lerobot_folder_says_what_it_holds(tmp_path):
    episodes = write(tmp_path / "pusht", "lerobot")
    info = json.loads((tmp_path / "pusht/meta/info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"], info["fps"]) == ("v3.0", 3, 54, 10)
    assert info["features"]["observation.image"]["dtype"] == "video"
    rows = parquet.read_table(tmp_path / "pusht/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["dataset_from_index"] for row in rows] == [0, 20, 23]
    assert rows[2]["videos/observation.image/from_timestamp"] == pytest.approx(2.3)
    steps = parquet.read_table(tmp_path / "pusht/data/chunk-000/file-000.parquet").to_pydict()
    assert steps["index"] == list(range(54))
    assert steps["frame_index"][20:23] == [0, 1, 2]
    assert steps["timestamp"][21] == pytest.approx(0.1)
    stats = json.loads((tmp_path / "pusht/meta/stats.json").read_text())
    actions = np.concatenate([episode.actions for episode in episodes])
    assert stats["action"]["mean"] == pytest.approx(actions.mean(0).tolist(), abs=1e-6)
    assert stats["action"]["std"] == pytest.approx(actions.std(0).tolist(), abs=1e-6)
    images = np.concatenate([episode.observations["image"] for episode in episodes]) / 255
    assert np.ravel(stats["observation.image"]["mean"]) == pytest.approx(images.mean((0, 1, 2)), abs=1e-6)
    assert np.shape(stats["observation.image"]["std"]) == (3, 1, 1)


def test_lerobot_pictures_within_parquet(tmp_path):
    """As lerobot/pusht_image keeps them: PNG in the table, one row group for all."""
    import io

    from PIL import Image

    episodes = write(tmp_path / "pusht", "lerobot", lengths=(3, 4))
    info = json.loads((tmp_path / "pusht/meta/info.json").read_text())
    info["features"]["observation.image"]["dtype"] = "image"
    (tmp_path / "pusht/meta/info.json").write_text(json.dumps(info))
    file = tmp_path / "pusht/data/chunk-000/file-000.parquet"
    table = parquet.read_table(file)
    pictures = []
    for image in np.concatenate([episode.observations["image"] for episode in episodes]):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        pictures.append({"bytes": buffer.getvalue(), "path": None})
    parquet.write_table(table.append_column("observation.image", pa.array(pictures)), file)
    found = open_demonstrations(tmp_path / "pusht").read(1, ["observation.image", "action"])
    assert np.array_equal(found["observation.image"], episodes[1].observations["image"])
    assert np.array_equal(found["action"], episodes[1].actions)


def damage(path, kind):
    if kind == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "garbage":
        path.write_bytes(b"this is no such file" * 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nothing.zarr", "does not exist"),
        (lambda p: (p / "empty").mkdir() or p / "empty", "holds no demonstrations: it is neither"),
        (lambda p: (p / "notes.txt").write_text("x") and p / "notes.txt", "holds no demonstrations"),
    ],
)
def test_what_is_no_demonstration(tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        open_demonstrations(make(tmp_path))


@pytest.mark.parametrize("how", ["cut", "garbage"])
def test_a_damaged_hdf5_file(tmp_path, how):
    write(tmp_path / "demos.hdf5", "hdf5")
    damage(tmp_path / "demos.hdf5", how)
    with pytest.raises(UserError, match=r"demos.hdf5 cannot be read as HDF5, is it whole\?"):
        open_demonstrations(tmp_path / "demos.hdf5")


def test_a_broken_episode_is_named(tmp_path):
    for kind, expected in (("zarr", "episode 1"), ("hdf5", "demo_1"), ("lerobot", "episode 1")):
        path = path_of(tmp_path, kind)
        write(path, kind, lengths=(70, 70, 70))
        if kind == "zarr":
            for chunk in (path / "data/img").glob("1.*"):
                chunk.write_bytes(b"garbage")
        elif kind == "hdf5":
            with h5py.File(path, "a") as file:
                del file["data/demo_1/actions"]
        else:
            video = next(path.rglob("*.mp4"))
            content = bytearray(video.read_bytes())
            content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
            video.write_bytes(content)
        demonstrations = open_demonstrations(path)
        columns = [environment_spec("pusht").columns[kind][name] for name in ("image", "action")]
        with pytest.raises(UserError, match=f"cannot read {expected} of "):
            demonstrations.read(1, columns)


def test_lengths_that_do_not_fit(tmp_path):
    write(tmp_path / "demos.zarr", "zarr")
    root = zarr.open_group(tmp_path / "demos.zarr", mode="a")
    root["data/action"].resize((50, 2))
    with pytest.raises(UserError, match="data/action has 50 steps, and the episodes end at 54"):
        open_demonstrations(tmp_path / "demos.zarr")
    root["meta/episode_ends"][:] = [20, 20, 54]
    with pytest.raises(UserError, match="meta/episode_ends must be ascending"):
        open_demonstrations(tmp_path / "demos.zarr")


def test_a_zarr_folder_that_lacks_chunks_is_refused(tmp_path):
    """They would be read as zeros."""
    write(tmp_path / "demos.zarr", "zarr", lengths=(70, 70))
    next((tmp_path / "demos.zarr/data/img").glob("1.*")).unlink()
    demonstrations = open_demonstrations(tmp_path / "demos.zarr")
    with pytest.raises(UserError, match="data/img has 2 of its 3 chunks; is it whole?"):
        demonstrations.read(0, ["img"])


def test_hdf5_files_of_others(tmp_path):
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["data/demo_0"] = np.zeros(3)
    with pytest.raises(UserError, match="is not a file of robomimic"):
        open_demonstrations(tmp_path / "other.hdf5")


def test_parts_of_columns(tmp_path):
    episodes = write(tmp_path / "demos.zarr", "zarr")
    demonstrations = open_demonstrations(tmp_path / "demos.zarr")
    found = demonstrations.read(1, ["state[1:4]", "state[3:]", "state[:]"])
    assert np.array_equal(found["state[1:4]"], episodes[1].states[:, 1:4])
    assert np.array_equal(found["state[3:]"], episodes[1].states[:, 3:])
    assert np.array_equal(found["state[:]"], episodes[1].states)
    for wrong in ("state[:9]", "", "stat[:2]"):
        with pytest.raises(UserError):
            demonstrations.read(1, [wrong])


def test_other_versions_and_columns_are_named(tmp_path):
    write(tmp_path / "demos", "lerobot", lengths=(3,))
    with pytest.raises(UserError, match=r"has no column 'observation.imag'; did you mean 'observation.image'\?"):
        open_demonstrations(tmp_path / "demos").read(0, ["observation.imag"])
    info = json.loads((tmp_path / "demos/meta/info.json").read_text())
    (tmp_path / "demos/meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(UserError, match="version v2.1; v3.0 is read"):
        open_demonstrations(tmp_path / "demos")
    write(tmp_path / "demos.zarr", "zarr")
    with pytest.raises(UserError, match="data.filter=train is for HDF5 files"):
        open_demonstrations(tmp_path / "demos.zarr", "train")


def test_nothing_is_left_of_a_failed_write(tmp_path):
    spec = environment_spec("pusht")

    def episodes():
        yield make_episodes(spec, [4])[0]
        raise KeyboardInterrupt

    for kind in FORMATS:
        with pytest.raises(KeyboardInterrupt):
            write_demonstrations(path_of(tmp_path, kind), kind, episodes(), spec)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "demos.zarr", "zarr")
    with pytest.raises(UserError, match="exists already"):
        write(tmp_path / "demos.zarr", "zarr")
