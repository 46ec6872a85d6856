"""``fibottention robot``: demonstrations of scripted experts."""

import importlib
import sys

from fibottention.errors import UserError
from fibottention.specs import nearest

__all__ = ["run"]

_COMMANDS = {
    "record": "let a scripted expert record demonstrations, and play them back",
    "replay": "play recorded demonstrations again",
}


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        lines = "".join(f"  {name:7} {text}\n" for name, text in _COMMANDS.items())
        sys.stdout.write(f"usage: fibottention robot COMMAND [...]\n\ncommands:\n{lines}")
        return 0
    if words[0] not in _COMMANDS:
        raise UserError(f"robot has no command {words[0]!r}{nearest(words[0], list(_COMMANDS))}")
    return importlib.import_module(f"fibottention.cli.robot.{words[0]}").run(words[1:])
