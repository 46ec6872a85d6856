"""The command line: ``fibottention train | evaluate | predict | inspect | analyze | cost | study | report | ...``."""

import importlib
import os
import sys
from collections.abc import Sequence

from fibottention.errors import UserError
from fibottention.specs import nearest

__all__ = ["main"]

_COMMANDS = {
    "train": "train a model; without arguments, the demo on embedded images",
    "evaluate": "evaluate a run or a checkpoint on its validation data, or in a simulator",
    "predict": "classify, detect or segment with a run, or plan a robot's actions",
    "benchmark": "time sparse attention against its rivals on this machine",
    "inspect": "show the offsets, density and cost of an attention spec, and draw its masks",
    "analyze": "look into the attention of runs: heads, reach, localisation",
    "study": "train many variants with one budget and compare them",
    "cost": "compare what specs cost at growing numbers of tokens",
    "operators": "compare convolutions and attention: receptive field and cost",
    "report": "write one HTML page about one or several runs",
    "robot": "record demonstrations of scripted experts, and play them back",
    "video": "prepare videos: split into lists, crop persons; cost of attention in space and time",
}

# Packages that do not come with the extra ``train``.
_EXTRAS = {
    "av": "video",
    "transformers": "video",
    **dict.fromkeys(
        ("cv2", "diffusers", "gym_pusht", "gymnasium", "h5py", "pyarrow", "pymunk", "shapely", "zarr"), "robot"
    ),
    "faster_coco_eval": "dense",
    **dict.fromkeys(("mujoco", "robosuite"), "robosuite"),
}

_HELP = "usage: fibottention COMMAND [...]\n\ncommands:\n" + "".join(f"  {n:9} {t}\n" for n, t in _COMMANDS.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The command and its arguments; those of the process if None.

    Returns:
        The exit code: 0 if all went well, 2 for bad input, 130 if stopped by Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_HELP + "\nfibottention COMMAND --help tells more.\n")
        return 0
    if words[0] == "--version":
        from fibottention import __version__

        sys.stdout.write(f"fibottention {__version__}\n")
        return 0
    try:
        if words[0] not in _COMMANDS:
            raise UserError(f"no command is named {words[0]!r}{nearest(words[0], list(_COMMANDS))}")
        try:
            return importlib.import_module(f"fibottention.cli.{words[0]}").run(words[1:]) or 0
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("fibottention"):
                raise
            extra = _EXTRAS.get((error.name or "").partition(".")[0], "train")
            raise UserError(
                f"this command needs the package {error.name}; install it with: pip install 'fibottention[{extra}]'"
            ) from error
    except UserError as error:
        if os.environ.get("FIBOTTENTION_TRACEBACK"):
            raise
        sys.stderr.write(f"fibottention: {' '.join(str(error).split())}\n")
        return 2
    except BrokenPipeError:
        # The reader of our output has closed it, as `head` does; that is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if os.environ.get("FIBOTTENTION_TRACEBACK") or error.strerror is None:
            raise
        sys.stderr.write(f"fibottention: {error.filename or 'input or output'}: {error.strerror}\n")
        return 2
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        sys.stderr.write("fibottention: a process that loads data was stopped from outside, or ran out of memory\n")
        return 130
    except KeyboardInterrupt:
        sys.stderr.write("fibottention: stopped\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
