"""``fibottention predict``: let a run say what it makes of new input."""

from functools import partial

from fibottention.cli.by_task import run_command

__all__ = ["run"]

run = partial(run_command, "predict")
