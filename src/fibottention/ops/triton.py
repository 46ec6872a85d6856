"""Sparse attention by Triton kernels: over just the kept pairs on a GPU, forward and backward.

The forward pass saves the output and the log-sum-exp of each query; the backward pass computes the weights again. The
dense rows and columns of prefix tokens are plain matrix products. No atomics, so results repeat bit for bit.
"""

import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fibottention.ops.arguments import AttentionCall
from fibottention.ops.constants import cached_on_device, parse_for_graph
from fibottention.ops.eager import full_precision, is_plain, refuse_forward_mode, refuse_second_derivative
from fibottention.ops.kernel import tables
from fibottention.ops.layout import contiguous_rows, new_gradient, new_heads, new_pairs, sum_dtype
from fibottention.patterns.pattern import Pattern

__all__ = ["attention", "attention_backward_operator", "attention_operator", "unsupported"]

_LARGEST_DIM = 256


class _Tables(NamedTuple):
    """A pattern on a device; see `fibottention.ops.kernel.PatternTables`. What a form does not have is empty."""

    offsets: Tensor
    offset_starts: Tensor
    row_base: Tensor
    row_starts: Tensor
    row_keys: Tensor
    column_starts: Tensor
    column_queries: Tensor
    column_pairs: Tensor


def _tables(pattern: Pattern, device: torch.device) -> _Tables:
    def make(device: torch.device) -> _Tables:
        arrays = tables(pattern).arrays
        empty = torch.zeros(1, dtype=torch.int64, device="cpu")
        return _Tables(
            *((torch.from_numpy(arrays[n].copy()) if n in arrays else empty).to(device) for n in _Tables._fields)
        )

    return cached_on_device(pattern, "triton_tables", device, make)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.compiler.assume_constant_result
def _triton_missing() -> bool:
    return importlib.util.find_spec("triton") is None


def unsupported(call: AttentionCall) -> str | None:
    """Why this backend cannot serve the call, or None."""
    if _triton_missing():
        return "triton is not installed"
    if call.q.device.type != "cuda" and not (call.q.device.type == "cpu" and _interpreted()):
        return f"the tensors are on {call.q.device}"
    if call.transform is not None:
        return "it has no transform"
    if call.dropout_p:
        return "it has no dropout"
    if call.return_weights:
        return "it does not return weights"
    largest = max(call.q.shape[3], call.v.shape[3])
    if largest > _LARGEST_DIM:
        return f"head_dim must be at most {_LARGEST_DIM}, got {largest}"
    return None


def attention(call: AttentionCall) -> tuple[Tensor, None]:
    """Attention over just the kept pairs."""
    bias = call.pair_bias() if call.bias is None or call.bias.ndim == 2 else call.kernel_bias()
    bias = None if bias is None else bias.to(sum_dtype(call.q))
    tensors = (call.q, call.k, call.v, bias)
    refuse_forward_mode("triton", *tensors)
    if is_plain(tensors):
        return _Function.apply(*tensors, call.pattern, call.scale, call.zero_fill)[0], None  # type: ignore
    out, _ = attention_operator(*tensors, call.pattern.key, call.scale, call.zero_fill)
    return out, None


