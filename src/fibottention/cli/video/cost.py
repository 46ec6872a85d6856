"""``fibottention video cost``: attention in space and time, divided and joint."""

import json
import sys
from dataclasses import asdict

import torch
from rich.table import Table

from fibottention.analysis.space_time import space_time_costs
from fibottention.cli.options import CommandParser, make_console, parse_spec
from fibottention.errors import UserError

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention video cost",
        description="Compare what one layer's attention over a clip costs: divided (each patch over the frames, dense, "
        "then each frame over its patches, with the spec) and joint (all patches of all frames, with the spec). With "
        "--measure also its time on this machine (float32, one clip, least of three runs).",
    )
    parser.add_argument(
        "specs", metavar="SPEC", nargs="*", default=["dense", "fibottention"], help="default: dense fibottention"
    )
    parser.add_argument("--frames", type=int, nargs="+", default=[8, 16], help="frames (default 8 16)")
    parser.add_argument("--patches", type=int, default=196, help="patches per frame (default 196)")
    parser.add_argument("--heads", type=int, default=12, help="heads (default 12)")
    parser.add_argument("--head-dim", type=int, default=64, help="size of one head (default 64)")
    parser.add_argument("--measure", action="store_true", help="measure time too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the measurement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    for option in ("patches", "heads", "head_dim"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} must be at least 1, got {getattr(arguments, option)}")
    if min(arguments.frames) < 1:
        raise UserError(f"--frames must be at least 1, got {min(arguments.frames)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda is not available on this machine; available: cpu")
    try:
        costs = space_time_costs(
            {text: parse_spec(text) for text in arguments.specs},
            arguments.frames,
            patches=arguments.patches,
            num_heads=arguments.heads,
            head_dim=arguments.head_dim,
            measure=arguments.measure,
            device=arguments.device,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
        return 0
    table = Table(
        title=f"one layer, {arguments.patches} patches and CLS, {arguments.heads} heads of {arguments.head_dim}"
    )
    columns = [
        "frames",
        "attention",
        "spec",
        "pairs",
        "MACs",
        *(["forward, ms", "both, ms"] if arguments.measure else []),
    ]
    for column in columns:
        is_name = column in ("attention", "spec")
        table.add_column(column, justify="left" if is_name else "right", overflow="fold" if is_name else "ellipsis")
    for cost in costs:
        times = [] if cost.forward_ms is None else [f"{cost.forward_ms:.1f}", f"{cost.both_ms:.1f}"]
        table.add_row(
            str(cost.frames), cost.kind, cost.spec, f"{cost.pairs / 1e6:.2f} M", f"{cost.macs / 1e6:,.1f} M", *times
        )
    make_console().print(table)
    return 0
