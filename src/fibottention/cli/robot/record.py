"""``fibottention robot record``: demonstrations of a scripted expert."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from fibottention.cli.options import CommandParser, make_console, stop_politely
from fibottention.errors import UserError
from fibottention.tasks.robot.environments import EnvironmentSpec, environment_names, environment_spec
from fibottention.tasks.robot.formats import FORMATS, open_demonstrations, write_demonstrations
from fibottention.tasks.robot.record import Episode, Recording, record, replay

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention robot record",
        description="Let a scripted expert record demonstrations, write them, read them back and play them again. A "
        "recording that was stopped goes on when the same command is given again.",
    )
    parser.add_argument("environment", help=", ".join(environment_names()))
    parser.add_argument("--episodes", type=int, default=200, help="successful episodes to record (default 200)")
    parser.add_argument(
        "--format", nargs="+", choices=list(FORMATS), default=["zarr"], help="one or several (default zarr)"
    )
    parser.add_argument("--output", type=Path, help="name of the files without the ending (default the environment's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode (default 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="episodes played at the same time")
    arguments = parser.parse_args(words)
    spec = environment_spec(arguments.environment)
    for option, least in (("episodes", 1), ("seed", 0), ("processes", 1)):
        if getattr(arguments, option) < least:
            raise UserError(f"--{option} must be at least {least}, got {getattr(arguments, option)}")
    stem = arguments.output or Path(spec.name)
    if stem.suffix in FORMATS.values():
        stem = stem.with_suffix("")
    paths = {
        kind: stem.with_name(f"{stem.name}_lerobot" if kind == "lerobot" else stem.name + FORMATS[kind])
        for kind in arguments.format
    }
    episodes = stem.with_name(f"{stem.name}_episodes")
    for path in paths.values():
        if path.exists() and not episodes.exists():  # else it was written before the recording was stopped
            raise UserError(f"{path} exists already; give --output another name")
    stop_politely()
    console = make_console()
    recording = Recording(episodes, spec.name)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("recording", total=arguments.episodes)
        done = {"episodes": 0}

        def tell(episode: Episode) -> None:
            done["episodes"] += episode.success
            progress.update(bar, completed=done["episodes"])

        files, failed = record(recording, arguments.episodes, arguments.seed, arguments.processes, tell)
    tried = len(files) + len(failed)
    lengths = [len(Episode.load(file)) for file in files]
    console.print(
        f"the expert did the task in {len(files)} of {tried} episodes, in {np.mean(lengths):.0f} steps on average "
        f"({min(lengths)} to {max(lengths)}), {sum(lengths)} steps in all"
    )
    for kind, path in paths.items():
        if not path.exists():
            write_demonstrations(path, kind, _episodes(files), spec)
        _check(path, files, spec)
        console.print(f"{path}: {_size(path) / 1e6:.1f} MB, reads back as it was recorded", soft_wrap=True)
    if not again(next(iter(paths.values())), spec.name, arguments.processes, console):
        sys.stderr.write(f"fibottention: not all actions do the task again; the episodes stay in {recording.folder}\n")
        return 1
    shutil.rmtree(recording.folder)
    return 0


def again(path: Path, environment: str, processes: int, console: Console) -> bool:
    """Play what a file holds, and say how often the task was done; returns whether it always was."""
    spec = environment_spec(environment)
    with contextlib.closing(open_demonstrations(path)) as demonstrations:
        if demonstrations.seeds is None:
            raise UserError(
                f"{path} does not say what began its episodes: only what was recorded here can be played again"
            )
        column = spec.columns[demonstrations.format]["action"]
        actions = [demonstrations.read(i, [column])[column] for i in range(len(demonstrations.names))]
    if actions[0].shape[1:] != (spec.action_dim,):
        raise UserError(
            f"the actions in {path} have shape {actions[0].shape[1:]}, {environment} takes {spec.action_dim}"
        )
    results = replay(environment, actions, demonstrations.seeds, processes)
    console.print(f"played again: the task is done in {sum(results)} of {len(results)} episodes")
    return all(results)


def _episodes(files: Sequence[Path]) -> Iterable[Episode]:
    return map(Episode.load, files)


def _check(path: Path, files: Sequence[Path], spec: EnvironmentSpec) -> None:
    with contextlib.closing(open_demonstrations(path)) as demonstrations:
        columns = spec.columns[demonstrations.format]
        for number, episode in enumerate(_episodes(files)):
            found = demonstrations.read(number, list(columns.values()))
            for name, values in {**episode.observations, "action": episode.actions}.items():
                if not np.array_equal(found[columns[name]].astype(values.dtype), values):
                    raise UserError(f"{path} does not read back as it was written: {columns[name]} of episode {number}")


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
