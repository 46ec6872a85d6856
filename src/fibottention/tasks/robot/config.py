"""Options of robot learning: a diffusion policy from demonstrations."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fibottention.errors import UserError
from fibottention.tasks.config import Range, TaskConfig
from fibottention.training.config import OptimConfig, TrainConfig

__all__ = ["DiffusionConfig", "RobotConfig", "RobotDataConfig", "RobotModelConfig", "RolloutConfig"]


@dataclass
class RobotDataConfig:
    """Demonstrations.

    Attributes:
        path: Demonstrations: a zarr folder of Diffusion Policy, an HDF5 file of robomimic, or a LeRobot v3 folder.
        filter: Name of a filter of an HDF5 file, such as train: only its episodes; all if null.
        cameras: Names of the images that the policy sees; those of rollout.environment if null.
        states: Names of the vectors that the policy sees; those of rollout.environment if null.
        columns: Where the demonstrations keep what cameras, states and action name, for example
            {agent_pos: "state[:2]", action: action}; where rollout.environment's recordings keep them, or the name
            itself, for what is left out.
        rotation: Place in the action where three numbers for axis and angle begin, which the policy learns as six; that
            of rollout.environment if null.
        horizon: Steps of a predicted sequence of actions.
        observation_steps: Steps that the policy sees.
        action_steps: Actions that are done before the policy looks again.
        crop: Side of the crop of each image: random in training, in the centre later; the whole image if null.
        val_share: Share of the episodes that are kept for validation, at least one.
        limit: Use only this many episodes, evenly spread; all if null.
        cache: Folder where demonstrations are unpacked; fibottention's folder in the user's cache if null.
        workers: Processes that load samples.
    """

    path: str | None = None
    filter: str | None = None
    cameras: list[str] | None = None
    states: list[str] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    rotation: int | None = None
    horizon: int = 16
    observation_steps: int = 2
    action_steps: int = 8
    crop: int | None = 84
    val_share: float = 0.02
    limit: int | None = None
    cache: str | None = None
    workers: int = 2


@dataclass
class RobotModelConfig:
    """One vision transformer of timm per camera, and the U-Net over actions.

    Attributes:
        name: Any vision transformer of timm, one for each camera.
        pretrained: Start the encoders from timm's pretrained weights.
        checkpoint: File of weights (.safetensors) of a whole policy to start from.
        position: How the encoders' position embedding begins, which is learned: random, or sincos (sines and cosines,
            with which a small encoder finds places in far fewer steps).
        down_dims: Channels of the U-Net's levels.
        kernel_size: Length of the U-Net's convolutions.
        step_embedding: Length of the embedding of the diffusion step.
        groups: Groups of the U-Net's group norms.
        options: Further arguments of the encoders, for example {patch_size: 8, depth: 4, embed_dim: 96, num_heads: 6}.
    """

    name: str = "vit_base_patch16_224"
    pretrained: bool = False
    checkpoint: str | None = None
    position: Literal["random", "sincos"] = "random"
    down_dims: list[int] = field(default_factory=lambda: [512, 1024, 2048])
    kernel_size: int = 5
    step_embedding: int = 128
    groups: int = 8
    options: dict[str, Any] = field(default_factory=lambda: {"patch_size": 8})


@dataclass
class DiffusionConfig:
    """Noise, and the reconstruction of the observation beside it.

    Attributes:
        train_steps: Diffusion steps in training (squared-cosine schedule).
        inference_steps: Diffusion steps of a prediction.
        sampler: ddpm or ddim; ddim does with few steps.
        samples_per_window: Noises per sample of a training batch: the encoders, which take most of the time, run once
            for all of them.
        reconstruction_weight: Weight of the loss of rebuilding the observation from the U-Net's features; 0 leaves the
            decoder away.
        reconstruction_channels: Channels of the decoder's levels, from the smallest picture to the largest.
    """

    train_steps: int = 100
    inference_steps: int = 100
    sampler: Literal["ddpm", "ddim"] = "ddpm"
    samples_per_window: int = 1
    reconstruction_weight: float = 0.1
    reconstruction_channels: list[int] = field(default_factory=lambda: [256, 128, 64, 32])


@dataclass
class RolloutConfig:
    """Trying the policy in a simulator.

    Attributes:
        environment: pusht, lift or can; null trains without rollouts, and the loss on the validation episodes chooses
            the best epoch.
        every: Epochs from one evaluation to the next; the last epoch is always evaluated.
        episodes: Episodes of an evaluation.
        first_seed: Seed of the first of them; the following ones count up.
        parallel: Simulators that run at the same time, each in a process of its own; 0 runs one in this process.
        max_steps: Steps until an episode ends; the environment's own if null.
    """

    environment: str | None = None
    every: int = 50
    episodes: int = 50
    first_seed: int = 100_000
    parallel: int = 4
    max_steps: int | None = None


def _optim() -> OptimConfig:
    return OptimConfig(
        lr=1e-4,
        weight_decay=1e-6,
        betas=(0.95, 0.999),
        warmup_epochs=0,
        warmup_steps=500,
        warmup_lr=0.0,
        min_lr=0.0,
        ema_decay=0.9999,
        ema_power=0.75,
    )


@dataclass
class RobotConfig(TaskConfig):
    """All options of a robot learning run.

    Attributes:
        data: Demonstrations.
        model: Encoders and U-Net.
        attention: The attention spec of the encoders.
        diffusion: Noise and reconstruction.
        rollout: Trying the policy in a simulator.
        optim: Optimizer and schedule.
        train: Training loop.
    """

    task: ClassVar[str] = "robot"
    source: ClassVar[tuple[str, str]] = ("path", "path")
    ranges: ClassVar[tuple[Range, ...]] = (
        ("data.horizon", 2, None),
        ("data.observation_steps", 1, None),
        ("data.action_steps", 1, None),
        ("data.crop", 1, None),
        ("data.val_share", 0, 0.9),
        ("data.limit", 2, None),
        ("data.rotation", 0, None),
        ("model.kernel_size", 1, None),
        ("model.groups", 1, None),
        ("model.step_embedding", 4, None),
        ("diffusion.train_steps", 1, None),
        ("diffusion.inference_steps", 1, None),
        ("diffusion.samples_per_window", 1, None),
        ("diffusion.reconstruction_weight", 0, None),
        ("rollout.every", 1, None),
        ("rollout.episodes", 1, None),
        ("rollout.first_seed", 0, None),
        ("rollout.parallel", 0, None),
        ("rollout.max_steps", 1, None),
    )

    data: RobotDataConfig = field(default_factory=RobotDataConfig)
    model: RobotModelConfig = field(default_factory=RobotModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=_optim)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=3000, batch_size=64))

    def essence(self) -> dict[str, Any]:
        """See `TaskConfig`; nor where demonstrations are unpacked."""
        options = super().essence()
        options["data"]["cache"] = None
        return options

    def check(self) -> None:
        """See `TaskConfig`."""
        super().check()
        data, model = self.data, self.model
        halvings = 2 ** (len(model.down_dims) - 1)
        if not model.down_dims or data.horizon % halvings:
            raise UserError(
                f"data.horizon={data.horizon} must be a multiple of {halvings}, since model.down_dims has "
                f"{len(model.down_dims)} levels"
            )
        if data.observation_steps - 1 + data.action_steps > data.horizon:
            raise UserError(
                f"data.action_steps={data.action_steps} and data.observation_steps={data.observation_steps} do not fit "
                f"into data.horizon={data.horizon}"
            )
        if any(dim % model.groups or dim < 1 for dim in model.down_dims):
            raise UserError(f"model.down_dims must be multiples of model.groups={model.groups}, got {model.down_dims}")
        if model.position == "sincos" and model.pretrained:
            raise UserError("model.position=sincos is for encoders that are not pretrained")
        if model.step_embedding % 2:
            raise UserError(f"model.step_embedding must be even, got {model.step_embedding}")
        channels = self.diffusion.reconstruction_channels
        if not channels or min(channels) < 1:
            raise UserError(f"diffusion.reconstruction_channels must be at least one number from 1 on, got {channels}")
        if model.kernel_size % 2 == 0:
            raise UserError(f"model.kernel_size must be odd, got {model.kernel_size}")
        if self.diffusion.inference_steps > self.diffusion.train_steps:
            raise UserError(
                f"diffusion.inference_steps must be at most diffusion.train_steps={self.diffusion.train_steps}, got "
                f"{self.diffusion.inference_steps}"
            )
