"""``fibottention inspect``: offsets, density and cost of a spec, and a picture of its masks."""

import argparse
import difflib
import json
import sys
from pathlib import Path

from rich.table import Table

from fibottention.analysis.masks import draw_masks
from fibottention.cli.inspect_model import run as run_model
from fibottention.cli.options import CommandParser, check_output, describe_specs, make_console
from fibottention.errors import UserError
from fibottention.models.neighborhood_registry import is_neighborhood_model, neighborhood_model_names
from fibottention.patterns.pattern import Pattern
from fibottention.specs import AttentionSpec, fit_macs, make_spec, spec_names
from fibottention.tasks.options import spec_options
from fibottention.training.run import write_atomically

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    if any(is_neighborhood_model(word) for word in words):
        return run_model(words)
    parser = CommandParser(
        prog="fibottention inspect",
        description="Show which pairs an attention spec keeps. Options of the spec: --w_max 65, --window 3, ...\n"
        "With the name of a NAT or DiNAT, such as dinat_tiny: its levels and receptive fields (--image-size 224).",
        epilog=f"specs and their options:\n{describe_specs()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", metavar="SPEC", help="name of a spec, such as fibottention, or of a NAT or DiNAT")
    parser.add_argument("--tokens", type=int, help="patch tokens (default: as many as the grid has, or 196)")
    parser.add_argument("--grid", help="rows and columns of the patch tokens, as 6x10, if they form no square")
    parser.add_argument("--heads", type=int, default=12, help="heads (default 12)")
    parser.add_argument("--prefix", type=int, default=1, help="prefix tokens, such as CLS (default 1)")
    parser.add_argument("--head-dim", type=int, default=64, help="size of one head, for the MACs (default 64)")
    parser.add_argument("--layer", type=int, default=0, help="index of the layer, for shuffled heads (default 0)")
    parser.add_argument("--match-macs", type=float, help="set the spec's size for this share of dense attention's MACs")
    parser.add_argument("--output", type=Path, help="PNG of the masks (default SPEC.png)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    own = {
        "--tokens",
        "--grid",
        "--heads",
        "--prefix",
        "--head-dim",
        "--layer",
        "--match-macs",
        "--output",
        "--json",
        "--help",
        "-h",
    }
    options, rest = spec_options(words, "--", keep=own)
    arguments = parser.parse_args(rest)
    for name in ("head_dim", "layer"):
        if getattr(arguments, name) < (name == "head_dim"):
            raise UserError(f"--{name.replace('_', '-')} is out of range: {getattr(arguments, name)}")
    known = [*spec_names(), *neighborhood_model_names()]
    if (close := difflib.get_close_matches(arguments.spec, known, n=1)) and is_neighborhood_model(close[0]):
        raise UserError(f"no spec or model is named {arguments.spec!r}; did you mean {close[0]!r}?")
    grid = None if arguments.grid is None else _grid(arguments.grid)
    tokens = 196 if grid is None else grid[0] * grid[1]
    if grid is not None and arguments.tokens not in (None, tokens):
        raise UserError(f"--grid {arguments.grid} has {tokens} tokens, but --tokens is {arguments.tokens}")
    arguments.tokens = tokens if arguments.tokens is None else arguments.tokens
    try:
        spec = make_spec(arguments.spec, **options)
        if arguments.match_macs is not None:
            spec = fit_macs(
                spec,
                arguments.match_macs,
                arguments.heads,
                arguments.tokens,
                arguments.head_dim,
                prefix_tokens=arguments.prefix,
                grid_size=grid,
            )
        if not spec.has_pattern:
            return _print_cost(spec, arguments)
        pattern = spec.pattern(
            arguments.heads, arguments.tokens, prefix_tokens=arguments.prefix, layer=arguments.layer, grid_size=grid
        )
    except ValueError as error:
        raise UserError(str(error).replace("grid_size must be given", "--grid (such as 6x10) must be given")) from error
    picture = arguments.output or Path(f"{spec.name}.png")
    check_output(picture)
    if picture.suffix.lower() != ".png":
        raise UserError(f"--output must be a .png file, got {picture}")
    name = spec if arguments.match_macs else spec.name
    title = f"{name}, {arguments.heads} heads, {arguments.prefix} + {arguments.tokens} tokens"
    write_atomically(picture, lambda path: draw_masks(pattern, path, title))
    if arguments.json:
        sys.stdout.write(json.dumps(_summary(pattern, spec.to_dict(), arguments.head_dim, picture), indent=1) + "\n")
    else:
        _print(pattern, title, arguments.head_dim, picture)
    return 0


