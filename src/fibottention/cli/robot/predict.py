"""``fibottention predict`` for robots: what a policy would do after a recorded observation."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.robot.config import RobotConfig
from fibottention.tasks.robot.environments import environment_spec
from fibottention.tasks.robot.formats import open_demonstrations
from fibottention.tasks.robot.formats.base import column_parts
from fibottention.tasks.robot.network import DiffusionPolicy
from fibottention.tasks.robot.policy import Policy
from fibottention.tasks.robot.shapes import PolicyShapes, observed_names
from fibottention.tasks.robot.store import checked_image, checked_vector
from fibottention.tasks.runs import load_model

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention predict",
        description="Show the actions that a policy plans after a recorded observation, next to the recorded ones.",
    )
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a run, or a checkpoint in it")
    parser.add_argument("path", type=Path, help="demonstrations, in any of the formats")
    parser.add_argument("--episode", type=int, default=0, help="number of the episode (default 0)")
    parser.add_argument("--step", type=int, default=0, help="step that is seen last (default 0)")
    parser.add_argument("--sampler", choices=("ddpm", "ddim"), help="how actions are drawn (default as in training)")
    parser.add_argument("--steps", type=int, help="diffusion steps (default as in training)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    model, config, _, _ = load_model(arguments.run)
    assert isinstance(config, RobotConfig)
    assert isinstance(model, DiffusionPolicy)
    policy = Policy(model, sampler=arguments.sampler, steps=arguments.steps)
    recording, title = _recording(arguments.path, arguments.episode, config, model.shapes)
    length = len(recording["action"])
    if not 0 <= arguments.step < length:
        raise UserError(f"--step must be in 0 .. {length - 1}, got {arguments.step}")
    seen = np.arange(arguments.step - model.observation_steps + 1, arguments.step + 1).clip(0)
    observation = {n: recording[n][seen][None] for n in (*model.shapes.cameras, *model.shapes.states)}
    planned = policy.plan(observation, [torch.Generator().manual_seed(arguments.seed)])[0]
    recorded = recording["action"][np.arange(arguments.step, arguments.step + len(planned)).clip(0, length - 1)]
    # As they are learned: half a turn has two axes, so that equal rotations may look different.
    learned = [model.shapes.learned_actions(torch.from_numpy(actions)) for actions in (planned, recorded)]
    error = float((learned[0] - learned[1]).abs().mean())
    if arguments.json:
        content = {
            "episode": title,
            "step": arguments.step,
            "planned": planned.tolist(),
            "recorded": recorded.tolist(),
            "mean_absolute_error": error,
            "seconds": policy.latency(),
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    table = Table(title=f"{title} of {arguments.path}, after step {arguments.step}")
    table.add_column("step", justify="right")
    table.add_column("planned")
    table.add_column("recorded")
    for i, (plan, past) in enumerate(zip(planned, recorded, strict=True)):
        table.add_row(str(arguments.step + i), _numbers(plan), _numbers(past))
    console = make_console()
    console.print(table)
    console.print(f"mean absolute error {error:.4g}; {1000 * policy.latency():.0f} ms")
    return 0


def _recording(
    path: Path, episode: int, config: RobotConfig, shapes: PolicyShapes
) -> tuple[dict[str, NDArray[Any]], str]:
    """What the policy sees and does of one episode, by name, and what to call the episode."""
    name = config.rollout.environment
    with contextlib.closing(open_demonstrations(path)) as demonstrations:
        count = len(demonstrations.names)
        if not 0 <= episode < count:
            raise UserError(f"--episode must be in 0 .. {count - 1}, got {episode}")
        if any(split[0] not in demonstrations.columns for split in map(column_parts, config.data.columns.values())):
            config.data.columns = {}  # those of the training's file, which this one is not
        environment = environment_spec(name) if name is not None else None
        cameras, states, action = observed_names(config.data, environment, demonstrations.format)
        columns, title = {**cameras, **states, "action": action}, demonstrations.names[episode]
        found = demonstrations.read(episode, list(columns.values()))
    recording: dict[str, NDArray[Any]] = {}
    sizes = {**{n: (*size, 3) for n, size in shapes.cameras.items()}, "action": (shapes.action_dim,)}
    sizes |= {n: (size,) for n, size in shapes.states.items()}
    for key, column in columns.items():
        check = checked_image if key in cameras else checked_vector
        recording[key] = check(found[column], column, title)
        if recording[key].shape[1:] != sizes[key]:
            raise UserError(f"{key} has shape {recording[key].shape[1:]} in {path}, the policy knows {sizes[key]}")
    return recording, title


def _numbers(values: NDArray[Any]) -> str:
    return "  ".join(f"{value:8.3f}" for value in values)
