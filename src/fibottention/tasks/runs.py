"""Whole runs of any task: train one, open one."""

import copy
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
import timm
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import nn

import fibottention
from fibottention.errors import UserError
from fibottention.tasks.base import RunTask
from fibottention.tasks.config import TaskConfig
from fibottention.tasks.kinds import task_kind, task_names
from fibottention.tasks.options import make_config
from fibottention.tasks.weights import load_into
from fibottention.training.engine import Trainer, make_accelerator
from fibottention.training.run import Run, load_weights

__all__ = ["check_run", "environment", "find_run", "load_config", "load_model", "train_run"]


def train_run(
    config: TaskConfig,
    folder: str | Path,
    *,
    command: str | None = None,
    console: Console | None = None,
) -> dict[str, Any] | None:
    """Train a model and keep everything about it in a folder; goes on where a run in that folder stopped.

    Args:
        config: All options.
        folder: Folder of the run: new, empty, or (with ``command=None``) that of a run to resume.
        command: The command that repeats the run; None resumes.
        console: Where to report; silent if None.

    Returns:
        The summary, as saved in ``summary.json``; None on all but the main process.

    Raises:
        UserError: If an option is not valid or the training data cannot be used.
    """
    config = copy.deepcopy(config)  # which takes over what its weights say
    given = config.essence()
    if command is not None:
        task_kind(config.task).task.begin(config)
    if command is None and Run.open(folder).checkpoint() is not None:
        _forget_sources(config)
    out = console or Console(quiet=True)
    accelerator, task, trainer, run = _prepare(config, folder, command is not None, out)
    out = out if accelerator.is_main_process else Console(quiet=True)
    accelerator.wait_for_everyone()
    if command is not None and accelerator.is_main_process:
        saved = {**config.to_dict(), "command": command}
        saved["train"]["output"] = str(run.folder)
        if given != config.essence():
            saved["given"] = given
        run.create(saved)
        run.write_json("environment.json", environment(accelerator))
        task.save_samples(run)
    accelerator.wait_for_everyone()
    report = task.sparsify_report
    parameters = sum(p.numel() for p in task.model.parameters())
    out.print(
        f"{config.model.name}: {parameters / 1e6:.2f} M parameters, {task.overview()}, "
        f"{accelerator.num_processes} x {accelerator.device.type}"
        + (f", attention {report.density:.2%} of dense" if report else "")
        + (f" with {report.spec}" if report and getattr(config.model, "match_macs", None) else ""),
        highlight=False,
        soft_wrap=True,
    )
    try:
        trainer.fit()
    except UserError:
        if accelerator.is_main_process:
            run.remove_if_unfinished()
        raise
    if not accelerator.is_main_process:
        return None
    records = run.metrics()
    best = run.read_json("best.json") or {}
    trained = [record for record in records if record["epoch"]]
    step_times = sorted(record["step_milliseconds"] for record in trained)
    summary = {
        "model": config.model.name,
        **task.summary(),
        **{name: best[name] for name in (*task_kind(config.task).metrics, "val_loss") if name in best},
        "best_epoch": best["epoch"],
        "epochs": len(trained),
        "train_seconds": sum(record["train_seconds"] for record in trained),
        "step_milliseconds": step_times[len(step_times) // 2] if step_times else None,
        "parameters": parameters,
        "whole_model_macs": task.macs(),
        "environment": run.read_json("environment.json"),
        "attention": None
        if report is None
        else {
            "spec": report.spec.to_dict(),
            "pairs": report.pairs,
            "density": report.density,
            "macs": report.macs,
            "dense_macs": report.dense_macs,
            "layers": [asdict(layer) for layer in report.layers],
        },
    }
    run.write_json("summary.json", summary)
    return summary


def check_run(config: TaskConfig) -> None:
    """Make everything that a run needs, and train nothing.

    Raises:
        UserError: If an option is not valid or the training data cannot be used.
    """
    config = copy.deepcopy(config)
    task_kind(config.task).task.begin(config)
    _prepare(config, "nowhere", False, Console(quiet=True))


def _prepare(
    config: TaskConfig, folder: str | Path, is_new: bool, console: Console
) -> tuple[Accelerator, RunTask, Trainer, Run]:
    """What a run needs; everything that can be wrong with the options is found before its folder is made."""
    accelerator = make_accelerator(config.train)
    run = Run(broadcast_object_list([str(folder)])[0])  # a name with the time in it may differ among processes
    if is_new:
        run.check_new()
    task = task_kind(config.task).task(config)
    trainer = Trainer(task, run, config.optim, config.train, accelerator, console)
    return accelerator, task, trainer, run


def load_config(run: Run) -> TaskConfig:
    """The configuration of a run.

    Raises:
        UserError: If the run's configuration is not valid.
    """
    saved = run.read_yaml()
    if saved.get("task") not in task_names():
        raise UserError(f"{run.config_path} is not the configuration of a run: its task is {saved.get('task')!r}")
    return make_config({key: value for key, value in saved.items() if key not in ("command", "given")})


def find_run(path: str | Path) -> Run:
    """The run of a folder, or of a file or folder in it.

    Raises:
        UserError: If there is none.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run or a checkpoint in it")
    here = path.absolute()
    folder = next((p for p in (here, *here.parents) if (p / "config.yaml").is_file()), None)
    if folder is None:
        raise UserError(f"{path} is neither the folder of a run nor a checkpoint in one: there is no config.yaml")
    return Run.open(folder)


def load_model(path: str | Path) -> tuple[nn.Module, TaskConfig, dict[str, Any], Run]:
    """The trained model of a run or of a weights file in a run's folder.

    Args:
        path: Folder of a run (its best weights are taken), or a file of weights or a checkpoint's folder in it.

    Returns:
        The model in evaluation mode, its configuration, what the best epoch kept (the class names, for example) and the
        run.

    Raises:
        UserError: If there is no such run or the weights do not fit.
    """
    path = Path(path)
    run = find_run(path)
    if (path / "model.safetensors").is_file():
        path = path / "model.safetensors"
    config = load_config(run)
    best = run.read_json("best.json")
    if best is None:
        raise UserError(f"{run.folder} has no weights yet: no epoch has been finished")
    weights = run.weights() if path.is_dir() else load_weights(path)
    _forget_sources(config)
    model = task_kind(config.task).task.restore_model(config, best)
    load_into(model, weights, run.best_path if path.is_dir() else path)
    return model.eval(), config, best, run


def _forget_sources(config: TaskConfig) -> None:
    """Let the model not start from other weights, which the run's own take the place of."""
    defaults = type(config.model)()
    for source in ("pretrained", "checkpoint", "backbone_checkpoint"):
        if hasattr(defaults, source):
            setattr(config.model, source, getattr(defaults, source))


def environment(accelerator: Accelerator) -> dict[str, str]:
    """Versions and machine of a run, for the report."""
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = f"{accelerator.device.type}, {torch.get_num_threads()} threads"
    return {
        "fibottention": fibottention.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "accelerate": accelerate.__version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "device": device,
        "processes": str(accelerator.num_processes),
        "mixed precision": accelerator.mixed_precision,
    }
