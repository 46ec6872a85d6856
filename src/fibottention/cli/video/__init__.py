"""``fibottention video``: prepare videos for training."""

from functools import partial

from fibottention.cli.options import run_group

__all__ = ["run"]

_COMMANDS = {
    "split": "write lists for training and test as a data set's protocol says, or at random",
    "crop": "cut the persons out of videos",
    "cost": "compare what attention in space, in time and over both costs",
}

run = partial(run_group, "video", _COMMANDS)
