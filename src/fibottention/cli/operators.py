"""``fibottention operators``: convolutions and attention side by side."""

import json
import sys
from dataclasses import asdict

from rich.table import Table

from fibottention.analysis.operators import operators
from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention operators",
        description="Compare convolutions, self-attention, window attention and neighborhood attention, dilated or "
        "not: receptive field after some layers, multiply-accumulates, parameters and stored attention weights of one "
        "layer (table 1 of arXiv 2209.15001, computed).",
    )
    parser.add_argument("--side", type=int, default=56, help="side of the feature map, in tokens (default 56)")
    parser.add_argument("--dim", type=int, default=64, help="channels (default 64)")
    parser.add_argument("--heads", type=int, default=2, help="heads (default 2)")
    parser.add_argument("--kernel-size", type=int, default=7, help="side of kernels and windows (default 7)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the receptive field (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    try:
        rows = operators(arguments.side, arguments.dim, arguments.heads, arguments.kernel_size, arguments.layers)
    except ValueError as error:
        raise UserError(str(error)) from error
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        return 0
    side = arguments.side
    table = Table(title=f"{side} x {side} tokens, {arguments.dim} channels, kernel {arguments.kernel_size}")
    for column in ("layer", f"field after {arguments.layers}", "MACs", "params", "stored"):
        table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=column == "layer")
    for row in rows:
        numbers = (f"{row.macs / 1e6:,.1f} M", f"{row.parameters / 1e3:,.1f} k", f"{row.stored_weights / 1e6:,.2f} M")
        table.add_row(row.name, f"{row.field} x {row.field}", *numbers)
    make_console().print(table)
    return 0
