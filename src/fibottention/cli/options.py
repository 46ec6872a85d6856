"""What the commands share in reading their arguments."""

import argparse
from typing import Any

from fibottention.errors import UserError
from fibottention.specs import make_spec, spec_names

__all__ = ["CommandParser", "describe_specs"]


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports errors like the rest of the program."""

    def error(self, message: str) -> Any:
        """Raise instead of printing the usage and exiting."""
        raise UserError(message)


def describe_specs() -> str:
    """One line per attention spec, for help texts."""
    lines = []
    for name in spec_names():
        spec = make_spec(name)
        values = ", ".join(f"{key}={value}" for key, value in spec.to_dict().items() if key != "name")
        lines.append(f"  {name:20} {values}")
    return "\n".join(lines)
