"""PushT: a disc pushes a T-shaped block onto a T-shaped target (gym-pusht)."""

from typing import Any

import numpy as np
from gym_pusht.envs.pusht import PushTEnv
from numpy.typing import NDArray

from fibottention.tasks.robot.environments.base import EnvironmentSpec

__all__ = ["PushT", "make"]

_RENDER_SIZE = 256


class PushT:
    """See `Environment`. The reward is the covered share of the target, over the 95 % that success needs.

    Attributes:
        simulator: gym-pusht's environment, of which an expert reads the block's pose.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self.simulator = PushTEnv(
            obs_type="state",
            observation_width=spec.image_size,
            observation_height=spec.image_size,
            visualization_width=_RENDER_SIZE,
            visualization_height=_RENDER_SIZE,
        )

    def reset(self, seed: int) -> None:
        """See `Environment`."""
        self.simulator.reset(seed=seed)
        self.simulator._last_action = None  # the last episode's, which would be drawn

    def step(self, action: NDArray[Any]) -> tuple[float, bool]:
        """See `Environment`."""
        _, reward, done, _, _ = self.simulator.step(np.asarray(action, dtype=np.float64))
        return float(reward), bool(done)

    def observe(self) -> dict[str, NDArray[Any]]:
        """See `Environment`."""
        return {
            "image": np.asarray(self.simulator._render()),
            "agent_pos": np.array(self.simulator.agent.position, dtype=np.float32),
        }

    def state(self) -> NDArray[np.float64]:
        """Position of the agent, position and angle of the block."""
        return np.asarray(self.simulator.get_obs())

    def render(self) -> NDArray[np.uint8]:
        """See `Environment`."""
        return np.asarray(self.simulator.render(), dtype=np.uint8)

    def hold(self) -> NDArray[np.float32]:
        """See `Environment`."""
        return np.array(self.simulator.agent.position, dtype=np.float32)

    def close(self) -> None:
        """See `Environment`."""
        self.simulator.close()


def make(spec: EnvironmentSpec) -> PushT:
    """Start PushT."""
    return PushT(spec)
