"""Options of the optimizer and of the training loop, shared by all tasks."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["OptimConfig", "TrainConfig"]


@dataclass
class OptimConfig:
    """Optimizer, learning-rate schedule and weight averaging (timm's).

    Attributes:
        name: Optimizer, by timm's name (adamw, sgd, lamb, ...).
        lr: Learning rate; if null, base_lr times the effective batch size / 256.
        base_lr: Learning rate for an effective batch of 256, used if lr is null.
        transform_lr: Learning rate of the scales s of SATA, which follows the same schedule; lr if null.
        backbone_lr: Learning rate of the backbone of a model that has one, which follows the same schedule; lr if null.
        weight_decay: Weight decay; biases, norms and the model's own exceptions get none.
        momentum: Momentum of optimizers that have one.
        betas: Betas of Adam-like optimizers; the optimizer's default if null.
        layer_decay: Factor of the learning rate from each layer to the one below it; none if null.
        schedule: Schedule, by timm's name (cosine, step, multistep, constant, ...; poly with decay_rate 1 is linear),
            stepped after each update.
        milestones: Epochs at which the multistep schedule multiplies the rate by decay_rate.
        decay_epochs: Epochs after which the step schedule multiplies the rate by decay_rate, again and again.
        decay_rate: Factor of the step and multistep schedules, power of the poly schedule.
        warmup_epochs: Epochs of linear warm-up.
        warmup_steps: Updates of linear warm-up, in the place of warmup_epochs if given.
        cooldown_epochs: Epochs at the end, of train.epochs, that stay at min_lr; for the schedules that fall to it.
        warmup_lr: Learning rate at the start of the warm-up.
        min_lr: Learning rate at the end of the schedule.
        clip_grad: Largest norm of the gradient; not clipped if null.
        ema_decay: Decay of an exponential moving average of the weights, which is then evaluated; none if null.
        ema_power: How fast the decay grows to that: after n updates it is at most 1 - (1 + n)^-ema_power.
    """

    name: str = "adamw"
    lr: float | None = None
    base_lr: float = 1e-3
    transform_lr: float | None = None
    backbone_lr: float | None = None
    weight_decay: float = 0.05
    momentum: float = 0.9
    betas: tuple[float, float] | None = None
    layer_decay: float | None = None
    schedule: str = "cosine"
    milestones: list[int] | None = None
    decay_epochs: float = 30.0
    decay_rate: float = 0.1
    warmup_epochs: float = 5.0
    warmup_steps: int | None = None
    cooldown_epochs: float = 0.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-6
    clip_grad: float | None = None
    ema_decay: float | None = None
    ema_power: float = 2 / 3


@dataclass
class TrainConfig:
    """The training loop.

    Attributes:
        epochs: Passes over the training data; with 0, the weights that the model starts from are evaluated and kept.
        batch_size: Samples per step and process.
        gradient_accumulation: Steps per update of the weights.
        seed: Seed of the weights, the order of the data, augmentation and dropout.
        device: auto, cpu, cuda or mps; auto takes a GPU where there is one.
        mixed_precision: Autocast dtype: no, bf16 or fp16; what accelerate launch says, else no, if null.
        output: Folder of the run; a new one under runs/ if null.
    """

    epochs: int = 100
    batch_size: int = 128
    gradient_accumulation: int = 1
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    output: str | None = None
