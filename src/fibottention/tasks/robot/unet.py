"""Diffusion Policy's conditional U-Net over a sequence of actions (arXiv 2303.04137)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["ConditionalUNet1d"]


class ConditionalUNet1d(nn.Module):
    """Predicts the noise in a sequence of actions, told of the observation by FiLM in every block.

    Args:
        action_dim: Numbers in an action.
        condition_dim: Length of the vector that describes the observation.
        down_dims: Channels of each level; each but the last halves the sequence.
        kernel_size: Of the convolutions, odd.
        step_embedding_dim: Length of the embedding of the diffusion step.
        groups: Groups of the group norms.
    """

    def __init__(
        self,
        action_dim: int,
        condition_dim: int,
        down_dims: Sequence[int] = (512, 1024, 2048),
        kernel_size: int = 5,
        step_embedding_dim: int = 128,
        groups: int = 8,
    ) -> None:
        super().__init__()
        self.step_encoder = nn.Sequential(
            _SinusoidalEmbedding(step_embedding_dim),
            nn.Linear(step_embedding_dim, 4 * step_embedding_dim),
            nn.Mish(),
            nn.Linear(4 * step_embedding_dim, step_embedding_dim),
        )

        def block(inputs: int, outputs: int) -> _ConditionalBlock:
            return _ConditionalBlock(inputs, outputs, condition_dim + step_embedding_dim, kernel_size, groups)

        levels = list(zip([action_dim, *down_dims[:-1]], down_dims, strict=True))
        self.down = nn.ModuleList(
            nn.ModuleList(
                [
                    block(inputs, outputs),
                    block(outputs, outputs),
                    nn.Conv1d(outputs, outputs, 3, 2, 1) if level < len(levels) - 1 else nn.Identity(),
                ]
            )
            for level, (inputs, outputs) in enumerate(levels)
        )
        self.middle = nn.ModuleList([block(down_dims[-1], down_dims[-1]) for _ in range(2)])
        self.up = nn.ModuleList(
            nn.ModuleList(
                [block(2 * outputs, inputs), block(inputs, inputs), nn.ConvTranspose1d(inputs, inputs, 4, 2, 1)]
            )
            for inputs, outputs in reversed(levels[1:])
        )
        self.final = nn.Sequential(
            *_convolution(down_dims[0], down_dims[0], kernel_size, groups), nn.Conv1d(down_dims[0], action_dim, 1)
        )

    def forward(self, actions: Tensor, steps: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the noise.

        Args:
            actions: Noisy actions ``(B, T, action_dim)``; T must be a multiple of 2 to the number of halvings.
            steps: Diffusion step of each ``(B,)``.
            condition: ``(B, condition_dim)``.

        Returns:
            The noise ``(B, T, action_dim)``, and the features in the middle ``(B, down_dims[-1], T / 2^halvings)``.
        """
        told = torch.cat([self.step_encoder(steps), condition], dim=-1)
        x = actions.transpose(1, 2)
        skipped = []
        for first, second, shorten in self.down:  # pyright: ignore[reportGeneralTypeIssues]
            x = second(first(x, told), told)
            skipped.append(x)
            x = shorten(x)
        for block in self.middle:
            x = block(x, told)
        middle = x
        for first, second, lengthen in self.up:  # pyright: ignore[reportGeneralTypeIssues]
            x = torch.cat([x, skipped.pop()], dim=1)
            x = lengthen(second(first(x, told), told))
        return self.final(x).transpose(1, 2), middle


class _SinusoidalEmbedding(nn.Module):
    """Sines and cosines of a diffusion step."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        frequencies = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, steps: Tensor) -> Tensor:
        """``(B,)`` to ``(B, dim)``."""
        angles = steps[:, None] * self.get_buffer("frequencies")
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _convolution(inputs: int, outputs: int, kernel_size: int, groups: int) -> list[nn.Module]:
    return [
        nn.Conv1d(inputs, outputs, kernel_size, padding=kernel_size // 2),
        nn.GroupNorm(groups, outputs),
        nn.Mish(),
    ]


class _ConditionalBlock(nn.Module):
    """Two convolutions with a residual; the condition scales and shifts what is between them (FiLM)."""

    def __init__(self, inputs: int, outputs: int, condition_dim: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_convolution(inputs, outputs, kernel_size, groups))
        self.second = nn.Sequential(*_convolution(outputs, outputs, kernel_size, groups))
        self.film = nn.Sequential(nn.Mish(), nn.Linear(condition_dim, 2 * outputs))
        self.residual = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """``(B, inputs, T)`` to ``(B, outputs, T)``."""
        scale, shift = self.film(condition)[..., None].chunk(2, dim=1)
        return self.second(scale * self.first(x) + shift) + self.residual(x)
