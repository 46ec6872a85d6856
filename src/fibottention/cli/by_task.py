"""Commands that differ by the task of the run they are about."""

import importlib
from pathlib import Path

from fibottention.errors import UserError
from fibottention.tasks.config import TaskConfig
from fibottention.tasks.runs import find_run, load_config

__all__ = ["named_run", "run_command"]

_PACKAGES = {"classification": "recognition", "video": "recognition", "robot": "robot", "dense": "dense"}


def run_command(command: str, words: list[str]) -> int:
    """Run the command of the task whose run the words name; that of recognition if there is none.

    Args:
        command: Its name.
        words: Its arguments.
    """
    found = named_run(words)
    package = _PACKAGES[found.task] if found is not None else "recognition"
    return importlib.import_module(f"fibottention.cli.{package}.{command}").run(words)


def named_run(words: list[str]) -> TaskConfig | None:
    """The configuration of the first run that the words name, if they name one."""
    return next((config for config in map(_config, words) if config is not None), None)


def _config(word: str) -> TaskConfig | None:
    """The configuration of the run that a word names, if it does."""
    if word.startswith("-") or not Path(word).exists():
        return None
    try:
        run = find_run(word)
    except UserError:
        return None
    return load_config(run)
