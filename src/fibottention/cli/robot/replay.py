"""``fibottention robot replay``: play recorded demonstrations again."""

import os
from pathlib import Path

from fibottention.cli.options import CommandParser, make_console
from fibottention.cli.robot.record import again
from fibottention.tasks.robot.environments import environment_names, environment_spec

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention robot replay",
        description="Play the actions of recorded demonstrations, and count in how many episodes they do the task.",
    )
    parser.add_argument("environment", help=", ".join(environment_names()))
    parser.add_argument("path", type=Path, help="what fibottention robot record wrote")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="episodes played at the same time")
    arguments = parser.parse_args(words)
    environment_spec(arguments.environment)
    is_done = again(arguments.path, arguments.environment, max(1, arguments.processes), make_console())
    return 0 if is_done else 1
