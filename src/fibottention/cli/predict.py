"""``fibottention predict``: classify images with a run."""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from rich.table import Table

from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.classification.data import eval_transform, open_image
from fibottention.tasks.classification.runs import load_model

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(prog="fibottention predict", description="Classify images with a trained model.")
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a run, or a checkpoint in it")
    parser.add_argument("images", metavar="IMAGE", nargs="+", type=Path, help="image files")
    parser.add_argument("--top", type=int, default=5, help="classes to show per image (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    if arguments.top < 1:
        raise UserError(f"--top must be at least 1, got {arguments.top}")
    model, config, classes, _ = load_model(arguments.run)
    transform = eval_transform(config.data, config.model.in_chans)
    predictions = []
    for path in arguments.images:
        try:
            with Image.open(path) as image:
                tensor = transform(open_image(image, config.model.in_chans))
        except Exception as error:
            if path.is_file():
                reason = f"not a readable image ({type(error).__name__})"
            else:
                reason = "a folder, not an image" if path.is_dir() else "no such file"
            raise UserError(f"cannot read {path}: {reason}") from error
        with torch.no_grad():
            probabilities = model(tensor.unsqueeze(0)).float().softmax(-1)[0]
        values, indices = probabilities.topk(min(arguments.top, len(classes)))
        top = [{"class": classes[i], "probability": p} for i, p in zip(indices.tolist(), values.tolist(), strict=True)]
        predictions.append({"image": str(path), "predictions": top})
    if arguments.json:
        sys.stdout.write(json.dumps(predictions, indent=1) + "\n")
        return 0
    table = Table()
    table.add_column("image", overflow="fold")
    table.add_column("class")
    table.add_column("probability", justify="right")
    for prediction in predictions:
        for i, entry in enumerate(prediction["predictions"]):
            table.add_row(prediction["image"] if i == 0 else "", entry["class"], f"{entry['probability']:.2%}")
        table.add_section()
    make_console().print(table)
    return 0
