"""``fibottention robot``: demonstrations of scripted experts."""

from functools import partial

from fibottention.cli.options import run_group

__all__ = ["run"]

_COMMANDS = {
    "record": "let a scripted expert record demonstrations, and play them back",
    "replay": "play recorded demonstrations again",
}

run = partial(run_group, "robot", _COMMANDS)
