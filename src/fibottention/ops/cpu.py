"""Sparse attention by the compiled CPU kernel: one pass over the kept pairs, forward and backward.

The forward pass saves the probabilities, one number per kept pair; the backward pass needs no more than these and q, k
and v. Memory is O(tokens) plus a few numbers per pair.

Plain tensors in eager mode go straight to the kernel. All else (torch.compile, export, dispatch modes, functorch) sees
one registered operator and its derivative.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fibottention.ops.arguments import AttentionCall
from fibottention.ops.constants import parse_for_graph
from fibottention.ops.eager import is_plain, refuse_forward_mode, refuse_second_derivative
from fibottention.ops.kernel import kernel, missing
from fibottention.ops.layout import contiguous_rows, new_gradient, new_heads, new_pairs, sum_dtype
from fibottention.ops.twist import Twist
from fibottention.patterns.pattern import Pattern

__all__ = ["attention", "attention_backward_operator", "attention_operator", "unsupported"]

_TWIST_MODES = {"": 0, "relative": 1, "absolute": 2}


class _Options(NamedTuple):
    """What a call asks for, beside its tensors and pattern."""

    scale: float
    zero_fill: bool
    twist_mode: str
    twist_threshold: float
    dropout_p: float
    save: bool
    return_weights: bool

    @property
    def transformed(self) -> bool:
        """Whether the weights differ from the probabilities."""
        return bool(self.twist_mode) or self.dropout_p > 0


def unsupported(call: AttentionCall) -> str | None:
    """Why this backend cannot serve the call, or None."""
    if call.q.device.type not in ("cpu", "meta"):
        return f"the tensors are on {call.q.device}"
    if call.transform is not None and type(call.transform) is not Twist:
        return f"of all transforms it knows only Twist, got {call.transform!r}"
    return missing()


def attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Attention over just the kept pairs, and the kept weights if asked for."""
    twist = call.transform if isinstance(call.transform, Twist) else None
    dtype = sum_dtype(call.q)
    bias = call.kernel_bias()
    tensors = (
        call.q,
        call.k,
        call.v,
        None if bias is None else bias.to(dtype),
        None if twist is None else twist.scale.to(dtype),
    )
    refuse_forward_mode("cpu", *tensors)
    plain = is_plain(tensors)
    # A functorch transform hides whether a derivative will be asked for.
    differentiated = torch.is_grad_enabled() and (not plain or any(t is not None and t.requires_grad for t in tensors))
    options = _Options(
        call.scale,
        call.zero_fill,
        "" if twist is None else twist.mode,
        0.0 if twist is None else twist.threshold,
        call.dropout_p,
        differentiated or call.return_weights,
        call.return_weights,
    )
    seed = torch.randint(2**62, (), device=call.q.device) if call.dropout_p else None
    if not plain:
        out, probabilities, weights, _ = attention_operator(*tensors, seed, call.pattern.key, *options)
    elif differentiated:
        out, probabilities, weights, _ = _Function.apply(*tensors, seed, call.pattern, options)  # type: ignore[misc]
    else:
        out, probabilities, weights, _ = _forward(*tensors, seed, call.pattern, options)
    return out, (weights if options.transformed else probabilities) if call.return_weights else None


_Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]


def _new_outputs(q: Tensor, v: Tensor, pattern: Pattern, options: _Options) -> _Outputs:
    """Output; probabilities, and weights after transform and dropout ``(B, G, pairs)``; weight of each other pair."""
    return (
        new_heads(q, v.shape[3]),
        new_pairs(q, pattern) if options.save else None,
        new_pairs(q, pattern) if options.return_weights and options.transformed else None,
        q.new_empty(q.shape[:3], dtype=sum_dtype(q)) if options.zero_fill else None,
    )


def _common_fields(
    options: _Options, twist_scale: Tensor | None, seed: Tensor | None, rest: Tensor | None, v: Tensor
) -> dict[str, Any]:
    """The fields of a call that the two passes share."""
    return {
        "scale": options.scale,
        "zero_fill": options.zero_fill,
        "twist": _TWIST_MODES[options.twist_mode],
        "twist_threshold": options.twist_threshold,
        "twist_scale": twist_scale,
        "dropout_p": options.dropout_p,
        "seed": None if seed is None else int(seed),
        "rest": rest,
        "value_sums": _token_sums(rest, v),
    }


