"""Diffusion Policy's replay buffer: zarr arrays of all steps one after the other, and where each episode ends."""

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import ZipStore

from fibottention.errors import UserError
from fibottention.tasks.robot.environments import EnvironmentSpec
from fibottention.tasks.robot.formats.base import part, split_column
from fibottention.tasks.robot.record import Episode

__all__ = ["Reader", "write"]

_CHUNK = 64  # steps


class Reader:
    """See `Demonstrations`; zarr formats 2 (as published) and 3 are read."""

    format = "zarr"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            root: Any
            if path.suffix == ".zip":
                root = zarr.open_group(ZipStore(path, mode="r"), mode="r", path=_folder_in(path))
            else:
                root = zarr.open_group(path, mode="r")
            self.data: Any = root["data"]
            self.ends = np.asarray(root["meta/episode_ends"][:], dtype=np.int64)
            seeds = np.asarray(root["meta/seeds"][:]) if "meta/seeds" in root else None
        except Exception as error:  # zarr, zip and file system have their own
            raise UserError(
                f"{path} is not a replay buffer of Diffusion Policy with data/ and meta/episode_ends: {error}"
            ) from error
        if not len(self.ends) or (np.diff(self.ends, prepend=0) < 1).any():
            raise UserError(f"{path}: meta/episode_ends must be ascending, from 1 on, got {self.ends[:5].tolist()} ...")
        self.columns = list(self.data.array_keys())
        for name in self.columns:
            if self.data[name].shape[0] < self.ends[-1]:
                raise UserError(
                    f"{path}: data/{name} has {self.data[name].shape[0]} steps, and the episodes end at {self.ends[-1]}"
                )
        self.names = [f"episode {i}" for i in range(len(self.ends))]
        self.seeds = None if seeds is None else [int(seed) for seed in seeds]

    def close(self) -> None:
        """See `Demonstrations`."""
        self.data.store.close()

    def read(self, episode: int, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
        """See `Demonstrations`."""
        start, stop = (0 if episode == 0 else self.ends[episode - 1]), self.ends[episode]
        arrays = {}
        for text in columns:
            name, which = split_column(text, self.columns, self.path)
            array = self.data[name]
            if array.nchunks_initialized < array.nchunks:  # else they would be read as zeros
                there = f"{array.nchunks_initialized} of its {array.nchunks} chunks"
                raise UserError(f"{self.path}: data/{name} has {there}; is it whole?")
            try:
                arrays[text] = part(np.asarray(array[start:stop]), which)
            except Exception as error:
                raise UserError(f"cannot read {self.names[episode]} of {self.path}, data/{name}: {error}") from error
        return arrays


def _folder_in(path: Path) -> str:
    """The folder within a zip that holds ``data``; empty if the zip has no folder around it."""
    with zipfile.ZipFile(path) as file:
        names = [name.partition("meta/episode_ends/") for name in file.namelist()]
    return next((before.rstrip("/") for before, found, _ in names if found), "")


def write(path: Path, episodes: Iterable[Episode], spec: EnvironmentSpec) -> None:
    """Write a zarr folder of format 2, which Diffusion Policy reads."""
    columns = spec.columns["zarr"]
    root = zarr.open_group(path, mode="w", zarr_format=2)
    data, meta = root.create_group("data"), root.create_group("meta")
    ends: list[int] = []
    seeds: list[int] = []
    arrays: dict[str, Any] = {}
    for episode in episodes:
        steps: dict[str, NDArray[Any]] = {"state": episode.states, columns["action"]: episode.actions}
        for name, values in episode.observations.items():
            if "[" not in columns[name]:  # else it is a part of the state
                steps[columns[name]] = values
        start = ends[-1] if ends else 0
        for name, values in steps.items():
            if name not in arrays:
                arrays[name] = data.create_array(
                    name,
                    shape=(0, *values.shape[1:]),
                    chunks=(_CHUNK, *values.shape[1:]),
                    dtype=values.dtype,
                    config={"write_empty_chunks": True},
                )
            arrays[name].resize((start + len(episode), *values.shape[1:]))
            arrays[name][start:] = values
        ends.append(start + len(episode))
        seeds.append(episode.seed)
    for name, numbers in (("episode_ends", ends), ("seeds", seeds)):
        meta.create_array(name, data=np.array(numbers, dtype=np.int64))