def _settings(q: Tensor, v: Tensor, pattern: Pattern, bias: Tensor | None, scale: float) -> dict[str, Any]:
    """The compile-time arguments that all kernels share."""
    import triton
    import triton.language as tl

    wide = max(triton.next_power_of_2(q.shape[3]), triton.next_power_of_2(v.shape[3]))
    return {
        "scale": scale,
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
        "BLOCK": min(64, max(8, 2048 // wide)),  # as many queries as four warps hold in registers
        "BLOCK_D": triton.next_power_of_2(q.shape[3]),
        "BLOCK_V": triton.next_power_of_2(v.shape[3]),
        "OFFSETS": pattern.offsets is not None,
        "BIAS": bias is not None,
        "ACC": tl.float64 if q.dtype == torch.float64 else tl.float32,
    }


def _sizes(pattern: Pattern, bias: Tensor | None) -> tuple[int, ...]:
    images = 1 if bias is None else bias.shape[0]
    return (
        pattern.num_heads,
        pattern.stored_heads,
        pattern.num_tokens,
        pattern.prefix_tokens,
        pattern.stored_pairs,
        images,
    )


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _programs(q: Tensor, pattern: Pattern, block: int) -> int:
    return q.shape[0] * pattern.num_heads * -(-pattern.num_tokens // block)


def _launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    kernel[(programs,)](*arguments, **options)


def _prefix_pairs(pattern: Pattern, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of the pairs of prefix queries ``(S, P, T)`` and of prefix keys ``(S, T, P)``, for S stored heads."""

    def make(device: torch.device) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(pattern.rows.starts[:-1].copy()).view(pattern.stored_heads, -1)
        prefix, length = pattern.prefix_tokens, pattern.sequence_length
        of_queries = starts[:, :prefix, None] + torch.arange(length, device="cpu")
        of_keys = starts[:, :, None] + torch.arange(prefix, device="cpu")
        return of_queries.to(device), of_keys.to(device)

    return cached_on_device(pattern, "prefix_pairs", device, make)


def _prefix_scores(q: Tensor, k: Tensor, bias: Tensor | None, pattern: Pattern, scale: float, of_keys: bool) -> Tensor:
    """Scores of the prefix queries ``(B, H, P, T)``, or of all queries with the prefix keys ``(B, H, T, P)``."""
    prefix, dtype = pattern.prefix_tokens, sum_dtype(q)
    left, right = (q, k[:, :, :prefix]) if of_keys else (q[:, :, :prefix], k)
    scores = left.to(dtype) @ right.to(dtype).mT * scale
    if bias is None:
        return scores
    # (images, G, S, ...), where one of G and S is all heads and the other is 1.
    by_head = bias[:, :, _prefix_pairs(pattern, q.device)[of_keys]].flatten(1, 2)
    return scores + by_head.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)


@full_precision
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, pattern: Pattern, scale: float, zero_fill: bool
) -> tuple[Tensor, Tensor]:
    from fibottention.ops import triton_kernels

    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    dtype, prefix = sum_dtype(q), pattern.prefix_tokens
    out = new_heads(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    if not out.numel():
        return out, lse
    bias = None if bias is None else bias.contiguous()
    value_sums = v.sum(2, dtype=dtype) if zero_fill else lse
    options = _settings(q, v, pattern, bias, scale)
    programs = _programs(q, pattern, options["BLOCK"])
    place = _tables(pattern, q.device)
    with torch.cuda.device_of(q):
        _launch(
            triton_kernels.attention_forward,
            programs,
            *(q, k, v, out, lse, lse if bias is None else bias, value_sums),
            *place[:5],
            *_strides(q, k, v, out),
            *_sizes(pattern, bias),
            **options,
            ZERO_FILL=zero_fill,
        )
    if prefix:
        scores = _prefix_scores(q, k, bias, pattern, scale, of_keys=False)
        total = scores.logsumexp(-1)
        dead = total.isneginf()
        lse[:, :, :prefix] = total.masked_fill(dead, float("inf"))
        weights = (scores - lse[:, :, :prefix, None]).exp()
        out[:, :, :prefix] = (weights @ v.to(dtype)).to(out.dtype)
    return out, lse


@full_precision
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pattern: Pattern,
    scale: float,
    zero_fill: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fibottention.ops import triton_kernels

    dtype, prefix = sum_dtype(q), pattern.prefix_tokens
    grad_q, grad_k, grad_v, grad_scores = _new_gradients(q, k, v, pattern, need_bias)
    q, k, v, grad_out = (contiguous_rows(t) for t in (q, k, v, grad_out))
    if not grad_out.numel():
        return grad_q, grad_k, grad_v, grad_scores
    bias = None if bias is None else bias.contiguous()
    exact = grad_out.to(dtype)
    delta = (exact * out.to(dtype)).sum(-1)
    rest, sums = None, lse
    if zero_fill:
        # Each pair outside the pattern has weight exp(-lse); a prefix query has none.
        rest = (-lse).exp()
        rest[:, :, :prefix] = 0
        rest[:, :, prefix:].masked_fill_(~_incomplete(pattern, q.device), 0)
        sums = torch.einsum("bht,bhtd->bhd", rest, exact)
    options = _settings(q, v, pattern, bias, scale)
    programs = _programs(q, pattern, options["BLOCK"])
    place = _tables(pattern, q.device)
    some_bias = lse if bias is None else bias
    scratch = grad_scores if need_bias or bias is None else new_pairs(q, pattern)
    with torch.cuda.device_of(q):
        _launch(
            triton_kernels.attention_backward_rows,
            programs,
            *(q, k, v, grad_out, grad_q, lse, delta, some_bias, scratch),
            *place[:5],
            *_strides(q, k, v, grad_out, grad_q),
            *_sizes(pattern, bias),
            **options,
        )
        _launch(
            triton_kernels.attention_backward_columns,
            programs,
            *(q, k, v, grad_out, grad_k, grad_v, lse, delta, some_bias, sums),
            *place[:4],
            *place[5:],
            *_strides(q, k, v, grad_out, grad_k, grad_v),
            *_sizes(pattern, bias),
            **options,
            ZERO_FILL=zero_fill,
        )
    if prefix:
        _prefix_gradients(
            (q, k, v, exact, bias, lse, delta, rest, sums),
            (grad_q, grad_k, grad_v, grad_scores if need_bias else None),
            pattern,
            scale,
        )
    return grad_q, grad_k, grad_v, grad_scores


def _incomplete(pattern: Pattern, device: torch.device) -> Tensor:
    """Which patch queries do not see every patch token, ``(S, N)``."""

    def make(device: torch.device) -> Tensor:
        counts = _tables(pattern, device).row_starts.diff().view(pattern.stored_heads, -1)
        return counts < pattern.num_tokens

    return cached_on_device(pattern, "incomplete", device, make)


def _prefix_gradients(inputs: tuple[Any, ...], gradients: tuple[Any, ...], pattern: Pattern, scale: float) -> None:
    """The dense part of the backward pass: queries of prefix queries, keys and values of prefix keys."""
    q, k, v, grad_out, bias, lse, delta, rest, sums = inputs
    grad_q, grad_k, grad_v, grad_scores = gradients
    dtype, prefix = lse.dtype, pattern.prefix_tokens
    scores = _prefix_scores(q, k, bias, pattern, scale, of_keys=False)
    weights = (scores - lse[:, :, :prefix, None]).exp()
    change = weights * (grad_out[:, :, :prefix] @ v.to(dtype).mT - delta[:, :, :prefix, None])
    grad_q[:, :, :prefix] = (change @ k.to(dtype) * scale).to(q.dtype)
    if grad_scores is not None:
        # (B, H, P, T) to (B, G, S, P, T), where one of G and S is all heads and the other is 1.
        by_block = change.unflatten(1, (grad_scores.shape[1], pattern.stored_heads))
        grad_scores[:, :, _prefix_pairs(pattern, q.device)[0]] = by_block
    scores = _prefix_scores(q, k, bias, pattern, scale, of_keys=True)
    weights = (scores - lse[..., None]).exp()
    change = weights * (grad_out @ v[:, :, :prefix].to(dtype).mT - delta[..., None])
    grad_k[:, :, :prefix] = (change.mT @ q.to(dtype) * scale).to(k.dtype)
    if rest is None:
        grad_v[:, :, :prefix] = (weights.mT @ grad_out).to(v.dtype)
    else:
        grad_v[:, :, :prefix] = ((weights - rest[..., None]).mT @ grad_out + sums[:, :, None]).to(v.dtype)


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [new_gradient(x) for x in (q, k, v)]
    return grads[0], grads[1], grads[2], new_pairs(q, pattern) if need_bias else q.new_empty(0, dtype=sum_dtype(q))


@torch.library.custom_op("fibottention::triton_attention", mutates_args=())
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, pattern: str, scale: float, zero_fill: bool
) -> tuple[Tensor, Tensor]:
    """The forward pass as an operator: output, and log-sum-exp ``(B, H, T)``."""
    return _forward(q, k, v, bias, Pattern.parse(pattern), scale, zero_fill)


@attention_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, pattern: str, scale: float, zero_fill: bool
) -> tuple[Tensor, Tensor]:
    parse_for_graph(pattern)
    return new_heads(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=sum_dtype(q))


@torch.library.custom_op("fibottention::triton_attention_backward", mutates_args=())
def attention_backward_operator(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pattern: str,
    scale: float,
    zero_fill: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, if needed, of the scores ``(B, G, pairs)``."""
    return _backward(grad_out, q, k, v, bias, out, lse, Pattern.parse(pattern), scale, zero_fill, need_bias)


@attention_backward_operator.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pattern: str,
    scale: float,
    zero_fill: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _new_gradients(q, k, v, parse_for_graph(pattern), need_bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, bias, pattern, ctx.scale, ctx.zero_fill = inputs
    # The object, not the text: the backward pass needs it alive.
    ctx.pattern = pattern if isinstance(pattern, Pattern) else Pattern.parse(pattern)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, bias, *output)


def _derive(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, bias, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    tensors = (grad_out, q, k, v, bias, out, lse)
    options = (ctx.scale, ctx.zero_fill, ctx.needs_input_grad[3])
    if is_plain(tensors):
        with torch.no_grad():
            grad_q, grad_k, grad_v, grad_scores = _backward(*tensors, ctx.pattern, *options)
    else:
        grad_q, grad_k, grad_v, grad_scores = attention_backward_operator(*tensors, ctx.pattern.key, *options)
    grad_bias = None
    if ctx.needs_input_grad[3]:
        grad_bias = grad_scores.unflatten(0, (q.shape[0] // bias.shape[0], bias.shape[0])).sum(0)
    needed = ctx.needs_input_grad[:3]
    grads = (g if need else None for g, need in zip((grad_q, grad_k, grad_v), needed, strict=True))
    return *grads, grad_bias, None, None, None


attention_operator.register_autograd(_derive, setup_context=_save)


class _Function(torch.autograd.Function):
    """The operator's derivative for plain tensors in eager mode, without the cost of the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        outputs = _forward(*inputs)
        _save(ctx, inputs, outputs)
        ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative("triton")
        return _derive(ctx, *grads)