def _token_sums(rest: Tensor | None, v: Tensor) -> Tensor | None:
    """Scratch ``(B, H, Dv)`` for sums over the tokens, needed where pairs outside the pattern have weight."""
    return None if rest is None else rest.new_empty(*v.shape[:2], v.shape[3])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    twist_scale: Tensor | None,
    seed: Tensor | None,
    pattern: Pattern,
    options: _Options,
) -> _Outputs:
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    outputs = _new_outputs(q, v, pattern, options)
    out, probabilities, weights, rest = outputs
    if not out.numel():
        return outputs
    values = _common_fields(options, twist_scale, seed, rest, v) | {
        "out": out,
        "bias": None if bias is None else bias.contiguous(),
        "bias_batch": 0 if bias is None or bias.ndim == 2 else bias.shape[0],
        "probabilities": probabilities,
        "weights": weights,
    }
    kernel().forward(pattern, q, k, v, values)
    return outputs


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, probabilities: Tensor, options: _Options, needed: tuple[bool, bool, bool]
) -> _Gradients:
    """Gradients of q, k, v, of the scores ``(B, G, pairs)``, and of the Twist scale by row ``(B, H, T)``."""
    return (
        new_gradient(q) if needed[0] else None,
        new_gradient(k) if needed[1] else None,
        new_gradient(v) if needed[2] else None,
        torch.empty_like(probabilities),
        probabilities.new_empty(q.shape[:3]) if options.twist_mode else None,
    )


def _backward(
    grad_out: Tensor,
    grad_weights: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    twist_scale: Tensor | None,
    seed: Tensor | None,
    probabilities: Tensor,
    rest: Tensor | None,
    pattern: Pattern,
    options: _Options,
    needed: tuple[bool, bool, bool],
) -> _Gradients:
    gradients = _new_gradients(q, k, v, probabilities, options, needed)
    q, k, v, grad_out = (contiguous_rows(t) for t in (q, k, v, grad_out))
    grad_q, grad_k, grad_v, grad_scores, grad_twist = gradients
    if not grad_out.numel():
        return gradients
    values = _common_fields(options, twist_scale, seed, rest, v) | {
        "probabilities": probabilities,
        "weights": _weights_to_make(probabilities, options, needed[2]),
        "grad_out": grad_out,
        "grad_q": grad_q,
        "grad_k": grad_k,
        "grad_v": grad_v,
        "grad_weights": None if grad_weights is None else grad_weights.contiguous(),
        "grad_scores": grad_scores,
        "grad_sums": _token_sums(rest, v),
        "grad_twist_scale": grad_twist,
    }
    kernel().backward(pattern, q, k, v, values)
    return gradients


def _weights_to_make(probabilities: Tensor, options: _Options, need_v: bool) -> Tensor | None:
    """Where the backward pass finds the weights of the values, or makes them again where they were transformed."""
    if not options.transformed:
        return probabilities
    return torch.empty_like(probabilities) if need_v else None


def _filled(tensors: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Empty tensors in the place of what is missing: an operator must return tensors."""
    return tuple(like.new_empty(0) if t is None else t for t in tensors)


@torch.library.custom_op("fibottention::cpu_attention", mutates_args=(), device_types="cpu")
def attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    twist_scale: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    scale: float,
    zero_fill: bool,
    twist_mode: str,
    twist_threshold: float,
    dropout_p: float,
    save: bool,
    return_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward pass as an operator; what is not asked for comes back empty."""
    options = _Options(scale, zero_fill, twist_mode, twist_threshold, dropout_p, save, return_weights)
    return _filled(_forward(q, k, v, bias, twist_scale, seed, Pattern.parse(pattern), options), q)  # type: ignore


@attention_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, twist_scale: Any, seed: Any, pattern: str, *options: Any
) -> tuple[Tensor, ...]:
    return _filled(_new_outputs(q, v, parse_for_graph(pattern), _Options(*options)), q)


