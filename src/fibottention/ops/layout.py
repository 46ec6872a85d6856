"""Dtypes and memory layouts that the backends share."""

import torch
from torch import Tensor

from fibottention.patterns.pattern import Pattern

__all__ = ["contiguous_rows", "new_gradient", "new_heads", "new_pairs", "sum_dtype"]


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def contiguous_rows(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of it, with a contiguous last axis."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def new_heads(x: Tensor, dim: int) -> Tensor:
    """An uninitialized ``(B, H, T, dim)`` tensor, in memory ``(B, T, H, dim)`` like that of PyTorch's attention."""
    batch, heads, length, _ = x.shape
    return x.new_empty((batch, length, heads, dim)).transpose(1, 2)


def new_gradient(x: Tensor) -> Tensor:
    """An uninitialized gradient of q, k or v."""
    return torch.empty_like(x) if x.is_contiguous() else new_heads(x, x.shape[-1])


def new_pairs(x: Tensor, pattern: Pattern) -> Tensor:
    """Uninitialized numbers ``(B, G, pairs)`` in the dtype of sums, one for each kept pair of ``(B, H, T, D)``."""
    groups = pattern.num_heads // pattern.stored_heads
    return x.new_empty((x.shape[0], groups, pattern.stored_pairs), dtype=sum_dtype(x))
