"""``fibottention operators``: convolutions and attention side by side."""

import json
import sys
from dataclasses import asdict

from rich.table import Table

from fibottention.analysis.operators import operators
from fibottention.cli.options import CommandParser, make_console, parse_spec
from fibottention.errors import UserError

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention operators",
        description="Compare convolutions, self-attention, window attention and neighborhood attention, dilated or "
        "not: receptive field after some layers, multiply-accumulates, parameters and stored attention weights of one "
        "layer (table 1 of arXiv 2209.15001, computed). Specs are further rows.",
    )
    parser.add_argument("specs", metavar="SPEC", nargs="*", help="names of specs, or NAME:option=value,option=value")
    parser.add_argument("--side", type=int, default=56, help="side of the feature map, in tokens (default 56)")
    parser.add_argument("--dim", type=int, default=64, help="channels (default 64)")
    parser.add_argument("--heads", type=int, default=2, help="heads (default 2)")
    parser.add_argument("--kernel-size", type=int, default=7, help="side of kernels and windows (default 7)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the receptive field (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    try:
        specs = {text: parse_spec(text) for text in arguments.specs}
        sizes = (arguments.side, arguments.dim, arguments.heads, arguments.kernel_size, arguments.layers)
        rows = operators(*sizes, specs)
    except ValueError as error:
        raise UserError(str(error)) from error
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        return 0
    side = arguments.side
    table = Table(title=f"{side} x {side} tokens, {arguments.dim} channels, kernel {arguments.kernel_size}")
    # How many tokens of a field are reached says something new only where there are gaps, as in specs.
    reached = ["of all"] if specs else []
    for column in ("layer", f"field after {arguments.layers}", *reached, "MACs", "params", "stored"):
        is_name = column == "layer"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name and not specs, overflow="fold")
    for row in rows:
        numbers = (f"{row.macs / 1e6:,.1f} M", f"{row.parameters / 1e3:,.1f} k", f"{row.stored_weights / 1e6:,.2f} M")
        table.add_row(row.name, " x ".join(map(str, row.field)), *[f"{row.reached:.1%}"] * len(reached), *numbers)
    make_console().print(table)
    return 0
