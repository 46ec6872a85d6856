"""Small demonstrations and policies for tests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fibottention.tasks.options import load_recipe, make_config
from fibottention.tasks.robot.config import RobotConfig
from fibottention.tasks.robot.environments import EnvironmentSpec, environment_spec
from fibottention.tasks.robot.network import DiffusionPolicy, build_policy
from fibottention.tasks.robot.record import Episode
from fibottention.tasks.robot.shapes import PolicyShapes

PUSHT = PolicyShapes(cameras={"image": (96, 96)}, states={"agent_pos": 2}, action_dim=2, rotation=None)
ARM = PolicyShapes(
    cameras={"agentview_image": (84, 84), "robot0_eye_in_hand_image": (84, 84)},
    states={"robot0_eef_pos": 3, "robot0_gripper_qpos": 2},
    action_dim=7,
    rotation=3,
)
TINY = (
    "--model.options={patch_size: 16, embed_dim: 16, depth: 1, num_heads: 2}",
    "--model.down_dims=[8, 16]",
    "--model.step_embedding=8",
    "--diffusion.reconstruction_channels=[8, 8]",
    "--data.crop=84",
    "--data.workers=0",
    "--train.device=cpu",
)


def make_episodes(spec: EnvironmentSpec, lengths: Sequence[int], seed: int = 0) -> list[Episode]:
    """Episodes of random numbers in the shapes of an environment."""
    generator = np.random.default_rng(seed)
    episodes = []
    for number, length in enumerate(lengths):
        side = spec.image_size
        observations: dict[str, Any] = {
            camera: generator.integers(0, 256, (length, side, side, 3), dtype=np.uint8) for camera in spec.cameras
        }
        vectors = {name: generator.normal(size=(length, size)).astype(np.float32) for name, size in spec.states.items()}
        states = generator.normal(size=(length, 5))
        if spec.name == "pusht":  # the agent's position is a part of the state
            states[:, :2] = vectors["agent_pos"]
        episodes.append(
            Episode(
                observations=observations | vectors,
                actions=generator.normal(size=(length, spec.action_dim)).astype(np.float32),
                rewards=generator.random(length).astype(np.float32),
                states=states,
                seed=100 + number,
                success=True,
            )
        )
    return episodes


def write(path: Path, kind: str, name: str = "pusht", lengths: Sequence[int] = (20, 3, 31)) -> list[Episode]:
    """Write episodes of random numbers; returns them."""
    from fibottention.tasks.robot.formats import write_demonstrations

    spec = environment_spec(name)
    episodes = make_episodes(spec, lengths)
    write_demonstrations(path, kind, episodes, spec)
    return episodes


def tiny_config(*words: str, recipe: str = "robot/pusht_cpu") -> RobotConfig:
    """The options of a recipe with a tiny model."""
    config = make_config(load_recipe(recipe), [*TINY, *words])
    assert isinstance(config, RobotConfig)
    return config


def tiny_policy(*words: str, shapes: PolicyShapes = PUSHT, seed: int = 0) -> DiffusionPolicy:
    """A tiny policy with random weights, whose images and vectors are scaled as if they went from 0 to 512."""
    torch.manual_seed(seed)
    policy = build_policy(tiny_config(*words), shapes)[0]
    for name, buffer in policy.normalizer.named_buffers():
        buffer.fill_(2 / 512 if name.endswith("_scale") else -1.0)
    return policy.eval()


def changed(episode: Episode, change: Callable[[dict[str, Any]], None]) -> Episode:
    """An episode with other arrays: ``change`` gets a dictionary of copies."""
    arrays = {"actions": episode.actions.copy(), "observations": {k: v.copy() for k, v in episode.observations.items()}}
    change(arrays)
    return replace(episode, **arrays)
