"""``fibottention evaluate`` for images and videos: metrics of a run or a checkpoint on validation data."""

import json
import sys
from functools import partial

import torch
import yaml
from accelerate.utils import gather_object
from rich.table import Table
from torch import nn

from fibottention.adapters import sparsify
from fibottention.cli.changed_spec import changed_spec
from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer
from fibottention.specs import AttentionSpec
from fibottention.tasks.kinds import task_kind
from fibottention.tasks.options import make_config, merge_options, spec_options
from fibottention.tasks.runs import load_model
from fibottention.tasks.video.config import VideoConfig
from fibottention.training.engine import make_accelerator

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention evaluate",
        description="Evaluate a trained model on validation data. Options of the run's data can be changed, as in "
        "--data.workers 4, or for videos --data.views 4 --data.crops 3. With --attention.name NAME and the options of "
        "that spec, the model attends so instead, without training; what the spec learns has its initial values. A run "
        "of the robot task has other options: fibottention evaluate RUN --help.",
    )
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a run, or a checkpoint in it")
    parser.add_argument("--root", help="folder with the data, if not where it was in training")
    parser.add_argument("--split", help="name of the validation split or folder")
    parser.add_argument("--batch-size", type=int, help="samples per step")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="device")
    parser.add_argument("--dilations", help="dilations of a NAT or DiNAT: gradual, max, null or such as [8,4,2,1]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    attention, words = spec_options(words, "--attention.")
    temporal, words = spec_options(words, "--temporal_attention.")
    changed, words = spec_options(words, "--data.")
    arguments = parser.parse_args(words)
    model, config, saved, _ = load_model(arguments.run)
    classes = saved["classes"]
    if changed:
        before, config = config, make_config(merge_options(config.to_dict(), {"data": changed}))
        for option in ("image_size", "num_frames"):
            if getattr(before.data, option, None) != getattr(config.data, option, None):
                raise UserError(
                    f"--data.{option} cannot be changed: the model is made for {getattr(before.data, option)}"
                )
    if arguments.root is not None and config.data.name == "fashion-mnist-subset":
        raise UserError("--root has no meaning for this run, whose data are embedded in the package")
    if attention:
        put = partial(sparsify, model)
        config.attention = changed_spec(attention, "attention", model, config.train.seed, put)
    if temporal:
        if not isinstance(config, VideoConfig):
            raise UserError("--temporal_attention is for TimeSformer")
        put = partial(_put_in_time, model)
        config.temporal_attention = changed_spec(temporal, "temporal_attention", model, config.train.seed, put)
    if arguments.dilations is not None:
        _change_dilations(model, arguments.dilations, config.data.image_size)
    if arguments.root is not None:
        config.data.root = arguments.root
    if arguments.split is not None:
        config.data.val_split = arguments.split
    if arguments.batch_size is not None:
        config.train.batch_size = arguments.batch_size
    if arguments.device is not None:
        config.train.device = arguments.device
    accelerator = make_accelerator(config.train)
    kind = task_kind(config.task)
    task = kind.task(config, train=False, model=model, classes=classes)
    if task.data.classes != classes:
        raise UserError(
            f"the data have other classes ({len(task.data.classes)}: {', '.join(task.data.classes[:3])}, ...) than "
            f"the model ({len(classes)}: {', '.join(classes[:3])}, ...)"
        )
    model.to(accelerator.device)
    loader = task.val_loader if task.is_stream else accelerator.prepare(task.val_loader)
    batches = ([tensor.to(accelerator.device) for tensor in batch] for batch in loader)
    with torch.no_grad(), accelerator.autocast():
        result = task.evaluate(model, batches, accelerator)
    unreadable = sorted(gather_object(task.unreadable()))
    if not accelerator.is_main_process:
        return 0
    confusion = torch.tensor(result.details["confusion"])
    recall = (confusion.diagonal() / confusion.sum(1).clamp(min=1)).tolist()
    if arguments.json:
        content = {
            **result.metrics,
            "attention": config.attention,
            kind.sample: result.details[kind.sample],
            "recall": dict(zip(classes, recall, strict=True)),
            "confusion": result.details["confusion"],
            "unreadable": unreadable,
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    console = make_console()
    name = f"{config.attention['name']} attention" if config.attention["name"] != "none" else "its own attention"
    table = Table(title=f"{arguments.run} with {name} on {result.details[kind.sample]} {kind.sample}")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, label in kind.metrics.items():
        table.add_row(label, f"{result.metrics[name]:.2f} %")
    table.add_row("loss", f"{result.metrics['val_loss']:.4f}")
    if len(classes) <= 30:
        for name, value, count in zip(classes, recall, confusion.sum(1).tolist(), strict=True):
            table.add_row(f"recall of {name} ({count})", f"{value:.2%}" if count else "absent")
    console.print(table)
    for name in unreadable:
        console.print(f"could not be read: {name}", soft_wrap=True)
    return 0


def _put_in_time(model: nn.Module, spec: AttentionSpec) -> None:
    """Let a TimeSformer attend over the frames as a spec says."""
    from fibottention.adapters import timesformer  # needs transformers, which a model of timm does not

    timesformer.sparsify(model, None, temporal=spec)


def _change_dilations(model: nn.Module, text: str, image_size: int) -> None:
    if not isinstance(model, NeighborhoodTransformer):
        raise UserError(f"--dilations is for NAT and DiNAT, and this run has a {type(model).__name__}")
    try:
        dilations = yaml.safe_load(text)
        model.set_dilations(dilations, image_size if isinstance(dilations, str) else None)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"--dilations: {' '.join(str(error).split())}") from error
