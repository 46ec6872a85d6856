"""Pair operations: the four primitives of sparse attention, over just the kept pairs.

Each is a ``torch.library`` operator with a fake kernel and a derivative, so ``torch.compile``, export and DDP see one
opaque operation. Tensors hold one number per kept pair, ``(B, G, pairs)``, in the order of `Pattern.pairs`: G = H for
a pattern that is the same in all heads, else G = 1 and the pairs run over all heads. The pattern travels as its text
form.

Rows with the same number of keys form one dense block, so nothing is padded; work runs in chunks, so memory is
O(pairs) plus a bounded buffer. Sums over queries run over the transposed pattern: no atomics, hence repeatable.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fibottention.ops.constants import cached_on_device, parse_for_graph
from fibottention.ops.eager import full_precision
from fibottention.ops.layout import new_pairs, sum_dtype
from fibottention.patterns.pattern import Pattern, SparseRows

__all__ = ["pair_dot", "pair_softmax", "pair_sum", "pair_sum_transposed", "row_blocks"]

# Elements of one gathered buffer: small enough for a CPU's caches, large enough to keep a GPU busy.
_CPU_CHUNK_ELEMENTS = 2**20
_GPU_CHUNK_ELEMENTS = 2**26


@dataclass(frozen=True)
class RowBlock:
    """Rows that have the same number of entries, as index tensors.

    Attributes:
        rows: ``(R,)`` row numbers over all stored heads, ``g * T + i``.
        others: ``(R, K)`` the other token of each entry, as a row number.
        pairs: ``(R, K)`` position of each entry in the pair order.
    """

    rows: Tensor
    others: Tensor
    pairs: Tensor


def row_blocks(pattern: Pattern, device: torch.device, transposed: bool = False) -> tuple[RowBlock, ...]:
    """The pattern's rows (or columns) grouped by length, on a device; made once per pattern and device."""

    def make(device: torch.device) -> tuple[RowBlock, ...]:
        compressed = pattern.columns if transposed else pattern.rows
        return tuple(_blocks(compressed, pattern.sequence_length, device))

    return cached_on_device(pattern, "column_blocks" if transposed else "row_blocks", device, make)


