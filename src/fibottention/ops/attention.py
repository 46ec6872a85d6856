"""The public function `sparse_attention`, and the choice of its backend."""

import functools
import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor

from fibottention.ops import cpu, gather, reference, sdpa, triton
from fibottention.ops.arguments import AttentionCall, WeightTransform, check_arguments
from fibottention.ops.eager import cast_for_autocast
from fibottention.ops.kernel import missing
from fibottention.patterns.pattern import Pattern

__all__ = ["Backend", "BackendChoice", "Fill", "explain_backend", "sparse_attention"]

Backend = Literal["auto", "reference", "gather", "sdpa", "cpu", "triton"]
Fill = Literal["-inf", "zero"]

_BACKENDS: dict[str, Callable[[AttentionCall], tuple[Tensor, Tensor | None]]] = {
    "reference": reference.attention,
    "gather": gather.attention,
    "sdpa": sdpa.attention,
    "cpu": cpu.attention,
    "triton": triton.attention,
}

_UNSUPPORTED: dict[str, Callable[[AttentionCall], str | None]] = {
    "sdpa": sdpa.unsupported,
    "cpu": cpu.unsupported,
    "triton": triton.unsupported,
}

# Entries of a mask above which `auto` does not make one, whatever the density.
_LARGEST_MASK = 2**28

# Density above which `sdpa` under a mask is faster than the CPU kernel, in both passes together; see
# benchmarks/results/crossover.md.
_KERNEL_CROSSOVER = 0.6


def _gather_crossover(head_dim: int) -> float:
    """Density above which `sdpa` is faster than `gather`, between the cross-over forward and that of both passes.

    A fit to measurements on two CPU cores (3 % at head_dim 64, 5 % at 16), so a rough guide elsewhere.
    """
    return 0.0225 + 0.48 / head_dim


class BackendChoice(NamedTuple):
    """A backend and the reason it was chosen."""

    backend: str
    reason: str


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    fill: Fill = "-inf",
    transform: WeightTransform | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[False] = False,
    backend: Backend = "auto",
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    fill: Fill = "-inf",
    transform: WeightTransform | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[True],
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    fill: Fill = "-inf",
    transform: WeightTransform | None = None,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over just the query-key pairs that a pattern keeps.

    Shapes follow ``torch.nn.functional.scaled_dot_product_attention``; N counts prefix tokens too. Differentiable in
    q, k, v and bias. Under autocast the inputs are cast to the autocast dtype, as that function does. A query that
    keeps no key gives zeros.

    Args:
        q: Queries ``(B, H, N, D)``; float64, float32, bfloat16 or float16.
        k: Keys ``(B, H, N, D)``.
        v: Values ``(B, H, N, Dv)``.
        pattern: Which pairs are kept.
        bias: Added to the scaled scores, ``(B, H, N, N)``; batch and heads may be 1. A batch that divides B is
            repeated along it (the shift masks of Swin windows). Or one number per kept pair, ``(B, G, pairs)`` in the
            order of `Pattern.pairs`, G as for the returned weights, where batch and G may be 1. Or, for a pattern with
            a relation, the table ``(H, buckets)`` of a relative bias.
        scale: Factor of the scores; ``D ** -0.5`` if None.
        fill: What a pair outside the pattern gets: ``"-inf"`` weight 0, the paper's intent; ``"zero"`` logit 0, as in
            the released Fibottention code.
        transform: Maps the kept weights row by row, ``(..., keys) -> (..., keys)``; zeros must stay zeros. `Twist`
            is one that the kernel of ``"cpu"`` has built in.
        dropout_p: Dropout probability of the weights. Pass 0 in evaluation.
        return_weights: Also return the kept weights, after transform and dropout.
        backend: ``"cpu"`` (compiled kernel over the kept pairs), ``"triton"`` (the same on a GPU), ``"gather"`` (plain
            PyTorch over the kept pairs, any device), ``"sdpa"`` (fused dense attention under a mask), ``"reference"``
            (dense, float32 or better), or ``"auto"``; `explain_backend` tells which one that is and why.

    Returns:
        The output ``(B, H, N, Dv)`` in the dtype of q, or the output and the weights ``(B, G, pairs)`` in the order
        of `Pattern.pairs` (G = H for a pattern that is the same in all heads, else 1).

    Raises:
        ValueError: If shapes, dtypes or options do not fit together, or the named backend cannot serve the call.
        TypeError: If a dtype or the pattern's type is not supported.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    q, k, v = cast_for_autocast(q, k, v)
    check_arguments(q, k, v, pattern, bias, fill, transform, dropout_p, scale)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    call = AttentionCall(q, k, v, pattern, bias, scale, fill == "zero", transform, dropout_p, return_weights)
    out, weights = _BACKENDS[_choose(call, backend).backend](call)
    return out if weights is None else (out, weights)


