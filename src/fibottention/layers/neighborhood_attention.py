"""Neighborhood attention layers with natten's arguments and parameter names."""

from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fibottention.ops.eager import static_size
from fibottention.ops.neighborhood import NeighborhoodBackend, neighborhood_attention
from fibottention.patterns.neighborhood import flag_per_axis, per_axis

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class _NeighborhoodAttention(nn.Module):
    """What the layers for one, two and three axes share."""

    axes: ClassVar[int]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
        *,
        rel_pos_bias: bool = False,
        attn_drop: float = 0.0,
        backend: NeighborhoodBackend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.kernel_size = per_axis("kernel_size", kernel_size, self.axes)
        self.stride = per_axis("stride", stride, self.axes)
        self.dilation = per_axis("dilation", dilation, self.axes)
        self.is_causal = flag_per_axis("is_causal", is_causal, self.axes)
        if rel_pos_bias and set(self.stride) != {1}:
            raise ValueError(f"rel_pos_bias=True needs stride=1, got {stride}")
        if not 0.0 <= attn_drop < 1.0:
            raise ValueError(f"attn_drop must be in [0, 1), got {attn_drop}")
        if backend not in get_args(NeighborhoodBackend):
            raise ValueError(f"backend must be one of {', '.join(get_args(NeighborhoodBackend))}, got {backend!r}")
        self.backend: NeighborhoodBackend = backend
        self.qkv = nn.Linear(embed_dim, embed_dim * 3, bias=qkv_bias, **factory)
        self.rpb: nn.Parameter | None = None
        if rel_pos_bias:
            shape = (num_heads, *(2 * kernel - 1 for kernel in self.kernel_size))
            self.rpb = nn.Parameter(nn.init.trunc_normal_(torch.empty(shape, **factory), std=0.02))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within the neighborhoods of a grid of tokens.

        Args:
            x: Tokens ``(B, *grid, embed_dim)``. A grid smaller than ``kernel_size * dilation`` is padded with zeros at
                the end of the axis, before the projection, and cropped again.

        Returns:
            Tokens ``(B, *grid, embed_dim)``.
        """
        if x.ndim != self.axes + 2:
            raise ValueError(f"x must have {self.axes + 2} axes, (B, *grid, embed_dim), got shape {tuple(x.shape)}")
        if x.shape[-1] != self.embed_dim:
            raise ValueError(f"x must have embed_dim={self.embed_dim} channels in its last axis, got {x.shape[-1]}")
        grid = tuple(map(static_size, x.shape[1:-1]))
        missing = [max(0, k * d - n) for n, k, d in zip(grid, self.kernel_size, self.dilation, strict=True)]
        if any(missing):
            x = F.pad(x, (0, 0, *(amount for axis in reversed(missing) for amount in (0, axis))))
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.unbind(-3)
        out, _ = neighborhood_attention(
            self.axes,
            q,
            k,
            v,
            self.kernel_size,
            self.stride,
            self.dilation,
            self.is_causal,
            self.scale,
            self.rpb,
            backend=self.backend,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        out = out.flatten(-2)
        if any(missing):
            out = out[(slice(None), *(slice(n) for n in grid))]
        return self.proj_drop(self.proj(out))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, dilation={self.dilation}, is_causal={self.is_causal}, "
            f"rel_pos_bias={self.rpb is not None}"
        )


class NeighborhoodAttention1D(_NeighborhoodAttention):
    """Neighborhood attention on sequences ``(B, N, embed_dim)``; arguments as for `NeighborhoodAttention2D`."""

    axes = 1


class NeighborhoodAttention2D(_NeighborhoodAttention):
    """Neighborhood attention on images ``(B, H, W, embed_dim)``, dilated with ``dilation`` above 1.

    Parameter names, argument order and positions are natten's (0.21). Inputs smaller than ``kernel_size * dilation``
    are padded as by natten up to 0.15, which the published NAT and DiNAT checkpoints rely on: the padding is not
    masked, its keys and values are the biases of the projection. Sources: arXiv 2204.07143 and arXiv 2209.15001.

    Args:
        embed_dim: Size of the token embeddings.
        num_heads: Number of heads.
        kernel_size: Keys along each axis, one number or one per axis (so for the next three, too).
        stride: Number of successive queries that share one window.
        dilation: Step between keys.
        is_causal: Whether no key after the query is seen along an axis.
        qkv_bias: Whether the qkv projection has a bias.
        qk_scale: Factor of the scores; ``head_dim ** -0.5`` if None.
        proj_drop: Dropout probability after the output projection.
        rel_pos_bias: Learn a table ``rpb`` of relative biases, ``(num_heads, 2 * kernel_size - 1, ...)``.
        attn_drop: Dropout probability of the attention weights.
        backend: As in `fibottention.na2d`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: If ``embed_dim`` is not divisible by ``num_heads``, ``rel_pos_bias`` is set with a stride, or a
            number is out of range.
    """

    axes = 2


class NeighborhoodAttention3D(_NeighborhoodAttention):
    """Neighborhood attention on volumes ``(B, D, H, W, embed_dim)``; arguments as for `NeighborhoodAttention2D`."""

    axes = 3
