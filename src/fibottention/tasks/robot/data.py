"""Demonstrations for training and validation."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fibottention.errors import UserError
from fibottention.tasks.labelled_data import EpochSampler
from fibottention.tasks.robot.config import RobotConfig
from fibottention.tasks.robot.environments import environment_spec
from fibottention.tasks.robot.formats import open_demonstrations
from fibottention.tasks.robot.normalizer import Normalizer
from fibottention.tasks.robot.shapes import PolicyShapes, observed_names
from fibottention.tasks.robot.store import EpisodeStore
from fibottention.tasks.robot.windows import WindowDataset

__all__ = ["RobotData"]

_IMAGES = 500  # that the mean of a camera is taken of
_STEPS = 1000  # that are looked at for absolute actions
_REACH = 0.4  # metres that a target may be from the hand


class RobotData:
    """Loaders of windows for training and validation.

    Attributes:
        shapes: What the policy sees and does.
        store: The demonstrations, unpacked.
        train_episodes: Numbers of the training episodes.
        val_episodes: Numbers of the validation episodes.

    Args:
        config: All options.
        progress: Called with the episodes unpacked and all.
    """

    def __init__(self, config: RobotConfig, progress: Callable[[int, int], object] = lambda done, total: None) -> None:
        data = config.data
        store, cameras, states = _open_store(config, progress)
        self.store, self.shapes = store, _shapes(store, cameras, states, config)
        self.train_episodes, self.val_episodes = _split(len(store.lengths), config)
        common: dict[str, Any] = {"cameras": cameras, "states": states, "seed": config.train.seed}
        self.train_dataset = WindowDataset(store, self.train_episodes, data, train=True, **common)
        self.val_dataset = WindowDataset(store, self.val_episodes, data, train=False, **common)
        self.sampler = EpochSampler(len(self.train_dataset), config.train.seed)
        settings: dict[str, Any] = {"num_workers": data.workers, "pin_memory": torch.cuda.is_available()}
        batch = config.train.batch_size
        self.train_loader = DataLoader(
            self.train_dataset, batch, sampler=self.sampler, drop_last=len(self.train_dataset) >= batch, **settings
        )
        self.val_loader = DataLoader(self.val_dataset, batch, **settings)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the crops of an epoch."""
        self.sampler.epoch = self.train_dataset.epoch = epoch

    def fit(self, normalizer: Normalizer) -> None:
        """Let a normaliser take its statistics from the training episodes."""
        rows = np.concatenate([np.arange(*self.store.starts[[e, e + 1]]) for e in self.train_episodes])
        for name in self.shapes.cameras:
            some = np.unique(np.linspace(0, len(rows) - 1, min(_IMAGES, len(rows))).round().astype(int))
            normalizer.fit_images(name, torch.from_numpy(self.store.arrays[name][rows[some]]))
        for name in self.shapes.states:
            # A quaternion is within -1 .. 1 already, and means less if its numbers are stretched one by one.
            fixed = slice(None) if name.endswith("quat") else None
            normalizer.fit(name, torch.from_numpy(self.store.arrays[name][rows]), fixed)
        actions = self.shapes.learned_actions(torch.from_numpy(self.store.arrays["action"][rows]))
        normalizer.fit("action", actions, fixed=self.shapes.learned_rotation)


def _open_store(
    config: RobotConfig, progress: Callable[[int, int], object] = lambda done, total: None
) -> tuple[EpisodeStore, list[str], list[str]]:
    """The demonstrations of a configuration, unpacked, and the names of cameras and states.

    Raises:
        UserError: If they cannot be read or lack what the policy sees.
    """
    data, name = config.data, config.rollout.environment
    if data.path is None:
        raise UserError("data.path must name the demonstrations; fibottention robot record makes some")
    environment = environment_spec(name) if name is not None else None
    with contextlib.closing(open_demonstrations(data.path, data.filter)) as demonstrations:
        kind = demonstrations.format
    cameras, states, action = observed_names(data, environment, kind)
    store = EpisodeStore.unpack(
        Path(data.path),
        cameras,
        {**states, "action": action},
        episodes=data.filter,
        cache=Path(data.cache) if data.cache else None,
        progress=progress,
    )
    return store, list(cameras), list(states)


def _shapes(store: EpisodeStore, cameras: list[str], states: list[str], config: RobotConfig) -> PolicyShapes:
    action_dim = store.arrays["action"].shape[1]
    rotation = config.data.rotation
    name = config.rollout.environment
    if name is not None:
        spec = environment_spec(name)
        if action_dim != spec.action_dim:
            raise UserError(f"the actions have {action_dim} numbers, and {name} takes {spec.action_dim}")
        for camera in cameras:
            height, width = store.arrays[camera].shape[1:3]
            if (height, width) != (spec.image_size,) * 2:
                raise UserError(
                    f"the images of {camera} have {height} x {width} pixels, and {name} draws {spec.image_size} x "
                    f"{spec.image_size}"
                )
        for state in states:
            if store.arrays[state].shape[1] != spec.states[state]:
                raise UserError(
                    f"{state} has {store.arrays[state].shape[1]} numbers, and {name} gives {spec.states[state]}"
                )
        if rotation is None:
            rotation = spec.rotation
        if spec.hand is not None and spec.hand in states:
            off = np.abs(store.arrays["action"][:_STEPS, :3] - store.arrays[spec.hand][:_STEPS]).max(axis=1)
            if np.median(off) > _REACH:
                raise UserError(
                    f"the actions are {np.median(off):.2f} m from where the hand is: {name} takes absolute poses, and "
                    "these are relative to the hand (Diffusion Policy's robomimic_image data with abs in the name have "
                    "absolute ones)"
                )
    if rotation is not None and rotation + 3 > action_dim:
        raise UserError(f"data.rotation={rotation} and the two numbers after it must be in 0 .. {action_dim - 1}")
    return PolicyShapes(
        cameras={c: (int(store.arrays[c].shape[1]), int(store.arrays[c].shape[2])) for c in cameras},
        states={s: int(store.arrays[s].shape[1]) for s in states},
        action_dim=action_dim,
        rotation=rotation,
    )


def _split(count: int, config: RobotConfig) -> tuple[list[int], list[int]]:
    """Episodes for training and validation, drawn with the seed of the run."""
    chosen = np.arange(count)
    if config.data.limit is not None:
        chosen = np.unique(np.linspace(0, count - 1, min(config.data.limit, count)).round().astype(int))
    if len(chosen) < 2:
        raise UserError(f"there must be at least 2 episodes, one of them for validation, got {len(chosen)}")
    held = min(max(1, round(config.data.val_share * len(chosen))), len(chosen) - 1)
    order = np.random.default_rng(config.train.seed).permutation(chosen)
    return sorted(order[held:].tolist()), sorted(order[:held].tolist())
