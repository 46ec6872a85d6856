"""Episodes of a policy in simulators that run in parallel, and what they say of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from fibottention.tasks.robot.environments import EnvironmentSpec, environment_spec, make_environment
from fibottention.tasks.robot.policy import Policy

__all__ = [
    "IdlePlanner",
    "LearnedPlanner",
    "Planner",
    "RandomPlanner",
    "Rollout",
    "RolloutSummary",
    "roll_out",
    "summarize",
]

Observations = dict[str, NDArray[Any]]


class Planner(Protocol):
    """Decides what some robots do next."""

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin an episode with each robot."""
        ...

    def plan(self, observations: Observations) -> NDArray[np.float32]:
        """Actions ``(B, steps, action_dim)`` after observations ``(B, observation_steps, ...)`` by name."""
        ...


class LearnedPlanner:
    """Plans with a policy; the noise of an episode depends on its seed only."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.generators: list[torch.Generator] = []

    def reset(self, seeds: Sequence[int]) -> None:
        """See `Planner`."""
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def plan(self, observations: Observations) -> NDArray[np.float32]:
        """See `Planner`."""
        names = (*self.policy.network.shapes.cameras, *self.policy.network.shapes.states)
        return self.policy.plan({name: observations[name] for name in names}, self.generators)


class RandomPlanner:
    """Holds a random action of the environment for some steps, then another: the least that a policy must beat."""

    def __init__(self, spec: EnvironmentSpec, steps: int) -> None:
        self.spec, self.steps = spec, steps
        self.generators: list[np.random.Generator] = []

    def reset(self, seeds: Sequence[int]) -> None:
        """See `Planner`."""
        self.generators = [np.random.default_rng(seed) for seed in seeds]

    def plan(self, observations: Observations) -> NDArray[np.float32]:
        """See `Planner`."""
        actions = [g.uniform(self.spec.action_low, self.spec.action_high) for g in self.generators]
        return np.stack(actions).astype(np.float32)[:, None].repeat(self.steps, axis=1)


class IdlePlanner:
    """Stays where the robot is."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def reset(self, seeds: Sequence[int]) -> None:
        """See `Planner`."""

    def plan(self, observations: Observations) -> NDArray[np.float32]:
        """See `Planner`."""
        return observations["hold"][:, -1:].repeat(self.steps, axis=1)


