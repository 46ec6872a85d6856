"""``fibottention inspect MODEL``: levels, dilations and receptive fields of a NAT or DiNAT, and a picture of them."""

import argparse
import difflib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from rich.table import Table

from fibottention.analysis.cost import whole_model_macs
from fibottention.analysis.receptive_field import LevelField, draw_fields, level_fields
from fibottention.cli.options import CommandParser, check_output, make_console
from fibottention.errors import UserError
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer
from fibottention.tasks.options import spec_options
from fibottention.training.run import write_atomically

__all__ = ["run"]

_MODEL_OPTIONS = [name for name in inspect.signature(NeighborhoodTransformer).parameters if name != "img_size"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention inspect MODEL",
        description="Show the levels and receptive fields of a NAT or DiNAT. Other options go to the model: "
        "--dilations gradual, --kernel_size 9, ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="name of a model, such as dinat_tiny")
    parser.add_argument("--image-size", type=int, nargs="+", help="side, or height and width, in pixels")
    parser.add_argument("--output", type=Path, help="PNG of the receptive fields (default MODEL.png)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = f"options of the model: {', '.join(f'--{name}' for name in _MODEL_OPTIONS)}"
    options, rest = spec_options(words, "--", keep={"--image-size", "--output", "--json", "--help", "-h"})
    arguments = parser.parse_args(rest)
    for option in options:
        if option not in _MODEL_OPTIONS:
            valid = ["image-size", "output", "json", *_MODEL_OPTIONS]
            close = difflib.get_close_matches(option.replace("_", "-"), valid, n=1) or difflib.get_close_matches(
                option, valid, n=1
            )
            hint = f"did you mean --{close[0]}?" if close else f"valid are {', '.join(f'--{name}' for name in valid)}"
            raise UserError(f"{arguments.model} has no option --{option}; {hint}")
    picture = arguments.output or Path(f"{arguments.model}.png")
    check_output(picture)
    if picture.suffix.lower() != ".png":
        raise UserError(f"--output must be a .png file, got {picture}")
    size = arguments.image_size or timm.get_pretrained_cfg(arguments.model).input_size[1:]  # type: ignore
    if len(size) > 2 or min(size) < 1:
        raise UserError(f"--image-size must be one or two numbers above 0, got {' '.join(map(str, size))}")
    height, width = (size[0], size[-1])
    model = _make(arguments.model, options, (height, width))
    parameters = sum(p.numel() for p in model.parameters())
    macs = whole_model_macs(model, (model.in_chans, height, width))
    fields = level_fields(model, (height, width))
    title = f"{arguments.model} at {height} x {width} pixels, kernel {model.kernel_size}"
    write_atomically(picture, lambda path: draw_fields(fields, path, title))
    if arguments.json:
        summary = {
            "model": arguments.model,
            "image_size": [height, width],
            "kernel_size": model.kernel_size,
            "parameters": parameters,
            "macs": macs,
            "levels": [_summary(field) for field in fields],
            "picture": str(picture),
        }
        sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    else:
        _print(fields, title, parameters, macs, picture)
    return 0


def _make(name: str, options: dict[str, Any], image_size: tuple[int, int]) -> NeighborhoodTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return timm.create_model(name, **{"img_size": image_size, **options})  # type: ignore
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"model {name} cannot be made: {' '.join(str(error).split())}") from error


def _summary(field: LevelField) -> dict[str, Any]:
    return {
        "grid": list(field.grid_size),
        "heads": field.num_heads,
        "dilations": list(field.dilations),
        "own_receptive_field": list(field.own_size),
        "receptive_field": list(field.size),
        "share_of_pixels": field.share,
    }


def _print(fields: list[LevelField], title: str, parameters: int, macs: int, picture: Path) -> None:
    console = make_console()
    table = Table(title=title)
    for column in ("level", "grid", "heads", "dilations", "field of its own layers", "field", "pixels in it"):
        table.add_column(column, justify="left" if column == "dilations" else "right")
    for field in fields:
        table.add_row(
            str(field.level + 1),
            f"{field.grid_size[0]} x {field.grid_size[1]}",
            str(field.num_heads),
            " ".join(map(str, field.dilations)),
            f"{field.own_size[0]} x {field.own_size[1]} tokens",
            f"{field.size[0]} x {field.size[1]} pixels",
            f"{field.share:.1%}",
        )
    console.print(table)
    console.print(
        "field: the receptive field of the central token\n"
        f"parameters  {parameters:,}\nMACs        {macs / 1e9:.3f} G (whole model)\nfields      {picture}",
        soft_wrap=True,
    )
