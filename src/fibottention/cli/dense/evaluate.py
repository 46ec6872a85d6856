"""``fibottention evaluate`` for detectors and segmenters: the reference metrics of a run on validation images."""

import json
import sys
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.table import Table

from fibottention.adapters import sparsify
from fibottention.cli.changed_spec import changed_spec
from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.model import DenseModel
from fibottention.tasks.dense.task import DenseTask
from fibottention.tasks.options import make_config, merge_options, spec_options
from fibottention.tasks.runs import load_model
from fibottention.training.engine import make_accelerator

__all__ = ["run"]

_MODEL_OPTIONS = ("target",)  # of the data, for which the model was made


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention evaluate",
        description="Evaluate a trained detector or segmenter on validation images: average precision of boxes and "
        "masks, mean IoU, or panoptic quality. Options of the run's data can be changed, as in --data.test_size 640 or "
        "--data.test_scales '[0.5, 1, 1.5]' --data.test_flip true. With --attention.name NAME and the options of that "
        "spec, the backbone attends so instead, without training.",
    )
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a run, or a checkpoint in it")
    parser.add_argument("--root", help="folder with the data, if not where it was in training")
    parser.add_argument("--batch-size", type=int, help="images per step")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="device")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    attention, words = spec_options(words, "--attention.")
    changed, words = spec_options(words, "--data.")
    arguments = parser.parse_args(words)
    model, config, saved, _ = load_model(arguments.run)
    assert isinstance(model, DenseModel)
    assert isinstance(config, DenseConfig)
    for option in _MODEL_OPTIONS:
        if changed.get(option, getattr(config.data, option)) != getattr(config.data, option):
            raise UserError(f"--data.{option} cannot be changed: the model is made for {getattr(config.data, option)}")
    if changed:
        made = make_config(merge_options(config.to_dict(), {"data": changed}))
        assert isinstance(made, DenseConfig)
        config = made
        model.data = config.data
    if attention:
        put = partial(sparsify, model.backbone.model)
        config.attention = changed_spec(attention, "attention", model, config.train.seed, put)
    if arguments.root is not None:
        config.data.root = arguments.root
    if arguments.batch_size is not None:
        config.train.batch_size = arguments.batch_size
    if arguments.device is not None:
        config.train.device = arguments.device
    accelerator = make_accelerator(config.train)
    task = DenseTask(config, train=False, model=model)
    if task.data.classes != saved["classes"]:
        raise UserError(
            f"the data have other classes ({len(task.data.classes)}: {', '.join(task.data.classes[:3])}, ...) than the "
            f"model ({len(saved['classes'])}: {', '.join(saved['classes'][:3])}, ...)"
        )
    model.to(accelerator.device)
    loader = accelerator.prepare(task.val_loader)
    with torch.no_grad(), accelerator.autocast():
        result = task.evaluate(model, iter(loader), accelerator)
    unreadable = sorted(gather_object(task.unreadable()))
    if not accelerator.is_main_process:
        return 0
    if arguments.json:
        content = {**result.metrics, **result.details, "attention": config.attention, "unreadable": unreadable}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    _show(arguments.run, config, result.metrics, result.details, unreadable)
    return 0


def _show(
    run: str, config: DenseConfig, metrics: dict[str, float], details: dict[str, Any], unreadable: list[str]
) -> None:
    console = make_console()
    name = f"{config.attention['name']} attention" if config.attention["name"] != "none" else "its own attention"
    console.print(f"{run} with {name} on {details['images']} images", soft_wrap=True)
    table = Table()
    table.add_column("metric")
    table.add_column("value", justify="right")
    by_class = {}
    for metric, value in {**metrics, **details}.items():
        if metric.endswith("_by_class"):
            by_class[metric] = value
        elif isinstance(value, float | None):
            table.add_row(_label(metric), "-" if value is None else f"{value:.2f}")
    console.print(table)
    if len(details["classes"]) <= 30:
        table = Table()
        table.add_column("class")
        for metric in by_class:
            table.add_column(_label(metric.removesuffix("_by_class")), justify="right")
        for label in details["classes"]:
            values = [by_class[metric][label] for metric in by_class]
            table.add_row(label, *("-" if value is None else f"{value:.2f}" for value in values))
        console.print(table)
    for path in unreadable:
        console.print(f"could not be read: {path}", soft_wrap=True)


def _label(metric: str) -> str:
    """The name of a metric for people: ``mask_ap50`` is mask AP50."""
    words = (word.upper() if word.startswith(("ap", "pq", "sq", "rq", "iou")) else word for word in metric.split("_"))
    return " ".join(words).replace("miou", "mean IoU").replace("IOU", "IoU")