@torch.library.custom_op("fibottention::cpu_attention_backward", mutates_args=(), device_types="cpu")
def attention_backward_operator(
    grad_out: Tensor,
    grad_weights: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    twist_scale: Tensor | None,
    seed: Tensor | None,
    probabilities: Tensor,
    rest: Tensor | None,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    pattern: str,
    scale: float,
    zero_fill: bool,
    twist_mode: str,
    twist_threshold: float,
    dropout_p: float,
    save: bool,
    return_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward pass as an operator; what is not asked for comes back empty."""
    options = _Options(scale, zero_fill, twist_mode, twist_threshold, dropout_p, save, return_weights)
    tensors = (grad_out, grad_weights, q, k, v, twist_scale, seed, probabilities, rest)
    return _filled(_backward(*tensors, Pattern.parse(pattern), options, (need_q, need_k, need_v)), q)  # type: ignore


@attention_backward_operator.register_fake
def _(
    grad_out: Tensor,
    grad_weights: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    twist_scale: Any,
    seed: Any,
    probabilities: Tensor,
    rest: Any,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    pattern: str,
    *options: Any,
) -> tuple[Tensor, ...]:
    parse_for_graph(pattern)
    return _filled(_new_gradients(q, k, v, probabilities, _Options(*options), (need_q, need_k, need_v)), q)


@torch.library.custom_op("fibottention::bucket_sums", mutates_args=(), device_types="cpu")
def _bucket_sums(values: Tensor, pattern: str) -> Tensor:
    """Sums ``(H, buckets)`` of ``(B, G, pairs)`` numbers over the batch and the pairs of each bucket."""
    return kernel().bucket_sums(Pattern.parse(pattern), values.contiguous())


@_bucket_sums.register_fake
def _(values: Tensor, pattern: str) -> Tensor:
    known = parse_for_graph(pattern)
    return values.new_empty(known.num_heads, known.num_buckets)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, bias, twist_scale, seed, pattern, *options = inputs
    _, probabilities, _, rest = output
    ctx.set_materialize_grads(False)
    # The object, not the text: the backward pass needs it alive.
    ctx.pattern = pattern if isinstance(pattern, Pattern) else Pattern.parse(pattern)
    ctx.options = options[0] if isinstance(pattern, Pattern) else _Options(*options)
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(q, k, v, twist_scale, seed, probabilities, rest if ctx.options.zero_fill else None)


def _derive(ctx: Any, grad_out: Any, grad_probabilities: Any, grad_weights: Any, _: Any) -> tuple[Any, ...]:
    options, pattern = ctx.options, ctx.pattern
    q, k, v, *others = ctx.saved_tensors
    if not options.save:
        raise RuntimeError("sparse attention kept nothing for a backward pass: no input required a gradient")
    if grad_out is None:
        grad_out = q.new_zeros(*q.shape[:3], v.shape[3])
    needed = tuple(ctx.needs_input_grad[:3])
    tensors = (grad_out, grad_weights if options.transformed else grad_probabilities, q, k, v, *others)
    if is_plain(tensors):
        with torch.no_grad():
            gradients = _backward(*tensors, pattern, options, needed)  # type: ignore
    else:
        gradients = attention_backward_operator(*tensors, *needed, pattern.key, *options)
    grad_q, grad_k, grad_v, grad_scores, grad_twist = gradients
    grad_bias = None
    if ctx.needs_input_grad[3] and len(ctx.bias_shape) == 2:
        grad_bias = _bucket_sums(grad_scores, pattern.key)
    elif ctx.needs_input_grad[3]:
        images = ctx.bias_shape[0]
        grad_bias = grad_scores
        if images != q.shape[0]:
            grad_bias = grad_scores.unflatten(0, (q.shape[0] // images, images)).sum(0)
    return (
        grad_q if needed[0] else None,
        grad_k if needed[1] else None,
        grad_v if needed[2] else None,
        grad_bias,
        _sum_of_rows(grad_twist) if grad_twist is not None and ctx.needs_input_grad[4] else None,
        *[None] * (len(ctx.needs_input_grad) - 5),
    )


def _sum_of_rows(x: Tensor) -> Tensor:
    """The sum of a ``(B, H, T)`` tensor, axis by axis: a sum of all at once depends on the number of threads."""
    return x.sum(-1).sum(-1).sum()


attention_operator.register_autograd(_derive, setup_context=_save)


@attention_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the mapped dimension of q, k and v into the batch."""
    if any(dim is not None for dim in in_dims[3:]):
        raise NotImplementedError("vmap over sparse_attention maps q, k and v, but not bias, transform or dropout")
    size = info.batch_size
    folded = []
    for x, dim in zip(inputs[:3], in_dims[:3], strict=True):
        mapped = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        folded.append(mapped.flatten(0, 1))
    outputs = attention_operator(*folded, *inputs[3:])
    return tuple(t.unflatten(0, (size, -1)) if t.ndim > 1 else t.expand(size, 0) for t in outputs), (0, 0, 0, 0)


class _Function(torch.autograd.Function):
    """The operator's derivative for plain tensors in eager mode, without the cost of the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        outputs = _forward(*inputs)
        _save(ctx, inputs, outputs)
        ctx.mark_non_differentiable(*(t for t in outputs[3:] if t is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative("cpu")
        return _derive(ctx, *grads)
