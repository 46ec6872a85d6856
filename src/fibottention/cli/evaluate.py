"""``fibottention evaluate``: what a run has learned."""

from functools import partial

from fibottention.cli.by_task import run_command

__all__ = ["run"]

run = partial(run_command, "evaluate")