def explain_backend(
    q: Tensor,
    pattern: Pattern,
    *,
    fill: Fill = "-inf",
    transform: WeightTransform | None = None,
    dropout_p: float = 0.0,
    return_weights: bool = False,
) -> BackendChoice:
    """The backend that ``backend="auto"`` would take for such a call of `sparse_attention`, and why.

    Args:
        q: The queries ``(B, H, N, D)``.
        pattern: Which pairs are kept.
        fill: As in `sparse_attention`.
        transform: As in `sparse_attention`.
        dropout_p: As in `sparse_attention`.
        return_weights: As in `sparse_attention`.
    """
    call = AttentionCall(q, q, q, pattern, None, 1.0, fill == "zero", transform, dropout_p, return_weights)
    return _choose(call, "auto")


def _choose(call: AttentionCall, backend: str) -> BackendChoice:
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend in _UNSUPPORTED and (lacking := _UNSUPPORTED[backend](call)):
        raise ValueError(f"backend {backend!r} cannot serve this call: {lacking}; use 'gather' or 'auto'")
    if torch.onnx.is_in_onnx_export():
        if backend not in ("auto", "gather"):
            raise ValueError(f"backend {backend!r} cannot be exported to ONNX; use 'gather' or 'auto'")
        return BackendChoice("gather", "ONNX knows no other form")
    if backend != "auto":
        return BackendChoice(backend, "asked for by name")
    density, no_sdpa = call.pattern.density(), sdpa.unsupported(call)
    sparse, crossover = _sparse_backend(call)
    if density < crossover:
        return BackendChoice(sparse, f"density {density:.2%} is below the cross-over {crossover:.2%}")
    length = call.pattern.sequence_length
    if not call.pattern.is_dense and call.pattern.stored_heads * length**2 > _LARGEST_MASK:
        return BackendChoice(sparse, f"a mask of {length} tokens would be too large")
    if no_sdpa is None:
        return BackendChoice("sdpa", f"density {density:.2%} is at or above the cross-over {crossover:.2%}")
    if sparse != "gather":
        return BackendChoice(sparse, f"density {density:.2%} is high, but sdpa is ruled out: {no_sdpa}")
    return BackendChoice("reference", f"density {density:.2%} is high, but sdpa is ruled out: {no_sdpa}")


def _sparse_backend(call: AttentionCall) -> tuple[str, float]:
    """The best backend for few pairs, and the density from which `sdpa` is faster."""
    if cpu.unsupported(call) is None:
        return "cpu", _KERNEL_CROSSOVER
    if call.q.device.type == "cuda" and triton.unsupported(call) is None:
        return "triton", _gather_crossover(call.q.shape[-1])
    if call.q.device.type == "cpu" and (reason := missing()) is not None:
        _warn_once(f"{reason}; sparse_attention uses the slower backend 'gather' instead")
    return "gather", _gather_crossover(call.q.shape[-1])


@torch.compiler.assume_constant_result
@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)
