"""``fibottention train``: train from a recipe, resume a run, or run the demo."""

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fibottention.cli.options import describe_specs, is_main_process, make_console, stop_politely
from fibottention.errors import UserError
from fibottention.tasks.config import TaskConfig
from fibottention.tasks.kinds import config_class, task_kind
from fibottention.tasks.options import group_parser, load_recipe, make_config
from fibottention.tasks.runs import load_config, train_run
from fibottention.training.run import Run

__all__ = ["run"]

_USAGE = """usage: fibottention train [RECIPE.yaml] [--group.option value ...]
       fibottention train --resume RUN

Without arguments, trains a small vision transformer with Fibottention and the same model with dense attention on the
embedded images, and compares them; options change this demo, and with --attention.name its model is trained once, with
that attention. RECIPE is a file or the name of a shipped recipe. With --data.name, --data.root or --model.name and no
RECIPE, one model is trained with the defaults below; with --task video, a video model with its own. RECIPE --help shows
the options of that recipe's task.

attention (--attention.name NAME and its options, with defaults):
  none                 leave the model as it is
"""


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    if "-h" in words or "--help" in words:
        recipe = load_recipe(words[0]) if words and not words[0].startswith("-") else {}
        options = config_class(str(recipe.get("task", "classification")))
        groups = group_parser("fibottention train", options).format_help().split("\n\n", 1)[1]
        sys.stdout.write(f"{_USAGE}{describe_specs()}\n\n{groups}")
        return 0
    stop_politely()
    console = make_console()
    if "--resume" in words or any(word.startswith("--resume=") for word in words):
        return _resume(words, console)
    recipe_name = words.pop(0) if words and not words[0].startswith("-") else None
    # With data or a model of the user's own, the options' documented defaults hold, not those of the demo.
    own = any(word.split("=")[0] in ("--data.name", "--data.root", "--model.name") for word in words)
    task = _task(words)
    if task is not None and recipe_name is not None:
        raise UserError("--task is for training without a recipe, which names its task itself")
    recipe = {} if recipe_name is None and (own or task) else load_recipe(recipe_name or "demo")
    if task is not None:
        recipe["task"] = task
    chooses_attention = any(word.startswith("--attention") for word in words)
    words_given = [*([recipe_name] if recipe_name else []), *(["--task", task] if task else []), *words]
    command = shlex.join(["fibottention", "train", *words_given])
    if recipe_name is None and not own and not task and not chooses_attention:
        return _demo(recipe, words, command, console)
    config = make_config(recipe, words)
    folder = config.train.output or _new_folder(f"{Path(recipe_name or 'run').stem}-{config.attention['name']}")
    return _train(config, folder, command, console)


def _task(words: list[str]) -> str | None:
    """Take ``--task NAME`` out of the words."""
    for place, word in enumerate(words):
        if word == "--task" and place + 1 < len(words):
            del words[place]
            return words.pop(place)
        if word.startswith("--task="):
            return words.pop(place).removeprefix("--task=")
    return None


def _stopped(how: str, folder: str) -> int:
    """Say how to go on after Ctrl-C; returns the exit code."""
    if is_main_process():
        sys.stderr.write(f"fibottention: stopped; {how}: fibottention train --resume {shlex.quote(folder)}\n")
    return 130


def _new_folder(name: str) -> str:
    return str(Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}")


def _resume(words: list[str], console: Console) -> int:
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--resume=") else [word])]
    if len(flat) != 2 or flat[0] != "--resume":
        raise UserError("--resume takes the folder of a run and no other options: its configuration is kept")
    run = Run.open(flat[1])
    return _train(load_config(run), flat[1], None, console)


def _train(config: TaskConfig, folder: str, command: str | None, console: Console) -> int:
    try:
        summary = train_run(config, folder, command=command, console=console)
    except KeyboardInterrupt:
        return _stopped("continue with", folder)
    if summary is not None:
        kind = task_kind(config.task)
        shown = [f"{label} {kind.show(n, summary[n])}" for n, label in kind.metrics.items() if n in summary]
        found = shown[0] if shown else f"validation loss {summary['val_loss']:.4f}"
        after = (
            f"best {found} after epoch {summary['best_epoch']}" if summary["epochs"] else f"{found} without training"
        )
        console.print(
            f"{after}; run in {folder}; next: fibottention report {shlex.quote(folder)}",
            soft_wrap=True,
        )
    return 0


def _demo(recipe: dict[str, Any], words: list[str], command: str, console: Console) -> int:
    """Train the recipe with Fibottention and with dense attention, and compare."""
    from fibottention.analysis.report import write_report

    parent = make_config(recipe, words).train.output or _new_folder("demo")
    names = ("fibottention", "dense")
    configs = {name: make_config(recipe, [*words, f"--attention.name={name}"]) for name in names}
    summaries: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        folder = str(Path(parent) / name)
        console.rule(f"{config.model.name} with {name} attention")
        try:
            summary = train_run(config, folder, command=command, console=console)
        except KeyboardInterrupt:
            return _stopped("continue this run with", folder)
        if summary is not None:
            summaries[name] = summary
    if not summaries:
        return 0
    table = Table(title="the same model, seed and budget")
    for column in ("attention", "top-1", "attention pairs kept", "attention MACs", "time per step"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for name, summary in summaries.items():
        table.add_row(
            name,
            f"{summary['top1']:.2f} %",
            f"{summary['attention']['pairs']:.2%}",
            f"{summary['attention']['macs'] / 1e6:.2f} M",
            f"{summary['step_milliseconds']:.0f} ms" if summary["epochs"] else "-",
        )
    console.print(table)
    report = Path(parent) / "report.html"
    write_report([Path(parent) / name for name in names], report)
    classes = len(next(iter(summaries.values()))["classes"])
    console.print(f"chance is {100 / classes:.0f} %; report: {report}", soft_wrap=True)
    return 0
