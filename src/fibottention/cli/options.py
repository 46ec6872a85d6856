"""What the commands share in reading their arguments."""

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console

from fibottention.errors import UserError
from fibottention.specs import AttentionSpec, make_spec, nearest, spec_names

__all__ = [
    "CommandParser",
    "check_output",
    "describe_specs",
    "is_main_process",
    "make_console",
    "parse_spec",
    "run_group",
    "stop_politely",
]


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports errors like the rest of the program."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> Any:
        """Raise instead of printing the usage and exiting."""
        raise UserError(message)


def make_console() -> Console:
    """A console that prints names as they are, brackets included."""
    return Console(markup=False, highlight=False)


def is_main_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def check_output(path: Path) -> None:
    """Check that a file can be made at a path, before the work is done.

    Raises:
        UserError: If it is a folder, or the folder it is in does not exist.
    """
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder, not a file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--output: the folder {path.parent} does not exist")


def stop_politely() -> None:
    """Let a polite kill (SIGTERM) end like Ctrl-C, so that what runs can be resumed after its last whole epoch."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def describe_specs() -> str:
    """One line per attention spec, for help texts."""
    lines = []
    for name in spec_names():
        try:
            spec = make_spec(name)
        except TypeError:  # an option without default
            lines.append(f"  {name}")
            continue
        values = ", ".join(f"{key}={value}" for key, value in spec.to_dict().items() if key != "name")
        lines.append(f"  {name:20} {values}")
    return "\n".join(lines)


def parse_spec(text: str) -> AttentionSpec:
    """The spec of ``NAME`` or ``NAME:option=value,option=value``.

    Raises:
        ValueError: If the name, an option or a value is not valid.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"options are written option=value, got {part!r}")
        options[option] = value if option == "fill" else yaml.safe_load(value)
    return make_spec(name, **options)


def run_group(group: str, commands: dict[str, str], words: list[str]) -> int:
    """Run a command of a group such as ``fibottention video``; returns the exit code.

    Args:
        group: Name of the group, and of its package.
        commands: Its commands, each a module of the package, and what they do.
        words: The command and its arguments.

    Raises:
        UserError: If there is no such command.
    """
    if not words or words[0] in ("-h", "--help"):
        width = 1 + max(map(len, commands))
        lines = "".join(f"  {name:{width}} {text}\n" for name, text in commands.items())
        sys.stdout.write(f"usage: fibottention {group} COMMAND [...]\n\ncommands:\n{lines}")
        return 0
    if words[0] not in commands:
        raise UserError(f"{group} has no command {words[0]!r}{nearest(words[0], list(commands))}")
    return importlib.import_module(f"fibottention.cli.{group}.{words[0]}").run(words[1:])
