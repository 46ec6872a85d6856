"""``fibottention cost``: what specs cost at growing numbers of tokens."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

from fibottention.analysis.scaling import CostAt, attention_scaling, draw_scaling
from fibottention.cli.options import CommandParser, check_output, make_console, parse_spec
from fibottention.errors import UserError
from fibottention.training.run import write_figure

__all__ = ["run"]

_TOKENS = (196, 784, 3136, 12544, 65536)


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention cost",
        description="Compare what one attention layer of several specs costs: pairs, multiply-accumulates and, with "
        "--measure, time and memory on this machine (float32, one sequence, least of three runs).",
    )
    parser.add_argument("specs", metavar="SPEC", nargs="+", help="names of specs, or NAME:option=value,option=value")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(_TOKENS), help="patch tokens (squares fit all specs)"
    )
    parser.add_argument("--heads", type=int, default=12, help="heads (default 12)")
    parser.add_argument("--head-dim", type=int, default=64, help="size of one head (default 64)")
    parser.add_argument("--prefix", type=int, default=1, help="prefix tokens, such as CLS (default 1)")
    parser.add_argument("--measure", action="store_true", help="measure time and memory too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the measurement")
    parser.add_argument("--output", type=Path, default=Path("cost.png"), help="PNG of the curves (default cost.png)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    for option, low in (("heads", 1), ("head_dim", 1), ("prefix", 0)):
        if getattr(arguments, option) < low:
            raise UserError(f"--{option.replace('_', '-')} must be at least {low}, got {getattr(arguments, option)}")
    if min(arguments.tokens) < 1:
        raise UserError(f"--tokens must be at least 1, got {min(arguments.tokens)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda is not available on this machine; available: cpu")
    check_output(arguments.output)
    console = make_console()
    costs: dict[str, list[CostAt]] = {}
    for text in arguments.specs:
        try:
            costs[text] = attention_scaling(
                parse_spec(text),
                sorted(set(arguments.tokens)),
                num_heads=arguments.heads,
                head_dim=arguments.head_dim,
                prefix_tokens=arguments.prefix,
                measure=arguments.measure,
                device=arguments.device,
                skipped=lambda sentence: sys.stderr.write(f"fibottention: {sentence}\n"),
            )
        except ValueError as error:
            raise UserError(f"{text}: {error}") from error
    write_figure(arguments.output, draw_scaling(costs))
    if arguments.json:
        content = {name: [asdict(cost) for cost in of_spec] for name, of_spec in costs.items()}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    table = Table(title=f"one layer, {arguments.heads} heads of {arguments.head_dim}, {arguments.prefix} prefix tokens")
    columns = [
        "spec",
        "tokens",
        "pairs",
        "of all MACs",
        *(["forward, ms", "both, ms", "peak, MiB"] if arguments.measure else []),
    ]
    for column in columns:
        is_name = column == "spec"
        table.add_column(column, justify="left" if is_name else "right", overflow="fold" if is_name else "ellipsis")
    for name, of_spec in costs.items():
        for cost in of_spec:
            row = [name, f"{cost.tokens:,}", f"{cost.pairs / 1e6:,.3f} M", f"{cost.macs / cost.dense_macs:.3%}"]
            if arguments.measure:
                row += ["" if ms is None else f"{ms:,.1f}" for ms in (cost.forward_ms, cost.both_ms)]
                row.append("" if cost.peak_mib is None else f"{cost.peak_mib:,.0f}")
            table.add_row(*row)
    console.print(table)
    console.print(f"curves: {arguments.output}", soft_wrap=True)
    return 0
