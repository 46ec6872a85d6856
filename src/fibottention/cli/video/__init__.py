"""``fibottention video``: prepare videos for training."""

import importlib
import sys

from fibottention.errors import UserError
from fibottention.specs import nearest

__all__ = ["run"]

_COMMANDS = {
    "split": "write lists for training and test as a data set's protocol says, or at random",
    "crop": "cut the persons out of videos",
    "cost": "compare what attention in space, in time and over both costs",
}


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        lines = "".join(f"  {name:6} {text}\n" for name, text in _COMMANDS.items())
        sys.stdout.write(f"usage: fibottention video COMMAND [...]\n\ncommands:\n{lines}")
        return 0
    if words[0] not in _COMMANDS:
        raise UserError(f"video has no command {words[0]!r}{nearest(words[0], list(_COMMANDS))}")
    return importlib.import_module(f"fibottention.cli.video.{words[0]}").run(words[1:])
