"""robomimic's HDF5 files: one group per demonstration."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.robot.environments import EnvironmentSpec
from fibottention.tasks.robot.environments.specs import ROBOSUITE_NAMES
from fibottention.tasks.robot.formats.base import part, split_column
from fibottention.tasks.robot.record import Episode

__all__ = ["Reader", "write"]


class Reader:
    """See `Demonstrations`; columns are those of ``obs`` and the arrays beside it, such as ``actions``.

    Args:
        path: The file.
        episodes: Name of a filter under ``mask``.
    """

    format = "hdf5"

    def __init__(self, path: Path, episodes: str | None = None) -> None:
        self.path = path
        try:
            self.file = h5py.File(path, "r")
        except OSError as error:
            raise UserError(f"{path} cannot be read as HDF5, is it whole? ({error})") from error
        data: Any = self.file.get("data")
        self.data: Any = data
        if not isinstance(data, h5py.Group) or not all(isinstance(d, h5py.Group) for d in data.values()):
            raise UserError(f"{path} is not a file of robomimic: it has no group data with a group per demonstration")
        self.names = sorted(self.data, key=lambda name: (len(name), name))
        if episodes is not None:
            masks: list[str] = list(self.file.get("mask", ()))  # pyright: ignore[reportArgumentType]
            if episodes not in masks:
                raise UserError(f"{path} has no filter {episodes!r}{nearest(episodes, masks)}")
            chosen = {name.decode() for name in self.file[f"mask/{episodes}"][:]}  # pyright: ignore
            self.names = [name for name in self.names if name in chosen]
        if not self.names:
            raise UserError(f"{path} holds no demonstrations")
        first: Any = self.data[self.names[0]]
        beside = [name for name in first if isinstance(first[name], h5py.Dataset)]
        self.columns = [*first.get("obs", ()), *beside]
        seeds: list[Any] = [self.data[name].attrs.get("seed") for name in self.names]
        self.seeds = None if None in seeds else [int(seed) for seed in seeds]

    def close(self) -> None:
        """See `Demonstrations`."""
        self.file.close()

    def read(self, episode: int, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
        """See `Demonstrations`."""
        arrays = {}
        for text in columns:
            name, which = split_column(text, self.columns, self.path)
            try:
                group = self.data[self.names[episode]]
                found = group["obs"][name] if "obs" in group and name in group["obs"] else group[name]
                arrays[text] = part(np.asarray(found[:]), which)
            except (OSError, KeyError, RuntimeError) as error:
                raise UserError(f"cannot read {self.names[episode]} of {self.path}, {name}: {error}") from error
        return arrays


def write(path: Path, episodes: Iterable[Episode], spec: EnvironmentSpec) -> None:
    """Write a file as robomimic's ``image.hdf5`` is, without ``next_obs``, ``mask`` and the XML ``model_file``."""
    total = 0
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for number, episode in enumerate(episodes):
            group = data.create_group(f"demo_{number}")
            group.attrs["num_samples"] = len(episode)
            group.attrs["seed"] = episode.seed
            done = np.zeros(len(episode), dtype=np.int64)
            done[-1] = 1
            steps = {"actions": episode.actions, "rewards": episode.rewards, "dones": done, "states": episode.states}
            for name, values in steps.items():
                group.create_dataset(name, data=values)
            for name, values in episode.observations.items():
                packed = {"compression": "gzip", "compression_opts": 1} if values.dtype == np.uint8 else {}
                group.create_dataset(f"obs/{spec.columns['hdf5'][name]}", data=values, **packed)
            total += len(episode)
        data.attrs["total"] = total
        kwargs: dict[str, Any] = {"control_freq": spec.fps}
        if spec.name in ROBOSUITE_NAMES:
            kwargs |= {
                "robots": ["Panda"],
                "camera_names": [name.removesuffix("_image") for name in spec.cameras],
                "camera_heights": spec.image_size,
                "camera_widths": spec.image_size,
                "controller_configs": {"type": "OSC_POSE", "input_type": "absolute", "input_ref_frame": "world"},
            }
        name, kind = (ROBOSUITE_NAMES[spec.name], 1) if spec.name in ROBOSUITE_NAMES else (spec.name, 2)  # 2 is gym
        data.attrs["env_args"] = json.dumps({"env_name": name, "type": kind, "env_kwargs": kwargs})
