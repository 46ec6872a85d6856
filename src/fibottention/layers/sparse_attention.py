"""Multi-head self-attention with a spec, interchangeable with timm's ``Attention``."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fibottention.layers.pattern_attention import PatternAttention
from fibottention.ops.attention import Backend
from fibottention.specs import AttentionSpec, Fibottention

__all__ = ["SparseAttention", "additive_mask", "attention_layer", "split_qkv"]


class SparseAttention(nn.Module):
    """Multi-head self-attention over the pairs that a spec keeps: a drop-in for ``timm.layers.Attention``.

    Same arguments, parameters and state-dict keys; three arguments more. For ``attn_layer=`` of timm's models use
    `attention_layer`, which also numbers the layers.

    Args:
        dim: Size of the token embeddings.
        num_heads: Number of heads.
        attn_head_dim: Size of one head; ``dim // num_heads`` if None.
        dim_out: Size of the output; ``dim`` if None.
        qkv_bias: Whether the qkv projection has a bias.
        qk_norm: Whether to normalize queries and keys.
        scale_norm: Whether to normalize the output before the projection.
        proj_bias: Whether the output projection has a bias.
        gated: Whether to gate the output elementwise.
        attn_drop: Dropout probability of the attention weights.
        proj_drop: Dropout probability after the output projection.
        norm_layer: Normalization layer for ``qk_norm`` and ``scale_norm``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        spec: How to attend.
        prefix_tokens: Number of prefix tokens at the start of the sequence.
        layer: Index of the layer in its model, from 0.
        backend: As in `fibottention.sparse_attention`.
        sequence_length: Number of tokens, prefix tokens included, for specs that learn something of that length.

    Raises:
        ValueError: If ``dim`` is not divisible by ``num_heads``, or a norm is asked for without ``norm_layer``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: AttentionSpec | None = None,
        prefix_tokens: int = 1,
        layer: int = 0,
        backend: Backend = "auto",
        sequence_length: int | None = None,
    ) -> None:
        super().__init__()
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads, got dim={dim} and num_heads={num_heads}")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("norm_layer must be given with qk_norm or scale_norm, got None")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.attn_dim = num_heads * self.head_dim
        self.scale = self.head_dim**-0.5

        def norm(size: int, wanted: bool) -> nn.Module:
            return norm_layer(size, **factory) if wanted and norm_layer is not None else nn.Identity()

        self.qkv = nn.Linear(dim, self.attn_dim * 3, bias=qkv_bias, **factory)
        self.q_norm = norm(self.head_dim, qk_norm)
        self.k_norm = norm(self.head_dim, qk_norm)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm(self.attn_dim, scale_norm)
        self.gate = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **factory) if gated else None
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)
        self.sparse = PatternAttention(
            spec or Fibottention(),
            num_heads,
            prefix_tokens=prefix_tokens,
            layer=layer,
            backend=backend,
            head_dim=self.head_dim,
            sequence_length=sequence_length,
            **factory,
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend within each sequence of ``x``.

        Args:
            x: Tokens ``(B, N, dim)``.
            attn_mask: Boolean (True keeps) or additive mask, broadcastable to ``(B, H, N, N)``, on top of the pattern.
            is_causal: Not supported; use a pattern.

        Returns:
            Tokens ``(B, N, dim_out)``.
        """
        if is_causal:
            raise ValueError("is_causal=True is not supported by SparseAttention; use a pattern with offsets <= 0")
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None if attn_mask is None else additive_mask(attn_mask, q)
        dropout_p = self.attn_drop.p if self.training else 0.0
        x = self.sparse(q, k, v, bias=bias, scale=self.scale, dropout_p=dropout_p)
        x = self.norm(x.transpose(1, 2).flatten(2))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))


def split_qkv(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views ``(B, H, N, D)`` of a fused projection ``(B, N, 3 * H * D)``."""
    batch, length, _ = qkv.shape
    q, k, v = qkv.reshape(batch, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def additive_mask(mask: Tensor, q: Tensor) -> Tensor:
    """A boolean or additive mask as a four-dimensional bias in the dtype of the queries."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    length = q.shape[2]
    return mask.expand(-1, -1, length, length)


def attention_layer(
    spec: AttentionSpec, *, prefix_tokens: int = 1, backend: Backend = "auto", sequence_length: int | None = None
) -> type[SparseAttention]:
    """A class for the ``attn_layer=`` argument of timm's models; use a new one for each model.

    Args:
        spec: How to attend.
        prefix_tokens: Number of prefix tokens of the model (1 for a CLS token).
        backend: As in `fibottention.sparse_attention`.
        sequence_length: Number of tokens, prefix tokens included, for specs that learn something of that length.

    Returns:
        A subclass of `SparseAttention` that numbers its instances 0, 1, ... as layers of the model.
    """
    layers = itertools.count()

    class SpecAttention(SparseAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(
                *args,
                **kwargs,
                spec=spec,
                prefix_tokens=prefix_tokens,
                layer=next(layers),
                backend=backend,
                sequence_length=sequence_length,
            )

    return SpecAttention
