"""The network of a diffusion policy: encoders, U-Net, and Crossway's decoder that rebuilds the observation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fibottention.adapters.report import SparsifyReport
from fibottention.adapters.timm import sparsify
from fibottention.errors import UserError
from fibottention.tasks.config import attention_spec
from fibottention.tasks.robot.config import RobotConfig
from fibottention.tasks.robot.normalizer import Normalizer
from fibottention.tasks.robot.shapes import PolicyShapes
from fibottention.tasks.robot.unet import ConditionalUNet1d
from fibottention.tasks.timm_model import check_timm_name

__all__ = ["DiffusionPolicy", "build_policy"]

_FIRST_SIDE = 6  # of the decoder's smallest picture


class DiffusionPolicy(nn.Module):
    """Diffusion Policy (arXiv 2303.04137) with one vision transformer per camera and Crossway's decoder (2307.01849).

    Args:
        encoders: By camera, images ``(B, 3, S, S)`` to features ``(B, C)``.
        shapes: What the policy sees and does.
        image_side: Side of the images that the encoders take.
        config: Sizes of the U-Net and of the decoder, noise.
    """

    def __init__(
        self, encoders: Mapping[str, nn.Module], shapes: PolicyShapes, image_side: int, config: RobotConfig
    ) -> None:
        super().__init__()
        data, model, diffusion = config.data, config.model, config.diffusion
        self.shapes, self.diffusion = shapes, diffusion
        self.horizon, self.observation_steps, self.action_steps = (
            data.horizon,
            data.observation_steps,
            data.action_steps,
        )
        self.crop = data.crop
        self.normalizer = Normalizer(
            {**dict.fromkeys(shapes.cameras, 3), **shapes.states, "action": shapes.learned_action_dim}
        )
        self.encoders = nn.ModuleDict(encoders)
        widths: list[Any] = [encoder.num_features for encoder in encoders.values()]
        features = sum(widths) + sum(shapes.states.values())
        self.unet = ConditionalUNet1d(
            shapes.learned_action_dim,
            features * self.observation_steps,
            model.down_dims,
            model.kernel_size,
            model.step_embedding,
            model.groups,
        )
        self.noise = _scheduler("ddpm", diffusion.train_steps)
        self.decoder: ObservationDecoder | None = None
        if diffusion.reconstruction_weight:
            middle = model.down_dims[-1] * data.horizon // 2 ** (len(model.down_dims) - 1)
            self.decoder = ObservationDecoder(
                middle,
                list(shapes.cameras),
                image_side,
                shapes.states,
                self.observation_steps,
                diffusion.reconstruction_channels,
            )

    def scaled(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Images ``(B, T, 3, S, S)`` of uint8 and vectors ``(B, T, n)``, as the network sees them."""
        images = {name: self.normalizer.normalize_images(name, observation[name]) for name in self.shapes.cameras}
        return images | {
            name: self.normalizer.normalize(name, observation[name].float()) for name in self.shapes.states
        }

    def encode(self, scaled: Mapping[str, Tensor]) -> Tensor:
        """The vector ``(B, features)`` that describes a scaled observation."""
        parts = []
        for name in self.shapes.cameras:
            images = scaled[name]
            parts.append(self.encoders[name](images.flatten(0, 1)).unflatten(0, images.shape[:2]))
        parts += [scaled[name] for name in self.shapes.states]
        return torch.cat(parts, dim=-1).flatten(1)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses of a batch of windows: of the noise, and of the reconstruction."""
        scaled = self.scaled(batch)
        actions = self.normalizer.normalize("action", self.shapes.learned_actions(batch["action"].float()))
        condition = self.encode(scaled)
        repeats, count = self.diffusion.samples_per_window, len(actions)
        actions, condition = actions.repeat(repeats, 1, 1), condition.repeat(repeats, 1)
        noise = torch.randn_like(actions)
        steps = torch.randint(0, self.diffusion.train_steps, (len(actions),), device=actions.device)
        predicted, middle = self.unet(self.noise.add_noise(actions, noise, steps), steps, condition)  # pyright: ignore
        loss = F.mse_loss(predicted, noise)
        if self.decoder is None:
            return loss, torch.zeros_like(loss)
        rebuilt = self.decoder(middle[:count])
        return loss, torch.stack([F.mse_loss(rebuilt[name], scaled[name]) for name in rebuilt]).sum()

    @torch.no_grad()
    def predict(
        self,
        observation: Mapping[str, Tensor],
        generators: Sequence[torch.Generator],
        *,
        sampler: str | None = None,
        steps: int | None = None,
    ) -> Tensor:
        """A sequence of actions for each observation.

        Args:
            observation: Images ``(B, observation_steps, 3, S, S)`` of uint8, vectors ``(B, observation_steps, n)``.
            generators: Sources of the noise, one per observation.
            sampler: ``"ddpm"`` or ``"ddim"``; as configured if None.
            steps: Diffusion steps; as configured if None.

        Returns:
            Actions of the robot ``(B, horizon, action_dim)``, of which the first belongs to the first observed step.
        """
        scheduler = _scheduler(sampler or self.diffusion.sampler, self.diffusion.train_steps)
        scheduler.set_timesteps(steps or self.diffusion.inference_steps)
        condition = self.encode(self.scaled(observation))
        shape = (self.horizon, self.shapes.learned_action_dim)
        actions = torch.stack([torch.randn(shape, generator=g, device=g.device) for g in generators]).to(
            condition.device
        )
        for step in scheduler.timesteps:
            predicted, _ = self.unet(actions, step.expand(len(actions)).to(actions.device), condition)
            generator = list(generators) if isinstance(scheduler, DDPMScheduler) else None
            actions = scheduler.step(predicted, step, actions, generator=generator).prev_sample  # pyright: ignore
        return self.shapes.robot_actions(self.normalizer.restore("action", actions))


def _scheduler(sampler: str, train_steps: int) -> DDPMScheduler | DDIMScheduler:
    options = {
        "num_train_timesteps": train_steps,
        "beta_schedule": "squaredcos_cap_v2",
        "prediction_type": "epsilon",
        "clip_sample": True,
        "timestep_spacing": "trailing",  # begins at the last step, whatever the number of steps
    }
    if sampler == "ddpm":
        return DDPMScheduler(variance_type="fixed_small", **options)
    return DDIMScheduler(set_alpha_to_one=True, steps_offset=0, **options)


class ObservationDecoder(nn.Module):
    """Rebuilds images and vectors of an observation from the U-Net's features.

    Args:
        features: Numbers of the features.
        cameras: Names of the images.
        side: Side of the images.
        states: Length of each vector by name.
        steps: Observed steps.
        channels: Channels of the levels; the side doubles from each to the next, and to the image.
    """

    def __init__(
        self,
        features: int,
        cameras: Sequence[str],
        side: int,
        states: Mapping[str, int],
        steps: int,
        channels: Sequence[int],
    ) -> None:
        super().__init__()
        self.side, self.steps, self.states = side, steps, dict(states)
        hidden = channels[0]
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.Mish())
        self.images = nn.ModuleDict(
            {
                camera: nn.Sequential(
                    nn.Linear(hidden, steps * channels[0] * _FIRST_SIDE**2),
                    nn.Unflatten(1, (steps * channels[0], _FIRST_SIDE, _FIRST_SIDE)),
                )
                for camera in cameras
            }
        )
        self.pictures = nn.ModuleDict({camera: _picture_decoder(channels) for camera in cameras})
        self.vectors = nn.Linear(hidden, steps * sum(states.values())) if states else None

    def forward(self, middle: Tensor) -> dict[str, Tensor]:
        """Images ``(B, steps, 3, S, S)`` and vectors ``(B, steps, n)`` from features ``(B, C, T)``."""
        hidden = self.trunk(middle)
        rebuilt = {}
        for camera, first in self.images.items():
            small = first(hidden).unflatten(1, (self.steps, -1)).flatten(0, 1)
            picture = self.pictures[camera](small).float()  # what follows knows no bfloat16 on the CPU
            picture = F.interpolate(picture, size=self.side, mode="bilinear", antialias=True)
            rebuilt[camera] = picture.unflatten(0, (len(middle), self.steps))
        if self.vectors is not None:
            vectors = self.vectors(hidden).unflatten(1, (self.steps, -1)).split(list(self.states.values()), dim=-1)
            rebuilt |= dict(zip(self.states, vectors, strict=True))
        return rebuilt


def _picture_decoder(channels: Sequence[int]) -> nn.Sequential:
    levels: list[nn.Module] = []
    for inputs, outputs in zip(channels, [*channels[1:], 3], strict=True):
        levels += [nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, padding=1), nn.Mish()]
    return nn.Sequential(*levels[:-1])


@torch.no_grad()
def _begin_with_sines(encoder: VisionTransformer) -> None:
    grid, width = encoder.patch_embed.grid_size, encoder.embed_dim
    if encoder.pos_embed is None or width % 4:
        raise UserError("model.position=sincos needs an encoder with a position embedding of a multiple of 4 numbers")
    encoder.pos_embed[:, -grid[0] * grid[1] :] = build_sincos2d_pos_embed(list(grid), dim=width).flatten(0, -2)


def build_policy(config: RobotConfig, shapes: PolicyShapes) -> tuple[DiffusionPolicy, SparsifyReport | None]:
    """The policy of a configuration, with the attention spec in its encoders, and what that did.

    Raises:
        UserError: If the encoder is unknown, cannot be made so, or cannot take the spec.
    """
    name, options, spec = config.model.name, config.model.options, attention_spec(config.attention)
    check_timm_name(name, "*vit*")
    for reserved in ("img_size", "num_classes", "in_chans", "global_pool", "fc_norm"):
        if reserved in options:
            raise UserError(f"model.options must not hold {reserved}, which follows from what the policy sees")
    sides = {config.data.crop or size for sizes in shapes.cameras.values() for size in sizes}
    if len(sides) > 1:
        raise UserError(f"the images must be square and of one size, or data.crop be given, got {shapes.cameras}")
    side, encoders, reports = sides.pop(), {}, []
    for camera, size in shapes.cameras.items():
        if min(size) < side:
            raise UserError(f"data.crop={side} is larger than the images of {camera}, {size[0]} x {size[1]}")
        try:
            encoder = timm.create_model(
                name,
                pretrained=config.model.pretrained,
                img_size=side,
                num_classes=0,
                global_pool="avg",
                fc_norm=False,  # the mean of the patch tokens after the norm, not the norm of their mean
                **options,
            )
        except Exception as error:  # whatever the model's constructor makes of its arguments
            raise UserError(f"the encoder {name} cannot be made: {' '.join(str(error).split())}") from error
        if not isinstance(encoder, VisionTransformer):
            raise UserError(f"model.name={name} must be a vision transformer of timm, got a {type(encoder).__name__}")
        if config.model.position == "sincos":
            _begin_with_sines(encoder)
        if spec is not None:
            try:
                reports.append(sparsify(encoder, spec))
            except ValueError as error:
                raise UserError(f"attention {spec.name} in {name}: {error}") from error
        encoders[camera] = encoder
    report = None
    if reports:
        layers = [
            replace(layer, path=f"{camera}.{layer.path}")
            for camera, one in zip(encoders, reports, strict=True)
            for layer in one.layers
        ]
        report = replace(reports[0], layers=tuple(layers))
    return DiffusionPolicy(encoders, shapes, side, config), report
