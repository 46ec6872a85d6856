"""The checked arguments of one call of sparse attention, shared by the backends."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fibottention.ops.constants import pair_indices, pair_relation
from fibottention.ops.twist import Twist
from fibottention.patterns.pattern import Pattern

__all__ = ["AttentionCall", "WeightTransform", "check_arguments", "table_by_pair"]

WeightTransform = Callable[[Tensor], Tensor]
"""Maps attention weights ``(..., keys)`` row by row; zeros must stay zeros and must not change the other weights."""


@dataclass(frozen=True)
class AttentionCall:
    """What a backend gets: the arguments of `sparse_attention`, with defaults resolved."""

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern
    bias: Tensor | None
    scale: float
    zero_fill: bool
    transform: WeightTransform | None
    dropout_p: float
    return_weights: bool

    def dense_bias(self) -> Tensor | None:
        """The bias as a tensor that broadcasts to ``(B, H, T, T)``."""
        if self.bias is not None and self.bias.ndim == 4:
            return self._over_batch(self.bias)
        pairs = self.pair_bias()
        if pairs is None:
            return None
        head, query, key = pair_indices(self.pattern, pairs.device)
        length, heads = self.pattern.sequence_length, self.pattern.num_heads
        dense = pairs.new_zeros(len(pairs), heads, length, length)
        image = torch.arange(len(pairs), device=pairs.device)[:, None]
        if self.pattern.stored_heads == 1:
            every = torch.arange(heads, device=pairs.device)[:, None]
            return dense.index_put((image[..., None], every, query, key), pairs)
        return dense.index_put((image, head, query, key), pairs[:, 0])

    def pair_bias(self) -> Tensor | None:
        """The bias of each kept pair, ``(1 or B, G, pairs)``."""
        bias = self.kernel_bias()
        if bias is None:
            return None
        return self._over_batch(bias) if bias.ndim == 3 else table_by_pair(bias, self.pattern)

    def kernel_bias(self) -> Tensor | None:
        """The bias by pair ``(images, G, pairs)``, or the table ``(H, buckets)``."""
        if self.bias is None or self.bias.ndim == 2:
            return self.bias
        if self.bias.ndim == 3:
            return self.bias.expand(-1, self.pattern.num_heads // self.pattern.stored_heads, -1)
        return self.pattern_weights(self.bias)

    def _over_batch(self, bias: Tensor) -> Tensor:
        """Repeat a bias of a few images over the batch."""
        batch = self.q.shape[0]
        if bias.shape[0] in (1, batch):
            return bias
        return bias.repeat(batch // bias.shape[0], *[1] * (bias.ndim - 1))

    def dropout(self, weights: Tensor) -> Tensor:
        """Apply dropout to the weights, if there is any."""
        return F.dropout(weights, self.dropout_p) if self.dropout_p else weights

    def pattern_weights(self, dense: Tensor) -> Tensor:
        """Values of a dense ``(B, H, T, T)`` tensor at the kept pairs, ``(B, G, pairs)``."""
        head, query, key = pair_indices(self.pattern, dense.device)
        dense = dense.expand(-1, self.pattern.num_heads, -1, -1)
        if self.pattern.stored_heads == 1:
            return dense[:, :, query, key]
        return dense[:, head, query, key].unsqueeze(1)


def table_by_pair(table: Tensor, pattern: Pattern) -> Tensor:
    """The entries of a table ``(H, buckets)`` of relative biases for each kept pair, ``(1, G, pairs)``."""
    with_zero = torch.cat([table, table.new_zeros(table.shape[0], 1)], 1)
    bucket = pair_relation(pattern, table.device)
    if pattern.stored_heads == 1:
        return with_zero[:, bucket].unsqueeze(0)
    head, _, _ = pair_indices(pattern, table.device)
    return with_zero[head, bucket][None, None]


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    bias: Tensor | None,
    fill: str,
    transform: WeightTransform | None,
    dropout_p: float,
    scale: float | None,
) -> None:
    """Raise ValueError or TypeError with one sentence for arguments that do not fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be of shape (B, H, N, D), got {tuple(tensor.shape)}")
        if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ValueError(
                f"{name} must have the dtype and device of q ({q.dtype}, {q.device}), "
                f"got {tensor.dtype}, {tensor.device}"
            )
        if not tensor.shape[3]:
            raise ValueError(f"{name} must have at least one channel (head_dim), got shape {tuple(tensor.shape)}")
    for name, number in (("scale", scale), ("dropout_p", dropout_p)):
        if isinstance(number, Tensor):
            raise TypeError(f"{name} must be a number, got a tensor; multiply q by a scale that is learned")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v must have the batch, heads and tokens of q {tuple(q.shape[:3])}, got {tuple(v.shape[:3])}")
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a fibottention.Pattern, got {type(pattern).__name__}")
    if q.shape[1] != pattern.num_heads:
        raise ValueError(f"pattern has {pattern.num_heads} heads, but q has {q.shape[1]}")
    if q.shape[2] != pattern.sequence_length:
        raise ValueError(
            f"pattern has {pattern.sequence_length} tokens ({pattern.prefix_tokens} prefix + {pattern.num_tokens}), "
            f"but q has {q.shape[2]}"
        )
    if fill not in ("-inf", "zero"):
        raise ValueError(f"fill must be '-inf' or 'zero', got {fill!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if fill == "zero" and (transform is not None or dropout_p):
        raise ValueError("fill='zero' gives weight to pairs that are not stored: transform and dropout_p need '-inf'")
    placed = {"bias": bias, "the scale of transform": transform.scale if isinstance(transform, Twist) else None}
    for name, tensor in placed.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {tensor.device}")
    if bias is not None and not bias.is_floating_point():
        raise ValueError(
            f"bias must be of a floating dtype, since it is added to the scores, got {bias.dtype}; a mask is a bias of "
            "0 and -inf, or part of the pattern (Pattern.from_mask)"
        )
    if bias is not None and bias.ndim == 2:
        if pattern.relation is None:
            raise ValueError("bias is a table (H, buckets), but the pattern has no relation; see Pattern.with_relation")
        if tuple(bias.shape) != (pattern.num_heads, pattern.num_buckets):
            raise ValueError(
                f"bias must be of shape (H, buckets) = {(pattern.num_heads, pattern.num_buckets)}, "
                f"got {tuple(bias.shape)}"
            )
    elif bias is not None and bias.ndim == 3:
        groups = pattern.num_heads // pattern.stored_heads
        if bias.shape[1] not in (1, groups) or bias.shape[2] != pattern.stored_pairs:
            raise ValueError(
                f"bias must be of shape (1 or B, 1 or {groups}, pairs={pattern.stored_pairs}), got {tuple(bias.shape)}"
            )
        _check_batch(bias, q)
    elif bias is not None:
        wanted = (q.shape[0], q.shape[1], q.shape[2], q.shape[2])
        if bias.ndim != 4 or bias.shape[1] not in (1, wanted[1]) or tuple(bias.shape[2:]) != wanted[2:]:
            raise ValueError(f"bias must be of shape (1 or B, 1 or H, N, N) for {wanted}, got {tuple(bias.shape)}")
        _check_batch(bias, q)


def _check_batch(bias: Tensor, q: Tensor) -> None:
    if bias.shape[0] != q.shape[0] and (not bias.shape[0] or q.shape[0] % bias.shape[0]):
        raise ValueError(f"the batch of bias must divide the batch of q ({q.shape[0]}), got {bias.shape[0]}")
