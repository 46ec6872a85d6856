"""Recording demonstrations of scripted experts, in parallel, resumable, and playing them back."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fibottention.errors import UserError
from fibottention.tasks.robot.environments import make_environment, make_expert
from fibottention.training.run import write_atomically

__all__ = ["Episode", "Recording", "record", "replay"]


@dataclass(frozen=True)
class Episode:
    """One demonstration of T steps.

    Attributes:
        observations: What was seen before each action: arrays of T by name.
        actions: ``(T, action_dim)`` float32.
        rewards: ``(T,)`` float32, after each action.
        states: All that the simulator knew before each action, ``(T, ...)`` float64.
        seed: The seed that began the episode.
        success: Whether the task was done.
    """

    observations: dict[str, NDArray[Any]]
    actions: NDArray[np.float32]
    rewards: NDArray[np.float32]
    states: NDArray[np.float64]
    seed: int
    success: bool

    def __len__(self) -> int:
        return len(self.actions)

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        arrays = {f"observations/{name}": array for name, array in self.observations.items()}
        fields = {name: getattr(self, name) for name in ("actions", "rewards", "states", "seed", "success")}

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez_compressed(file, **arrays, **fields)

        write_atomically(path, write)

    @classmethod
    def load(cls, path: Path) -> "Episode":
        """Read what `save` wrote."""
        with np.load(path) as file:
            observations = {
                name.removeprefix("observations/"): file[name] for name in file if name.startswith("observations/")
            }
            return cls(
                observations=observations,
                actions=file["actions"],
                rewards=file["rewards"],
                states=file["states"],
                seed=int(file["seed"]),
                success=bool(file["success"]),
            )


class Recording:
    """A folder of episodes that are being recorded, one file per seed.

    Args:
        folder: The folder; it may hold episodes of a recording that was stopped.
        environment: Name of the environment.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        self.folder, self.environment = folder, environment
        mark = folder / "environment.txt"
        if mark.is_file() and mark.read_text().strip() != environment:
            raise UserError(f"{folder} holds a recording of {mark.read_text().strip()}, not of {environment}")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(environment + "\n")

    def path(self, seed: int) -> Path:
        """File of an episode."""
        return self.folder / f"seed_{seed:06d}.npz"


def record_episode(environment: Any, seed: int) -> Episode:
    """Let the expert play one episode, until the task is done or the steps are used up."""
    environment.reset(seed)
    expert = make_expert(environment, seed)
    observations: list[dict[str, NDArray[Any]]] = []
    actions, rewards, states = [], [], []
    success = False
    while not success and len(actions) < environment.spec.max_steps:
        observations.append(environment.observe())
        states.append(environment.state())
        action = expert.act()
        reward, success = environment.step(action)
        actions.append(action)
        rewards.append(reward)
    return Episode(
        observations={name: np.stack([o[name] for o in observations]) for name in observations[0]},
        actions=np.stack(actions),
        rewards=np.array(rewards, dtype=np.float32),
        states=np.stack(states),
        seed=seed,
        success=success,
    )


def record(
    recording: Recording,
    episodes: int,
    first_seed: int,
    processes: int,
    progress: Callable[[Episode], object] = lambda episode: None,
) -> tuple[list[Path], list[int]]:
    """Record until there are enough episodes that succeed; goes on where a recording in the folder stopped.

    Args:
        recording: Where to.
        episodes: Number of successful episodes.
        first_seed: The first seed; the following ones are tried in order.
        processes: Processes that play at the same time.
        progress: Called with each episode that is played.

    Returns:
        Files of the successful episodes with the smallest seeds, and the seeds before the last of them that failed.
    """
    succeeded: dict[int, bool] = {}
    seed = first_seed
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        while sum(succeeded.values()) < episodes:
            lacking = episodes - sum(succeeded.values())
            seeds = list(range(seed, seed + lacking))
            seed += lacking
            missing = [s for s in seeds if not recording.path(s).is_file()]
            for episode_seed in seeds:
                if episode_seed not in missing:
                    succeeded[episode_seed] = Episode.load(recording.path(episode_seed)).success
            work = [(recording.environment, s, str(recording.path(s))) for s in missing]
            for episode_seed in pool.imap_unordered(_record_to, work):
                episode = Episode.load(recording.path(episode_seed))
                succeeded[episode_seed] = episode.success
                progress(episode)
            if seed - first_seed > 20 * episodes + 20:
                raise UserError(f"the expert of {recording.environment} failed in {seed - first_seed} episodes")
    good = sorted(s for s, success in succeeded.items() if success)[:episodes]
    failed = sorted(s for s, success in succeeded.items() if not success and s < good[-1])
    return [recording.path(s) for s in good], failed


def replay(environment: str, actions: Sequence[NDArray[Any]], seeds: Sequence[int], processes: int) -> list[bool]:
    """Play recorded actions again; returns for each episode whether the task was done.

    Args:
        environment: Name of the environment.
        actions: Actions of each episode.
        seeds: What began each episode.
        processes: Processes that play at the same time.
    """
    work = [(environment, seed, taken) for seed, taken in zip(seeds, actions, strict=True)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(pool.imap(_replay_one, work))


_environments: dict[str, Any] = {}  # of this process: starting one takes seconds


def _environment(name: str) -> Any:
    if name not in _environments:
        _environments[name] = make_environment(name)
    return _environments[name]


def _record_to(work: tuple[str, int, str]) -> int:
    name, seed, path = work
    record_episode(_environment(name), seed).save(Path(path))
    return seed


def _replay_one(work: tuple[str, int, NDArray[Any]]) -> bool:
    name, seed, actions = work
    environment = _environment(name)
    environment.reset(seed)
    # The simulator may end an episode early: what comes after is not done.
    return any(environment.step(action)[1] for action in actions)
