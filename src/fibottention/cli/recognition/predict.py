"""``fibottention predict`` for images and videos: classify them with a run."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.kinds import task_kind
from fibottention.tasks.runs import load_model
from fibottention.training.config import TrainConfig
from fibottention.training.engine import make_accelerator

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(prog="fibottention predict", description="Classify images or videos with a trained model.")
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a run, or a checkpoint in it")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="images, or videos for a video run")
    parser.add_argument("--top", type=int, default=5, help="classes to show per file (default 5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="device")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    if arguments.top < 1:
        raise UserError(f"--top must be at least 1, got {arguments.top}")
    model, config, saved, _ = load_model(arguments.run)
    device = make_accelerator(TrainConfig(device=arguments.device or "auto", mixed_precision="no")).device
    model.to(device)
    classes, kind = saved["classes"], task_kind(config.task)
    assert kind.open_input is not None
    what = kind.sample.removesuffix("s")
    read = kind.open_input(config)
    predictions, unread = [], []
    for path in arguments.files:
        if not path.is_file():
            reason = f"a folder, not {'an' if what[0] in 'aeiou' else 'a'} {what}" if path.is_dir() else "no such file"
            unread.append(f"cannot read {path}: {reason}")
            continue
        try:
            sample = read(path)
        except UserError as error:
            unread.append(f"cannot read {path}: {error}")
            continue
        with torch.no_grad():
            probabilities = kind.task.logits(model, sample.unsqueeze(0).to(device)).float().softmax(-1)[0]
        values, indices = probabilities.topk(min(arguments.top, len(classes)))
        top = [{"class": classes[i], "probability": p} for i, p in zip(indices.tolist(), values.tolist(), strict=True)]
        predictions.append({what: str(path), "predictions": top})
    if predictions:
        _show(predictions, what, arguments.json)
    for sentence in unread:
        sys.stderr.write(f"fibottention: {sentence}\n")
    return 2 if unread else 0


def _show(predictions: list[dict[str, Any]], what: str, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(predictions, indent=1) + "\n")
        return
    table = Table()
    table.add_column(what, overflow="fold")
    table.add_column("class")
    table.add_column("probability", justify="right")
    for prediction in predictions:
        for i, entry in enumerate(prediction["predictions"]):
            table.add_row(prediction[what] if i == 0 else "", entry["class"], f"{entry['probability']:.2%}")
        table.add_section()
    make_console().print(table)