def _blocks(compressed: SparseRows, length: int, device: torch.device) -> Iterator[RowBlock]:
    counts = np.diff(compressed.starts)
    for count in np.unique(counts[counts > 0]):
        rows = np.flatnonzero(counts == count)
        entries = compressed.starts[rows][:, None] + np.arange(count)[None]
        others = compressed.indices[entries] + (rows // length * length)[:, None]
        pairs = entries if compressed.pairs is None else compressed.pairs[entries]
        yield RowBlock(*(torch.from_numpy(array).to(device) for array in (rows, others, pairs)))


def _chunks(block: RowBlock, width: int) -> Iterator[RowBlock]:
    elements = _CPU_CHUNK_ELEMENTS if block.rows.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    step = max(1, elements // max(1, width * block.others.shape[1]))
    for start in range(0, len(block.rows), step):
        stop = start + step
        yield RowBlock(block.rows[start:stop], block.others[start:stop], block.pairs[start:stop])


def _flat(x: Tensor, pattern: Pattern) -> Tensor:
    """``(B, H, T, D)`` as ``(B * H / G, G * T, D)`` for G stored heads."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch * heads // pattern.stored_heads, pattern.stored_heads * length, dim)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    taken = x.index_select(1, rows.reshape(-1))
    return taken.view(x.shape[0], *rows.shape, *x.shape[2:])


@torch.library.custom_op("fibottention::pair_dot", mutates_args=())
@full_precision
def pair_dot(a: Tensor, b: Tensor, pattern: str) -> Tensor:
    """Dot product of ``a[query]`` and ``b[key]`` for each kept pair: ``(B, H, T, D)`` twice to ``(B, G, pairs)``.

    Half precision is accumulated and returned in float32.
    """
    known = Pattern.parse(pattern)
    dtype = sum_dtype(a)
    left, right = _flat(a, known), _flat(b, known)
    out = new_pairs(a, known)
    flat = out.view(left.shape[0], known.stored_pairs)
    for block in row_blocks(known, a.device):
        for chunk in _chunks(block, left.shape[0] * a.shape[-1]):
            query = _take(left, chunk.rows).to(dtype)
            key = _take(right, chunk.others).to(dtype)
            dots = torch.matmul(key, query.unsqueeze(-1))
            flat.index_copy_(1, chunk.pairs.reshape(-1), dots.view(left.shape[0], chunk.pairs.numel()))
    return out


@torch.library.custom_op("fibottention::pair_sum", mutates_args=())
@full_precision
def pair_sum(weights: Tensor, x: Tensor, pattern: str) -> Tensor:
    """Sum of ``weights * x[key]`` over the keys of each query: ``(B, G, pairs)`` and ``(B, H, T, D)`` to the latter."""
    return _sum_rows(weights, x, Pattern.parse(pattern), transposed=False)


@torch.library.custom_op("fibottention::pair_sum_transposed", mutates_args=())
@full_precision
def pair_sum_transposed(weights: Tensor, x: Tensor, pattern: str) -> Tensor:
    """Sum of ``weights * x[query]`` over the queries of each key; the transpose of `pair_sum`."""
    return _sum_rows(weights, x, Pattern.parse(pattern), transposed=True)


def _sum_rows(weights: Tensor, x: Tensor, pattern: Pattern, transposed: bool) -> Tensor:
    values = _flat(x, pattern)
    flat_weights = weights.flatten(0, 1)
    out = values.new_zeros(values.shape)
    for block in row_blocks(pattern, x.device, transposed):
        for chunk in _chunks(block, values.shape[0] * x.shape[-1]):
            weight = _take(flat_weights, chunk.pairs)
            summed = torch.matmul(weight.unsqueeze(-2), _take(values, chunk.others).to(weight.dtype)).squeeze(-2)
            out.index_copy_(1, chunk.rows, summed.to(x.dtype))
    return out.view(x.shape)


@torch.library.custom_op("fibottention::pair_softmax", mutates_args=())
def pair_softmax(scores: Tensor, pattern: str, zero_fill: bool) -> tuple[Tensor, Tensor]:
    """Softmax of the scores of each query over its kept keys.

    Args:
        scores: ``(B, G, pairs)`` logits.
        pattern: Text form of the pattern.
        zero_fill: Give the pairs outside the pattern the logit 0 instead of minus infinity.

    Returns:
        The weights ``(B, G, pairs)``, and ``(B, H, T)`` the weight of each pair outside the pattern (0 without
        ``zero_fill``). A row without a finite logit gets zero weights.
    """
    known = Pattern.parse(pattern)
    flat = scores.flatten(0, 1)
    weights = torch.empty_like(flat)
    length = known.sequence_length
    outside = flat.new_full((flat.shape[0], known.stored_heads * length), 1 / length if zero_fill else 0.0)
    for block in row_blocks(known, scores.device):
        logits = _take(flat, block.pairs)
        top = logits.amax(-1, keepdim=True)
        missing = length - block.others.shape[1]
        if zero_fill and missing:
            top = top.clamp(min=0)
        top = torch.where(top.isinf(), torch.zeros_like(top), top)
        exponential = (logits - top).exp()
        total = exponential.sum(-1, keepdim=True)
        if zero_fill and missing:
            rest = (-top).exp()
            total = total + missing * rest
            outside.index_copy_(1, block.rows, (rest / total).squeeze(-1))
        elif zero_fill:
            outside.index_fill_(1, block.rows, 0.0)
        weight = exponential / torch.where(total == 0, torch.ones_like(total), total)
        weights.index_copy_(1, block.pairs.reshape(-1), weight.flatten(1))
    return weights.view(scores.shape), outside.view(scores.shape[0], known.num_heads, length)


@torch.library.custom_op("fibottention::pair_softmax_backward", mutates_args=())
def pair_softmax_backward(
    grad_weights: Tensor, grad_outside: Tensor, weights: Tensor, outside: Tensor, pattern: str, zero_fill: bool
) -> Tensor:
    """Derivative of `pair_softmax` with respect to the scores."""
    known = Pattern.parse(pattern)
    flat_grad, flat_weights = grad_weights.flatten(0, 1), weights.flatten(0, 1)
    rows = (flat_weights.shape[0], known.stored_heads * known.sequence_length)
    flat_outside, flat_grad_outside = outside.reshape(rows), grad_outside.reshape(rows)
    grad = torch.empty_like(flat_weights)
    for block in row_blocks(known, weights.device):
        weight, upstream = _take(flat_weights, block.pairs), _take(flat_grad, block.pairs)
        mean = (weight * upstream).sum(-1, keepdim=True)
        if zero_fill:
            mean = mean + (_take(flat_outside, block.rows) * _take(flat_grad_outside, block.rows)).unsqueeze(-1)
        grad.index_copy_(1, block.pairs.reshape(-1), (weight * (upstream - mean)).flatten(1))
    return grad.view(weights.shape)


@pair_dot.register_fake
def _(a: Tensor, b: Tensor, pattern: str) -> Tensor:
    return new_pairs(a, parse_for_graph(pattern))


def _like_x(weights: Tensor, x: Tensor, pattern: str) -> Tensor:
    parse_for_graph(pattern)
    return x.new_empty(x.shape)


pair_sum.register_fake(_like_x)
pair_sum_transposed.register_fake(_like_x)


@pair_softmax.register_fake
def _(scores: Tensor, pattern: str, zero_fill: bool) -> tuple[Tensor, Tensor]:
    known = parse_for_graph(pattern)
    outside = scores.new_empty(scores.shape[0], known.num_heads, known.sequence_length)
    return scores.new_empty(scores.shape), outside


@pair_softmax_backward.register_fake
def _(
    grad_weights: Tensor, grad_outside: Tensor, weights: Tensor, outside: Tensor, pattern: str, zero_fill: bool
) -> Tensor:
    parse_for_graph(pattern)
    return weights.new_empty(weights.shape)


_Context = Any  # torch.autograd.function.FunctionCtx, whose attributes are set freely


def _save_two_tensors(ctx: _Context, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    first, second, pattern = inputs
    ctx.save_for_backward(first, second)
    ctx.pattern = Pattern.parse(pattern)  # the object, not the text: backward needs it alive


def _pair_dot_backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    need_a, need_b, _ = ctx.needs_input_grad
    grad = grad.contiguous()
    return (
        pair_sum(grad, b, ctx.pattern.key) if need_a else None,
        pair_sum_transposed(grad, a, ctx.pattern.key) if need_b else None,
        None,
    )


def _sum_backward(
    dot: Callable[[Tensor, Tensor, str], Tensor], transposed_sum: Callable[[Tensor, Tensor, str], Tensor]
) -> Callable[[_Context, Tensor], tuple[Tensor | None, Tensor | None, None]]:
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, x = ctx.saved_tensors
        need_weights, need_x, _ = ctx.needs_input_grad
        return (
            dot(grad, x, ctx.pattern.key).to(weights.dtype) if need_weights else None,
            transposed_sum(weights, grad, ctx.pattern.key) if need_x else None,
            None,
        )

    return backward


def _save_softmax(ctx: _Context, inputs: tuple[Tensor, str, bool], output: tuple[Tensor, Tensor]) -> None:
    _, pattern, ctx.zero_fill = inputs
    ctx.save_for_backward(*output)
    ctx.pattern = Pattern.parse(pattern)


def _softmax_backward(ctx: _Context, grad_weights: Tensor, grad_outside: Tensor) -> tuple[Tensor, None, None]:
    weights, outside = ctx.saved_tensors
    return (
        pair_softmax_backward(grad_weights, grad_outside, weights, outside, ctx.pattern.key, ctx.zero_fill),
        None,
        None,
    )


pair_dot.register_autograd(_pair_dot_backward, setup_context=_save_two_tensors)
pair_sum.register_autograd(_sum_backward(pair_dot, pair_sum_transposed), setup_context=_save_two_tensors)
pair_sum_transposed.register_autograd(
    _sum_backward(lambda grad, x, pattern: pair_dot(x, grad, pattern), pair_sum), setup_context=_save_two_tensors
)
pair_softmax.register_autograd(_softmax_backward, setup_context=_save_softmax)