def _grid(text: str) -> tuple[int, int]:
    """The rows and columns of ``6x10``."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"--grid must be rows and columns, as 6x10, got {text}")
    return int(parts[0]), int(parts[1])


def _print_cost(spec: AttentionSpec, arguments: argparse.Namespace) -> int:
    """What a spec without a pattern computes."""
    heads, tokens, length = arguments.heads, arguments.tokens, arguments.prefix + arguments.tokens
    cost = spec.cost(heads, tokens, arguments.head_dim, prefix_tokens=arguments.prefix)
    if arguments.json:
        content = {"spec": spec.to_dict(), "pairs": cost.pairs, "macs": cost.macs, "dense_macs": cost.dense_macs}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    dense_pairs = heads * length**2
    make_console().print(
        f"{spec.name}, {heads} heads, {arguments.prefix} + {tokens} tokens: no fixed pattern, so no masks\n"
        f"weights     {cost.pairs:,}; all pairs would be {dense_pairs:,} ({cost.pairs / dense_pairs:.3%})\n"
        f"MACs        {cost.macs / 1e6:.3f} M of {cost.dense_macs / 1e6:.3f} M ({cost.macs / cost.dense_macs:.3%})",
        soft_wrap=True,
    )
    return 0


def _distances(pattern: Pattern, head: int) -> list[int] | None:
    if pattern.offsets is None:
        return None
    return [o for o in pattern.offsets[head if pattern.stored_heads > 1 else 0] if o >= 0]


def _summary(pattern: Pattern, spec: dict[str, object], head_dim: int, picture: Path) -> dict[str, object]:
    return {
        "spec": spec,
        "heads": [
            {"head": h + 1, "distances": _distances(pattern, h), "patch_pairs": pattern.patch_counts[h]}
            for h in range(pattern.num_heads)
        ],
        "patch_pairs": sum(pattern.patch_counts),
        "patch_density": pattern.density(include_prefix=False),
        "pairs": pattern.nnz,
        "density": pattern.density(),
        "macs": pattern.macs(head_dim),
        "dense_macs": pattern.dense_macs(head_dim),
        "picture": str(picture),
    }


def _print(pattern: Pattern, title: str, head_dim: int, picture: Path) -> None:
    console = make_console()
    table = Table(title=title)
    for column in ("head", "distances |query - key|", "patch pairs", "patch density"):
        table.add_column(column, justify="left" if column.startswith("dist") else "right")
    for head in range(pattern.num_heads if pattern.stored_heads > 1 else 1):
        distances = _distances(pattern, head)
        if distances is None:
            text = "(explicit rows)"
        else:
            text = " ".join(map(str, distances[:14])) + (f" ... {distances[-1]}" if len(distances) > 14 else "")
        count = pattern.patch_counts[head]
        name = str(head + 1) if pattern.stored_heads > 1 else "all"
        table.add_row(name, text, f"{count:,}", f"{count / pattern.num_tokens**2:.3%}")
    console.print(table)
    dense = pattern.dense_macs(head_dim)
    console.print(
        f"patch pairs {sum(pattern.patch_counts):,} of {pattern.num_heads * pattern.num_tokens**2:,} "
        f"({pattern.density(include_prefix=False):.3%})\n"
        f"all pairs   {pattern.nnz:,} of {pattern.num_heads * pattern.sequence_length**2:,} ({pattern.density():.3%})\n"
        f"MACs        {pattern.macs(head_dim) / 1e6:.3f} M of {dense / 1e6:.3f} M (QK^T and AV, head_dim {head_dim})\n"
        f"masks       {picture}",
        soft_wrap=True,
    )
