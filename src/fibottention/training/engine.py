"""The training loop of all tasks, on Accelerate: one process or many, CPU or GPU, resumable to the same result."""

import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object, set_seed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from fibottention.errors import DivergedError, UserError
from fibottention.ops.twist import Twist
from fibottention.specs import nearest
from fibottention.training.config import OptimConfig, TrainConfig
from fibottention.training.run import Run

__all__ = ["Evaluation", "Task", "Trainer", "learned_scales", "make_accelerator"]

_REPORT_STEPS = 10  # the loss, which means waiting for the device, is read about this often
_CURVE_POINTS = 20  # parts of an epoch whose mean training loss is kept


@dataclass(frozen=True)
class Evaluation:
    """Result of one pass over the validation data.

    Attributes:
        metrics: Numbers by name, for the log.
        details: Plain data for the report, such as a confusion matrix.
    """

    metrics: dict[str, float]
    details: dict[str, Any]


class Task(Protocol):
    """What the trainer needs to know of a task.

    Attributes:
        model: The model, with initial weights.
        train_loader: Batches for training.
        val_loader: Batches for evaluation.
        is_stream: Whether the loaders divide their data among the processes by themselves.
        sample_name: What the samples are called, in the plural.
    """

    model: nn.Module
    train_loader: DataLoader[Any]
    val_loader: DataLoader[Any]
    is_stream: bool
    sample_name: str

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the data of an epoch, from 0."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of a training batch."""
        ...

    def batch_length(self, batch: Any) -> int:
        """Number of samples in a batch."""
        ...

    def evaluate(self, model: nn.Module, batches: Iterator[Any], accelerator: Accelerator) -> Evaluation:
        """Evaluate on batches of the validation data, each sample once over all processes."""
        ...

    def score(self, metrics: dict[str, float]) -> float | None:
        """How good an epoch is, by its metrics; larger is better, and None is not to be compared."""
        ...

    def unreadable(self) -> list[str]:
        """Samples of this process that could not be read, by name."""
        ...


def make_accelerator(train: TrainConfig) -> Accelerator:
    """The Accelerator of a configuration.

    Raises:
        UserError: If the device is not there or cannot do the mixed precision.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if train.device != "auto" and not available[train.device]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise UserError(f"train.device={train.device} is not available on this machine; available: {there}")
    # Accelerate allows one configuration a process; each run has its own. A process group stays.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    try:
        accelerator = Accelerator(
            mixed_precision=train.mixed_precision,  # None is what accelerate launch says, or no
            gradient_accumulation_steps=train.gradient_accumulation,
            cpu=train.device == "cpu",
            step_scheduler_with_optimizer=False,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False),
        )
    except ValueError as error:
        raise UserError(f"train.mixed_precision={train.mixed_precision} does not work here: {error}") from error
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("train.mixed_precision=fp16 needs a GPU, which is not used here; use bf16 or no")
    return accelerator


def _transform_scales(model: nn.Module) -> list[Tensor]:
    """The scale of each layer's transform of the attention weights, in the order of the layers."""
    return [module.scale for module in model.modules() if isinstance(module, Twist)]


def learned_scales(model: nn.Module, optim: OptimConfig) -> list[Tensor]:
    """The scales of SATA's transforms that get a learning rate of their own.

    Raises:
        UserError: If there is such a rate but no such scale.
    """
    if optim.transform_lr is None:
        return []
    scales = [scale for scale in _transform_scales(model) if scale.requires_grad]
    if not scales:
        raise UserError(
            f"optim.transform_lr={optim.transform_lr} is for the scales that attention.name=sata learns, but the model "
            "has none"
        )
    return scales


