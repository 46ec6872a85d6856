"""Samples of demonstrations: what was seen in some steps, and the actions around them."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fibottention.tasks.robot.config import RobotDataConfig
from fibottention.tasks.robot.store import EpisodeStore

__all__ = ["WindowDataset", "crop_images", "window_steps"]


def window_steps(length: int, horizon: int, observation_steps: int, action_steps: int) -> NDArray[np.int64]:
    """Steps of each window of an episode, ``(windows, horizon)``.

    As in Diffusion Policy, the first window begins so early that its last observation is the first step, and the last
    one ends ``action_steps - 1`` steps after the episode (2 observed and 8 executed steps of 16 then execute its last
    action); beyond the ends of the episode the first and the last step repeat. A short episode has one window.

    Args:
        length: Steps of the episode.
        horizon: Steps of a window.
        observation_steps: Steps that are seen.
        action_steps: Actions that are executed.
    """
    starts = np.arange(-(observation_steps - 1), max(length - horizon + action_steps, 1 - observation_steps + 1))
    return (starts[:, None] + np.arange(horizon)).clip(0, length - 1)


def crop_images(images: NDArray[np.uint8], size: int | None, place: NDArray[np.float64] | None) -> NDArray[np.uint8]:
    """A square part of images ``(..., H, W, 3)``.

    Args:
        images: The images.
        size: Side of the part; None leaves them as they are.
        place: Where the part is among the possible places, two numbers in 0 .. 1; the centre if None.
    """
    if size is None:
        return images
    height, width = images.shape[-3:-1]
    free = np.array([height - size, width - size])
    top, left = (free // 2 if place is None else np.minimum(place * (free + 1), free).astype(int)).tolist()
    return images[..., top : top + size, left : left + size, :]


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Windows of some episodes, as dictionaries.

    By camera ``(observation_steps, 3, S, S)`` uint8, by state ``(observation_steps, n)``, and ``action``
    ``(horizon, action_dim)``, neither scaled nor turned. A training sample depends on the seed, the epoch and its index
    only; all its images of a camera are cut at one place.

    Args:
        store: The demonstrations.
        episodes: Which episodes.
        data: Sizes.
        cameras: Names of the images.
        states: Names of the vectors.
        train: Whether to cut at random.
        seed: Seed of that.
    """

    def __init__(
        self,
        store: EpisodeStore,
        episodes: Sequence[int],
        data: RobotDataConfig,
        cameras: Sequence[str],
        states: Sequence[str],
        *,
        train: bool,
        seed: int = 0,
    ) -> None:
        self.store, self.data, self.cameras, self.states = store, data, list(cameras), list(states)
        self.train, self.seed, self.epoch = train, seed, 0
        self.steps = np.concatenate(
            [
                store.starts[e]
                + window_steps(store.lengths[e], data.horizon, data.observation_steps, data.action_steps)
                for e in episodes
            ]
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        steps = self.steps[index]
        seen = steps[: self.data.observation_steps]
        random = np.random.default_rng(zlib.crc32(f"{self.seed} {self.epoch} {index}".encode()))
        sample: dict[str, Any] = {}
        for camera in self.cameras:
            place = random.random(2) if self.train else None
            images = crop_images(self.store.arrays[camera][seen], self.data.crop, place)
            sample[camera] = images.transpose(0, 3, 1, 2)
        for state in self.states:
            sample[state] = self.store.arrays[state][seen]
        sample["action"] = self.store.arrays["action"][steps]
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in sample.items()}
