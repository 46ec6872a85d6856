"""LeRobot's data sets of version 3: Parquet for numbers, one MP4 per camera for many episodes."""

import contextlib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from numpy.typing import NDArray
from PIL import Image

from fibottention.errors import UserError
from fibottention.tasks.robot.environments import EnvironmentSpec
from fibottention.tasks.robot.formats.base import part, split_column
from fibottention.tasks.robot.record import Episode
from fibottention.tasks.video.decode import Video, open_video
from fibottention.tasks.video.encode import VideoWriter

__all__ = ["Reader", "write"]

_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"


class Reader:
    """See `Demonstrations`; cameras may be videos or pictures within the Parquet files."""

    format = "lerobot"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.info = json.loads((path / "meta" / "info.json").read_text())
            version, self.features = str(self.info["codebase_version"]), dict(self.info["features"])
            if not version.startswith("v3"):
                raise UserError(f"{path} is a LeRobot data set of version {version}; v3.0 is read (LeRobot converts)")
            files = sorted((path / "meta" / "episodes").glob("*/*.parquet"))
            tables = [parquet.read_table(file, columns=self._episode_columns(file)) for file in files]
            self.episodes = [row for table in tables for row in table.to_pylist()]
            self.episodes.sort(key=lambda row: row["episode_index"])
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise UserError(f"{path} is not a LeRobot data set that can be read: {error}") from error
        if not self.episodes:
            raise UserError(f"{path} holds no episodes")
        self.names = [f"episode {row['episode_index']}" for row in self.episodes]
        self.columns = list(self.features)
        seeds = [row.get("seed") for row in self.episodes]
        self.seeds = None if None in seeds else seeds
        self._table: tuple[Path, Any] | None = None
        self._videos: dict[str, tuple[Path, Video, contextlib.ExitStack]] = {}

    @staticmethod
    def _episode_columns(file: Path) -> list[str]:
        return [name for name in parquet.read_schema(file).names if not name.startswith("stats/") and name != "tasks"]

    def close(self) -> None:
        """See `Demonstrations`."""
        for _, _, stack in self._videos.values():
            stack.close()
        if self._table is not None:
            self._table[1].close()

    def read(self, episode: int, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
        """See `Demonstrations`."""
        row, arrays = self.episodes[episode], {}
        for text in columns:
            name, which = split_column(text, self.columns, self.path)
            try:
                if self.features[name]["dtype"] == "video":
                    arrays[text] = self._frames(row, name)
                else:
                    arrays[text] = part(self._numbers(row, name), which)
            except (UserError, OSError, KeyError, ValueError, pa.ArrowException) as error:
                raise UserError(f"cannot read {self.names[episode]} of {self.path}, {name}: {error}") from error
        return arrays

    def _numbers(self, row: dict[str, Any], name: str) -> NDArray[Any]:
        file = self.path / self.info.get("data_path", _DATA).format(
            chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
        )
        if self._table is None or self._table[0] != file:
            self._table = file, parquet.ParquetFile(file)
        handle = self._table[1]
        # Episodes are row groups in LeRobot's files and ours; whichever they are, rows are chosen by episode.
        groups = [g for g in range(handle.num_row_groups) if _holds(handle, g, row["episode_index"])]
        table = handle.read_row_groups(groups, columns=["episode_index", name])
        table = table.filter(pa.array(table["episode_index"].to_numpy() == row["episode_index"]))
        if len(table) != row["length"]:
            raise UserError(f"{len(table)} steps instead of {row['length']}")
        if self.features[name]["dtype"] == "image":
            return np.stack(
                [np.array(Image.open(io.BytesIO(v["bytes"])).convert("RGB")) for v in table[name].to_pylist()]
            )
        values = np.array(table[name].to_pylist())
        return values.astype(self.features[name]["dtype"])

    def _frames(self, row: dict[str, Any], name: str) -> NDArray[np.uint8]:
        file = self.path / (self.info.get("video_path") or _VIDEO).format(
            video_key=name,
            chunk_index=row[f"videos/{name}/chunk_index"],
            file_index=row[f"videos/{name}/file_index"],
        )
        if name not in self._videos or self._videos[name][0] != file:
            if name in self._videos:
                self._videos.pop(name)[2].close()
            stack = contextlib.ExitStack()
            self._videos[name] = file, stack.enter_context(open_video(file)), stack
        video = self._videos[name][1]
        wanted = row[f"videos/{name}/from_timestamp"] + np.arange(row["length"]) / self.info["fps"]
        places = (
            np.abs(video.times[None] - wanted[:, None]).argmin(1)
            if len(video.times) < 2
            else _nearest(video.times, wanted)
        )
        if np.abs(video.times[places] - wanted).max() > 0.5 / self.info["fps"]:
            raise UserError(f"{file.name} has no frames for {wanted[0]:.2f} to {wanted[-1]:.2f} seconds")
        return video.frames(places.tolist()).permute(0, 2, 3, 1).numpy()


def _nearest(times: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    after = np.searchsorted(times, wanted).clip(1, len(times) - 1)
    return np.where(wanted - times[after - 1] <= times[after] - wanted, after - 1, after)


def _holds(handle: Any, group: int, episode: int) -> bool:
    """Whether a row group may hold steps of an episode, as its statistics say."""
    for i in range(handle.metadata.row_group(group).num_columns):
        chunk = handle.metadata.row_group(group).column(i)
        if chunk.path_in_schema == "episode_index":
            statistics = chunk.statistics
            return statistics is None or statistics.min <= episode <= statistics.max
    return True


def write(path: Path, episodes: Iterable[Episode], spec: EnvironmentSpec) -> None:
    """Write a LeRobot folder; the videos are without loss (H.264 in RGB)."""
    columns = spec.columns["lerobot"]
    cameras = {name: columns[name] for name in spec.cameras}
    vectors = {name: columns[name].split("[")[0] for name in spec.states}
    state_names = [f"{name}_{i}" for name, size in spec.states.items() for i in range(size)]
    side = spec.image_size
    features: dict[str, Any] = {
        key: {
            "dtype": "video",
            "shape": [side, side, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": side,
                "video.width": side,
                "video.channels": 3,
                "video.codec": "h264",
                "video.pix_fmt": "gbrp",
                "video.fps": spec.fps,
                "is_depth_map": False,
                "has_audio": False,
            },
        }
        for key in cameras.values()
    }
    features["observation.state"] = {"dtype": "float32", "shape": [len(state_names)], "names": state_names}
    features["action"] = {"dtype": "float32", "shape": [spec.action_dim], "names": None}
    features |= {
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{
            name: {"dtype": "int64", "shape": [1], "names": None}
            for name in ("frame_index", "episode_index", "index", "task_index")
        },
    }
    rows, tables, index = [], None, 0
    sums = _Statistics()
    data_file = path / _DATA.format(chunk_index=0, file_index=0)
    data_file.parent.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        videos = {}
        for name, key in cameras.items():
            file = path / _VIDEO.format(video_key=key, chunk_index=0, file_index=0)
            file.parent.mkdir(parents=True)
            videos[name] = stack.enter_context(contextlib.closing(VideoWriter(file, spec.fps, lossless=True)))
        for number, episode in enumerate(episodes):
            length = len(episode)
            for name, video in videos.items():
                for step, frame in enumerate(episode.observations[name]):
                    video.add(frame, (index + step) / spec.fps)
                sums.add(cameras[name], episode.observations[name].reshape(-1, 3) / 255)
            state = np.concatenate([episode.observations[name] for name in vectors], axis=1)
            done = np.arange(length) == length - 1
            steps: dict[str, Any] = {
                "observation.state": state,
                "action": episode.actions,
                "next.reward": episode.rewards,
                "next.done": done,
                "timestamp": (np.arange(length) / spec.fps).astype(np.float32),
                "frame_index": np.arange(length),
                "episode_index": np.full(length, number),
                "index": index + np.arange(length),
                "task_index": np.zeros(length, dtype=np.int64),
            }
            for name, values in steps.items():
                sums.add(name, np.asarray(values, dtype=np.float64).reshape(length, -1))
            table = pa.table(
                {
                    name: pa.array(list(values), pa.list_(pa.float32(), values.shape[1]))
                    if np.ndim(values) == 2
                    else pa.array(values)
                    for name, values in steps.items()
                }
            )
            tables = tables or stack.enter_context(parquet.ParquetWriter(data_file, table.schema))
            tables.write_table(table)
            rows.append(
                {
                    "episode_index": number,
                    "data/chunk_index": 0,
                    "data/file_index": 0,
                    "dataset_from_index": index,
                    "dataset_to_index": index + length,
                    "tasks": [spec.task],
                    "length": length,
                    "seed": episode.seed,
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                    **{
                        f"videos/{key}/{entry}": value
                        for key in cameras.values()
                        for entry, value in (
                            ("chunk_index", 0),
                            ("file_index", 0),
                            ("from_timestamp", index / spec.fps),
                            ("to_timestamp", (index + length) / spec.fps),
                        )
                    },
                }
            )
            index += length
    episodes_file = path / _EPISODES
    episodes_file.parent.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(rows), episodes_file)
    parquet.write_table(_tasks(spec.task), path / "meta" / "tasks.parquet")
    info = {
        "codebase_version": "v3.0",
        "robot_type": spec.name,
        "total_episodes": len(rows),
        "total_frames": index,
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": spec.fps,
        "splits": {"train": f"0:{len(rows)}"},
        "data_path": _DATA,
        "video_path": _VIDEO,
        "features": features,
    }
    (path / "meta" / "info.json").write_text(json.dumps(info, indent=4) + "\n")
    (path / "meta" / "stats.json").write_text(json.dumps(sums.result(set(cameras.values())), indent=4) + "\n")


def _tasks(task: str) -> pa.Table:
    """The table of tasks, whose text is the index, as pandas writes it."""
    table = pa.table({"task_index": [0], "__index_level_0__": [task]})
    columns = [
        {
            "name": "task_index",
            "field_name": "task_index",
            "pandas_type": "int64",
            "numpy_type": "int64",
            "metadata": None,
        },
        {
            "name": None,
            "field_name": "__index_level_0__",
            "pandas_type": "unicode",
            "numpy_type": "object",
            "metadata": None,
        },
    ]
    pandas = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [],
        "columns": columns,
        "pandas_version": "2.0.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


class _Statistics:
    """Least, largest, mean and standard deviation of each feature."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Any]] = {}

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Take up values ``(count, numbers)``."""
        found = [values.min(0), values.max(0), values.sum(0), (values**2).sum(0), len(values)]
        if name in self.sums:
            old = self.sums[name]
            found = [
                np.minimum(old[0], found[0]),
                np.maximum(old[1], found[1]),
                *(a + b for a, b in zip(old[2:], found[2:])),
            ]
        self.sums[name] = found

    def result(self, cameras: set[str]) -> dict[str, dict[str, Any]]:
        """As ``stats.json`` has them; numbers of a camera are per channel, ``(3, 1, 1)``."""
        result = {}
        for name, (low, high, total, squares, count) in self.sums.items():
            mean = total / count
            std = np.sqrt(np.maximum(squares / count - mean**2, 0))
            shape = (3, 1, 1) if name in cameras else (-1,)
            numbers = {"min": low, "max": high, "mean": mean, "std": std}
            result[name] = {key: value.reshape(shape).tolist() for key, value in numbers.items()} | {"count": [count]}
        return result