class Trainer:
    """Trains a task's model and keeps its run's folder.

    Args:
        task: Model, data, loss and metrics.
        run: Where everything is written.
        optim: Optimizer and schedule.
        train: The loop.
        accelerator: Devices and processes.
        console: Where to report; None is silent.
    """

    def __init__(
        self,
        task: Task,
        run: Run,
        optim: OptimConfig,
        train: TrainConfig,
        accelerator: Accelerator,
        console: Console | None = None,
    ) -> None:
        self.task, self.run, self.optim, self.train, self.accelerator = task, run, optim, train, accelerator
        self.console = console if accelerator.is_main_process and console else Console(quiet=True)
        optimizer = self._make_optimizer()
        if task.is_stream:
            self.model, self.optimizer = accelerator.prepare(task.model, optimizer)
            self.train_loader, self.val_loader = task.train_loader, task.val_loader
        else:
            self.model, self.optimizer, self.train_loader, self.val_loader = accelerator.prepare(
                task.model, optimizer, task.train_loader, task.val_loader
            )
        if task.is_stream and train.gradient_accumulation > 1:
            raise UserError("train.gradient_accumulation must be 1 with streamed data, whose epochs end unevenly")
        self.ema: ModelEmaV3 | None = None
        if optim.ema_decay is not None:
            if not 0 < optim.ema_decay < 1:
                raise UserError(f"optim.ema_decay must be between 0 and 1, got {optim.ema_decay}")
            self.ema = ModelEmaV3(
                accelerator.unwrap_model(self.model),
                decay=optim.ema_decay,
                use_warmup=True,
                warmup_power=optim.ema_power,
            )
        self.steps_per_epoch = len(self.train_loader)
        self.updates_per_epoch = math.ceil(self.steps_per_epoch / train.gradient_accumulation)
        self.scheduler = None
        if train.epochs:
            if not self.updates_per_epoch:
                raise UserError("there is not one training batch; lower train.batch_size")
            self.scheduler = self._make_scheduler(optimizer)
        self.epoch = 0  # epochs finished
        self.best = -math.inf

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optim, train = self.optim, self.train
        lr = optim.lr
        if lr is None:
            batch = train.batch_size * train.gradient_accumulation * self.accelerator.num_processes
            lr = optim.base_lr * batch / 256
        self.lr = lr
        extra: dict[str, Any] = {"betas": optim.betas} if optim.betas else {}
        try:
            optimizer = create_optimizer_v2(
                self.task.model,
                opt=optim.name,
                lr=lr,
                weight_decay=optim.weight_decay,
                momentum=optim.momentum,
                layer_decay=optim.layer_decay,
                **extra,
            )
        except (ValueError, TypeError, AssertionError, AttributeError) as error:
            known = [str(name) for name in list_optimizers()]
            near = "" if optim.name in known else nearest(optim.name, known, "see timm.optim.list_optimizers()")
            raise UserError(f"the optimizer optim.name={optim.name} cannot be made: {error}{near}") from error
        self._separate_backbone(optimizer)
        self._separate_scales(optimizer)
        return optimizer

    def _separate_backbone(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the backbone's parameters ``backbone_lr``, each with the weight decay that it had."""
        lr = self.optim.backbone_lr
        if lr is None:
            return
        backbone = getattr(self.task.model, "backbone", None)
        if not isinstance(backbone, nn.Module):
            raise UserError(f"optim.backbone_lr={lr} is for models with a backbone, which this one has not")
        moved = {id(parameter) for parameter in backbone.parameters()}
        for group in list(optimizer.param_groups):
            own = [p for p in group["params"] if id(p) in moved]
            group["params"] = [p for p in group["params"] if id(p) not in moved]
            if own:
                optimizer.add_param_group({**group, "params": own, "lr": lr})

    def _separate_scales(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the scales of the transforms a group of their own, with ``transform_lr`` and without weight decay."""
        scales = learned_scales(self.task.model, self.optim)
        if not scales:
            return
        moved = {id(scale) for scale in scales}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in moved]
        optimizer.add_param_group({"params": scales, "lr": self.optim.transform_lr, "weight_decay": 0.0})

    def _make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        optim, epochs = self.optim, self.train.epochs
        warmup = optim.warmup_epochs
        if optim.warmup_steps is not None:
            warmup = optim.warmup_steps / self.updates_per_epoch
        if not 0 <= warmup < epochs:
            given = f"{warmup:g}" if optim.warmup_steps is None else f"{optim.warmup_steps} steps, {warmup:.2f} epochs"
            raise UserError(f"optim.warmup_epochs must be at least 0 and less than train.epochs={epochs}, got {given}")
        if not 0 <= optim.cooldown_epochs < epochs - warmup:
            raise UserError(
                "optim.cooldown_epochs must be at least 0 and less than train.epochs minus optim.warmup_epochs "
                f"({epochs - warmup:g}), got {optim.cooldown_epochs}"
            )
        if optim.schedule == "none":
            raise UserError("optim.schedule=none would ignore the warm-up and the layer decay; use constant")
        # A falling schedule starts after the warm-up and ends before the cool-down; steps count from the start.
        prefix = optim.schedule in ("cosine", "tanh", "poly")
        if optim.cooldown_epochs and not prefix:
            raise UserError(f"optim.cooldown_epochs is for cosine, tanh and poly, got schedule {optim.schedule}")
        try:
            scheduler, _ = create_scheduler_v2(
                optimizer,
                sched=optim.schedule,
                num_epochs=epochs - prefix * warmup - optim.cooldown_epochs,  # pyright: ignore[reportArgumentType]
                decay_epochs=optim.decay_epochs,
                decay_milestones=optim.milestones or [],
                decay_rate=optim.decay_rate,
                min_lr=optim.min_lr,
                warmup_lr=optim.warmup_lr,
                warmup_epochs=warmup,  # pyright: ignore[reportArgumentType]
                warmup_prefix=prefix,
                step_on_epochs=False,
                updates_per_epoch=self.updates_per_epoch,
            )
        except (ValueError, AssertionError) as error:
            near = nearest(optim.schedule, ["cosine", "tanh", "poly", "step", "multistep", "constant"])
            raise UserError(f"the schedule optim.schedule={optim.schedule} cannot be made: {error}{near}") from error
        return scheduler

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated: the moving average if there is one."""
        return self.ema.module if self.ema is not None else self.accelerator.unwrap_model(self.model)

    def fit(self) -> None:
        """Train to the last epoch, from the run's last checkpoint if it has one; without epochs, only evaluate."""
        is_resumed = self._resume()
        writer = SummaryWriter(str(self.run.folder / "tensorboard")) if self.accelerator.is_main_process else None
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        ) as progress:
            bar = progress.add_task("", total=self.train.epochs * self.steps_per_epoch, status="")
            while self.epoch < self.train.epochs:
                record = self._epoch(progress, bar, writer)
                self._finish_epoch(record, writer)
            if not self.train.epochs and not is_resumed:
                self._finish_epoch({"epoch": 0}, writer)
        if writer is not None:
            writer.close()
        self._report_unreadable()

    def _epoch(self, progress: Progress, bar: TaskID, writer: SummaryWriter | None) -> dict[str, Any]:
        accelerator, epoch = self.accelerator, self.epoch
        # Dropout and stochastic depth start each epoch from a seed, so a resumed run repeats them.
        set_seed(zlib.crc32(f"{self.train.seed} {epoch} {accelerator.process_index}".encode()))
        self.task.set_epoch(epoch)
        self.model.train()
        losses: list[Tensor] = []
        step_times: list[float] = []
        samples = last_timed = 0
        start = mark = time.perf_counter()
        for step, batch in enumerate(self._batches(self.train_loader)):
            update = epoch * self.updates_per_epoch + step // self.train.gradient_accumulation
            if self.scheduler is not None:
                self.scheduler.step_update(update)
            with accelerator.accumulate(self.model):
                with accelerator.autocast():
                    loss = self.task.loss(self.model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.optim.clip_grad is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.optim.clip_grad)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.ema is not None and accelerator.sync_gradients:
                self.ema.update(accelerator.unwrap_model(self.model), step=update)
            losses.append(loss.detach())
            progress.update(
                bar,
                completed=epoch * self.steps_per_epoch + step + 1,
                description=f"epoch {epoch + 1}/{self.train.epochs}",
            )
            samples += self.task.batch_length(batch) * accelerator.num_processes
            if step in (0, self.steps_per_epoch - 1) or (step + 1) % _REPORT_STEPS == 0:
                # Mean over the processes, so that all of them see a loss that is no number on one.
                value = float(cast(Tensor, accelerator.reduce(losses[-1], reduction="mean")))
                if not math.isfinite(value):
                    raise DivergedError(
                        f"the loss became {value} in epoch {epoch + 1}; lower optim.lr (now {self.lr:g}), set "
                        "optim.clip_grad, or train without mixed precision"
                    )
                # Reading the loss has waited for the device, so the time of the steps since the last time is known.
                now = time.perf_counter()
                if step or self.steps_per_epoch == 1:  # the first step also starts the workers and warms up
                    step_times.append((now - mark) / (step + 1 - last_timed))
                mark, last_timed = now, step + 1
                rate = samples / (now - start)
                progress.update(bar, status=f"loss {value:.3f}  {rate:.1f} {self.task.sample_name}/s")
                if writer is not None:
                    writer.add_scalar("train/loss_step", value, update)
        seconds = time.perf_counter() - start
        all_losses = cast(Tensor, accelerator.reduce(torch.stack(losses), reduction="mean"))
        return {
            "epoch": epoch + 1,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "train_loss": all_losses.mean().item(),
            "loss_curve": [part.mean().item() for part in all_losses.tensor_split(min(_CURVE_POINTS, len(losses)))],
            "train_seconds": seconds,
            "samples_per_second": samples / seconds,
            "step_milliseconds": 1000 * sorted(step_times)[len(step_times) // 2],
        }

    def _batches(self, loader: Any) -> Iterator[Any]:
        for batch in loader:
            if self.task.is_stream:
                batch = [item.to(self.accelerator.device) for item in batch]
            yield batch

    def evaluate(self) -> Evaluation:
        """Evaluate the current weights."""
        model = self.eval_model
        model.eval()
        with torch.no_grad(), self.accelerator.autocast():
            return self.task.evaluate(model, self._batches(self.val_loader), self.accelerator)

    def _finish_epoch(self, record: dict[str, Any], writer: SummaryWriter | None) -> None:
        evaluation = self.evaluate()
        record.update(evaluation.metrics)
        if scales := _transform_scales(self.eval_model):
            record["transform_scales"] = [scale.item() for scale in scales]
        self.epoch = record["epoch"]
        score = self.task.score(evaluation.metrics)
        for name, number in (("score", score), ("val_loss", evaluation.metrics.get("val_loss"))):
            if number is not None and math.isnan(number):
                raise DivergedError(f"the validation gives no number ({name}); are the weights finite?")
        if score is None:  # until there is one to compare, the last epoch is kept
            is_best = self.best == -math.inf
        else:
            is_best, self.best = score > self.best, max(self.best, score)
        numbers = "  ".join(f"{name} {number:.4g}" for name, number in evaluation.metrics.items())
        line = f"without training  {numbers}"
        if self.epoch:
            line = (
                f"epoch {self.epoch}/{self.train.epochs}  loss {record['train_loss']:.4f}  {numbers}  "
                f"{record['samples_per_second']:.1f} {self.task.sample_name}/s"
            )
        self.console.print(line, highlight=False, soft_wrap=True)
        if self.accelerator.is_main_process:
            records = [r for r in self.run.metrics() if r["epoch"] < self.epoch]
            self.run.write_metrics([*records, record])
            if writer is not None:
                for name, number in record.items():
                    if not isinstance(number, list):
                        writer.add_scalar(f"epoch/{name}", number, self.epoch)
                for layer, scale in enumerate(record.get("transform_scales", [])):
                    writer.add_scalar(f"transform_scale/layer_{layer + 1}", scale, self.epoch)
                writer.flush()
            if is_best:
                self.run.save_best(self.eval_model.state_dict())
                self.run.write_json("best.json", {"epoch": self.epoch, **evaluation.metrics, **evaluation.details})
            state = {
                "epoch": self.epoch,
                "best": self.best,
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None,
                "ema": self.ema.module.state_dict() if self.ema is not None else None,
            }
            self.run.save_checkpoint(self.epoch, self.accelerator.unwrap_model(self.model).state_dict(), state)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> bool:
        """Take up the run's last checkpoint; returns whether there is one."""
        folder = self.run.checkpoint()
        if folder is None:
            return False
        try:
            weights = load_file(folder / "model.safetensors")
            state = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
            self.accelerator.unwrap_model(self.model).load_state_dict(weights)
            self.optimizer.load_state_dict(state["optimizer"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
            if self.accelerator.scaler is not None and state["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
        except Exception as error:
            raise UserError(f"{folder} is not a checkpoint of this model: {str(error).splitlines()[0]}") from error
        self.epoch, self.best = state["epoch"], state["best"]
        self.console.print(f"resumed after epoch {self.epoch} from {folder}")
        return True

    def _report_unreadable(self) -> None:
        names = self.task.unreadable()
        if self.accelerator.num_processes > 1:
            names = gather_object(names)
        names = sorted(set(names))
        if not names or not self.accelerator.is_main_process:
            return
        path = self.run.folder / "unreadable.txt"
        path.write_text("".join(f"{name}\n" for name in names))
        self.console.print(
            f"{len(names)} {self.task.sample_name} could not be read (listed in {path}):", highlight=False
        )
        for name in names[:10]:
            self.console.print(f"  {name}", highlight=False, soft_wrap=True)
        if len(names) > 10:
            self.console.print(f"  and {len(names) - 10} more", highlight=False)
