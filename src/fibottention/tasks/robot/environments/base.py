"""What an environment is."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Environment", "EnvironmentSpec", "Expert"]


@dataclass(frozen=True)
class EnvironmentSpec:
    """What is known of an environment without starting it.

    Attributes:
        name: Its name.
        cameras: Names of the images in an observation.
        states: Names and lengths of the vectors in an observation.
        image_size: Side of the images in pixels.
        action_dim: Numbers in an action.
        rotation: Place in the action where axis and angle of a rotation begin; None if it has none.
        hand: Name of the state that says where the hand is, for actions that begin with a position; None for others.
        action_low: Lower bounds of a random action.
        action_high: Upper bounds of a random action.
        max_steps: Steps until an episode ends without success.
        fps: Steps per second.
        columns: For each format, where it keeps what an observation names, such as ``state[:2]``.
        task: What is to be done, in words.
    """

    name: str
    cameras: tuple[str, ...]
    states: dict[str, int]
    image_size: int
    action_dim: int
    rotation: int | None
    hand: str | None
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    max_steps: int
    fps: int
    columns: dict[str, dict[str, str]]
    task: str


class Environment(Protocol):
    """A simulated robot. Looking is a step of its own, since drawing takes longer than moving."""

    spec: EnvironmentSpec

    def reset(self, seed: int) -> None:
        """Begin an episode; the same seed begins the same one."""
        ...

    def step(self, action: NDArray[Any]) -> tuple[float, bool]:
        """Do an action ``(action_dim,)``; returns the reward, between 0 and 1, and whether the task is done."""
        ...

    def observe(self) -> dict[str, NDArray[Any]]:
        """Images ``(H, W, 3)`` uint8 and vectors float32, by name."""
        ...

    def state(self) -> NDArray[np.float64]:
        """All that the simulator knows, as one vector."""
        ...

    def render(self) -> NDArray[np.uint8]:
        """A picture for people, ``(H, W, 3)``."""
        ...

    def hold(self) -> NDArray[np.float32]:
        """The action that does nothing."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class Expert(Protocol):
    """Knows what to do, from the simulator's own state."""

    def act(self) -> NDArray[np.float32]:
        """The next action."""
        ...
