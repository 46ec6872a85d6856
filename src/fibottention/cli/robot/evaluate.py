"""``fibottention evaluate`` for robots: episodes in the simulator."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from rich.table import Table

from fibottention.adapters import sparsify
from fibottention.cli.changed_spec import changed_spec
from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.options import spec_options
from fibottention.tasks.robot.config import RobotConfig
from fibottention.tasks.robot.environments import environment_spec
from fibottention.tasks.robot.network import DiffusionPolicy
from fibottention.tasks.robot.policy import Policy
from fibottention.tasks.robot.rollout import (
    IdlePlanner,
    LearnedPlanner,
    Planner,
    RandomPlanner,
    Rollout,
    RolloutSummary,
    roll_out,
    summarize,
)
from fibottention.tasks.runs import load_model
from fibottention.tasks.video.encode import write_video
from fibottention.training.engine import make_accelerator

__all__ = ["run"]

_PLANS = 7  # that are timed


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention evaluate",
        description="Let a trained policy play episodes in the simulator. With --attention.name NAME and the options "
        "of that spec, its encoders attend so instead, without training.",
    )
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a run, or a checkpoint in it")
    parser.add_argument("--episodes", type=int, help="number of episodes (default as in training)")
    parser.add_argument("--first-seed", type=int, help="seed of the first episode (default as in training)")
    parser.add_argument("--max-steps", type=int, help="steps until an episode ends (default the environment's)")
    parser.add_argument("--parallel", type=int, help="simulators at the same time (default as in training)")
    parser.add_argument("--sampler", choices=("ddpm", "ddim"), help="how actions are drawn (default as in training)")
    parser.add_argument("--steps", type=int, help="diffusion steps (default as in training)")
    parser.add_argument("--baselines", action="store_true", help="let a random and an idle policy play as well")
    parser.add_argument("--videos", type=int, default=3, help="videos of the first episodes to write (default 3)")
    parser.add_argument("--output", type=Path, help="folder for the videos (default RUN/evaluation)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="device")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    attention, words = spec_options(words, "--attention.")
    arguments = parser.parse_args(words)
    model, config, _, run_ = load_model(arguments.run)
    assert isinstance(config, RobotConfig)
    assert isinstance(model, DiffusionPolicy)
    rollout, name = config.rollout, config.rollout.environment
    if name is None:
        raise UserError(f"{arguments.run} was trained without an environment, so there is none to play in")
    for option in ("episodes", "first_seed", "max_steps", "parallel"):
        if getattr(arguments, option) is not None:
            setattr(rollout, option, getattr(arguments, option))
    if arguments.videos < 0:
        raise UserError(f"--videos must be at least 0, got {arguments.videos}")
    if arguments.device is not None:
        config.train.device = arguments.device
    config.check()
    if attention:
        encoders = list(model.encoders.values())
        config.attention = changed_spec(
            attention, "attention", model, config.train.seed, lambda spec: [sparsify(e, spec) for e in encoders]
        )
    accelerator = make_accelerator(config.train)
    if accelerator.num_processes > 1:
        raise UserError("a policy plays in one process; --parallel sets how many simulators run at the same time")
    policy = Policy(model, sampler=arguments.sampler, steps=arguments.steps, device=accelerator.device)
    planners: dict[str, Planner] = {f"{config.attention['name']} policy": LearnedPlanner(policy)}
    if arguments.baselines:
        planners["random policy"] = RandomPlanner(environment_spec(name), config.data.action_steps)
        planners["idle policy"] = IdlePlanner(config.data.action_steps)
    seeds = range(rollout.first_seed, rollout.first_seed + rollout.episodes)
    console = make_console()
    results: dict[str, list[Rollout]] = {}
    with Progress(console=console, transient=True, disable=arguments.json) as progress, accelerator.autocast():
        for title, planner in planners.items():
            bar = progress.add_task(title, total=len(seeds))
            results[title] = roll_out(
                name,
                planner,
                seeds,
                observation_steps=config.data.observation_steps,
                parallel=rollout.parallel,
                max_steps=rollout.max_steps,
                films=0 if results else min(arguments.videos, len(seeds)),
                progress=lambda _, bar=bar: progress.advance(bar),
            )
    seconds = _seconds_per_plan(policy, config.data.action_steps)
    videos = _write_videos(next(iter(results.values())), arguments.output or run_.folder / "evaluation", name)
    summaries = {title: summarize(rollouts) for title, rollouts in results.items()}
    if arguments.json:
        content = {"policies": _content(results, summaries), **seconds, "videos": videos}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    table = Table(title=f"{arguments.run} in {name}: {len(seeds)} episodes from seed {seeds[0]}")
    table.add_column("policy", no_wrap=True)
    for column in ("mean score", "success", "95 % interval", "steps", "ms per plan", "ms per action"):
        table.add_column(column, justify="right")
    for title, summary in summaries.items():
        low, high = summary.interval
        times = (f"{1000 * value:.1f}" for value in seconds.values()) if title == next(iter(summaries)) else ()
        table.add_row(
            title,
            f"{summary.mean_score:.3f}",
            f"{summary.success:.0%}",
            f"{low:.0%}-{high:.0%}",
            f"{summary.steps:.0f}",
            *times,
        )
    console.print(table)
    for video in videos:
        console.print(f"video: {video}", soft_wrap=True)
    return 0


def _seconds_per_plan(policy: Policy, action_steps: int) -> dict[str, float]:
    """Median time of a plan for one robot, as in its own loop, and its share of each action."""
    shapes, steps = policy.network.shapes, policy.network.observation_steps
    observation: dict[str, Any] = {n: np.zeros((1, steps, *s, 3), np.uint8) for n, s in shapes.cameras.items()}
    observation |= {name: np.zeros((1, steps, size), np.float32) for name, size in shapes.states.items()}
    policy.latencies.clear()
    for _ in range(_PLANS):
        policy.plan(observation, [torch.Generator().manual_seed(0)])
    return {"seconds_per_plan": policy.latency(), "seconds_per_action": policy.latency() / action_steps}


def _write_videos(rollouts: list[Rollout], folder: Path, name: str) -> list[str]:
    written = []
    for rollout in rollouts:
        if rollout.frames:
            path = folder / f"seed_{rollout.seed}.mp4"
            write_video(path, np.stack(rollout.frames), environment_spec(name).fps)
            written.append(str(path))
    return written


def _content(results: dict[str, list[Rollout]], summaries: dict[str, RolloutSummary]) -> dict[str, Any]:
    return {
        title: {
            "test_mean_score": summary.mean_score,
            "success": 100 * summary.success,
            "interval": [100 * bound for bound in summary.interval],
            "steps": summary.steps,
            "episodes": [rollout.to_dict() for rollout in results[title]],
        }
        for title, summary in summaries.items()
    }