@dataclass
class Rollout:
    """One episode.

    Attributes:
        seed: What began it.
        score: The largest reward of a step.
        success: Whether the task was done.
        steps: Steps until it was done, or all.
        frames: Pictures ``(T, H, W, 3)`` of it, if asked for.
    """

    seed: int
    score: float = 0.0
    success: bool = False
    steps: int = 0
    frames: list[NDArray[np.uint8]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the pictures."""
        return {"seed": self.seed, "score": self.score, "success": self.success, "steps": self.steps}


class _Chunks(gymnasium.Env[Observations, NDArray[np.float32]]):
    """An environment whose step is several actions, and whose observation is that of the last steps.

    Only those are drawn, which is what takes the time. After the end of the episode it stands still.
    """

    def __init__(self, name: str, observation_steps: int, max_steps: int) -> None:
        self.environment = make_environment(name)
        self.observation_steps, self.max_steps, self.film = observation_steps, max_steps, False
        spec = self.environment.spec
        side = spec.image_size
        kept = (observation_steps,)
        self.observation_space: Any = spaces.Dict(
            {
                **{c: spaces.Box(0, 255, (*kept, side, side, 3), np.uint8) for c in spec.cameras},
                **{s: spaces.Box(-np.inf, np.inf, (*kept, n), np.float32) for s, n in spec.states.items()},
                "hold": spaces.Box(-np.inf, np.inf, (*kept, spec.action_dim), np.float32),
            }
        )
        self.action_space = spaces.Box(-np.inf, np.inf, (1, spec.action_dim), np.float32)
        self.render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observations, dict[str, Any]]:
        assert seed is not None
        self.environment.reset(seed)
        self.rollout = Rollout(seed)
        self.seen = [self._look()] * self.observation_steps
        self.done = False
        self._take_picture()
        return self._window(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        rollout = self.rollout
        for number, single in enumerate(action):
            if self.done:
                break
            reward, rollout.success = self.environment.step(single)
            rollout.score = max(rollout.score, reward)
            rollout.steps += 1
            self.done = rollout.success or rollout.steps >= self.max_steps
            self._take_picture()
            if self.done or len(action) - number <= self.observation_steps:
                self.seen = [*self.seen[1:], self._look()]
        return self._window(), rollout.score, rollout.success, self.done and not rollout.success, {}

    def result(self) -> Rollout:
        """The episode until now."""
        return self.rollout

    def close(self) -> None:
        self.environment.close()

    def _look(self) -> Observations:
        return {**self.environment.observe(), "hold": self.environment.hold()}

    def _window(self) -> Observations:
        return {name: np.stack([o[name] for o in self.seen]) for name in self.seen[0]}

    def _take_picture(self) -> None:
        if self.film:
            self.rollout.frames.append(self.environment.render())


def roll_out(
    name: str,
    planner: Planner,
    seeds: Sequence[int],
    *,
    observation_steps: int,
    parallel: int,
    max_steps: int | None = None,
    films: int = 0,
    progress: Callable[[Rollout], object] = lambda rollout: None,
) -> list[Rollout]:
    """Let a planner play episodes.

    Args:
        name: The environment.
        planner: What decides.
        seeds: One per episode.
        observation_steps: Steps that the planner sees.
        parallel: Simulators at the same time, each in its own process; 0 uses this one.
        max_steps: Steps until an episode ends; the environment's own if None.
        films: Keep pictures of so many of the first episodes.
        progress: Called with each episode that has ended.

    Returns:
        The episodes in the order of the seeds.
    """
    most = max_steps or environment_spec(name).max_steps
    count = min(max(parallel, 1), len(seeds))
    makers = [partial(_Chunks, name, observation_steps, most)] * count
    if parallel:
        environments: Any = AsyncVectorEnv(makers, context="spawn", daemon=True, autoreset_mode=AutoresetMode.DISABLED)
    else:
        environments = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    rollouts: list[Rollout] = []
    try:
        for start in range(0, len(seeds), count):
            chosen = list(seeds[start : start + count])
            padded = chosen + [chosen[-1]] * (count - len(chosen))  # the last round may have fewer
            environments.set_attr("film", [start + place < films for place in range(count)])
            planner.reset(padded)
            observations, _ = environments.reset(seed=padded)
            ended = np.zeros(count, dtype=bool)
            while not ended.all():
                observations, _, terminated, truncated, _ = environments.step(planner.plan(observations))
                ended = terminated | truncated
            finished = environments.call("result")[: len(chosen)]
            for rollout in finished:
                rollouts.append(rollout)
                progress(rollout)
    finally:
        environments.close()
    return rollouts


@dataclass(frozen=True)
class RolloutSummary:
    """What some episodes say of a policy.

    Attributes:
        mean_score: Mean of each episode's largest reward (``test_mean_score`` of Diffusion Policy).
        success: Share of the episodes in which the task was done.
        interval: 95 % interval of that share (Wilson).
        steps: Mean number of steps of an episode.
        episodes: Number of episodes.
    """

    mean_score: float
    success: float
    interval: tuple[float, float]
    steps: float
    episodes: int


def summarize(rollouts: Sequence[Rollout]) -> RolloutSummary:
    """Means of some episodes."""
    count = len(rollouts)
    share = sum(rollout.success for rollout in rollouts) / count
    z = 1.959964
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    return RolloutSummary(
        mean_score=float(np.mean([rollout.score for rollout in rollouts])),
        success=share,
        interval=(max(0.0, centre - half), min(1.0, centre + half)),
        steps=float(np.mean([rollout.steps for rollout in rollouts])),
        episodes=count,
    )
