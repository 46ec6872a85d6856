"""Neighborhood attention on grids of one to three axes, with the shapes and arguments of natten."""

import functools
import importlib
import importlib.util
import inspect
import types
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fibottention.ops.arguments import AttentionCall, check_arguments, table_by_pair
from fibottention.ops.attention import sparse_attention
from fibottention.ops.constants import pair_indices
from fibottention.ops.eager import cast_for_autocast, static_size
from fibottention.ops.gather import attention_and_log_sum
from fibottention.patterns.neighborhood import flag_per_axis, neighborhood, per_axis
from fibottention.patterns.pattern import Pattern

__all__ = [
    "NeighborhoodBackend",
    "Window",
    "na1d",
    "na2d",
    "na3d",
    "neighborhood_attention",
    "neighborhood_pattern",
]

NeighborhoodBackend = Literal["auto", "natten", "reference", "gather", "sdpa", "cpu", "triton"]

PerAxis = int | Sequence[int]
CausalPerAxis = bool | Sequence[bool]


class Window(NamedTuple):
    """The arguments that choose the pairs, one number per axis."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    is_causal: tuple[bool, ...]

    @classmethod
    def of(
        cls, axes: int, kernel_size: PerAxis, stride: PerAxis, dilation: PerAxis, is_causal: CausalPerAxis
    ) -> "Window":
        """From one number for all axes, or one per axis."""
        return cls(
            per_axis("kernel_size", kernel_size, axes),
            per_axis("stride", stride, axes),
            per_axis("dilation", dilation, axes),
            flag_per_axis("is_causal", is_causal, axes),
        )


# Patterns of compiled graphs, by name. A module, whose attributes torch.compile looks up one by one when it needs them.
_for_graphs = types.ModuleType("patterns_of_graphs")


def neighborhood_pattern(
    num_heads: int, grid: tuple[int, ...], window: Window, relation: bool, prefix_tokens: int
) -> Pattern:
    """The pattern of a call; while a graph is compiled, as one of its constants."""
    grid = tuple(map(static_size, grid))
    if not torch.compiler.is_compiling():
        return neighborhood(num_heads, grid, *window, relation=relation, prefix_tokens=prefix_tokens)
    flat = (*grid, *window.kernel_size, *window.stride, *window.dilation, *window.is_causal)
    return getattr(_for_graphs, _make_for_graph(num_heads, len(grid), relation, prefix_tokens, *flat))


# torch.compile cannot trace the making of a pattern, which for its purposes is a constant. Numbers and a name are what
# such a function may take and give.
@torch.compiler.assume_constant_result
def _make_for_graph(num_heads: int, axes: int, relation: bool, prefix_tokens: int, *flat: int) -> str:
    grid, kernel_size, stride, dilation, is_causal = (flat[i : i + axes] for i in range(0, len(flat), axes))
    name = "_".join(map(str, (num_heads, relation, prefix_tokens, *flat)))
    pattern = neighborhood(
        num_heads,
        grid,
        kernel_size,
        stride,
        dilation,
        tuple(map(bool, is_causal)),
        relation=relation,
        prefix_tokens=prefix_tokens,
    )
    setattr(_for_graphs, name, pattern)
    return name


def neighborhood_attention(
    axes: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: CausalPerAxis = False,
    scale: float | None = None,
    rpb: Tensor | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: NeighborhoodBackend = "auto",
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """What `na1d`, `na2d` and `na3d` share: the output, and the log-sum-exp if asked for.

    Takes the number of axes and the arguments of `na2d`, and ``dropout_p``, the dropout probability of the weights.
    """
    _check_tensors(axes, query, key, value, additional_keys, additional_values, attn_mask)
    query, key, value = cast_for_autocast(query, key, value)
    if additional_keys is not None and additional_values is not None:
        additional_keys, additional_values = additional_keys.to(query.dtype), additional_values.to(query.dtype)
    window = Window.of(axes, kernel_size, stride, dilation, is_causal)
    _check_table(rpb, query.shape[-2], window)
    if backend not in get_args(NeighborhoodBackend):
        raise ValueError(f"backend must be one of {', '.join(get_args(NeighborhoodBackend))}, got {backend!r}")
    if backend == "natten" or (backend == "auto" and query.device.type == "cuda"):
        tensors = (query, key, value, additional_keys, additional_values)
        lacking = _natten_lacks(tensors, rpb, attn_mask, dropout_p)
        if backend == "natten" and lacking:
            raise ValueError(f"backend 'natten' cannot serve this call: {lacking}; use 'auto'")
        if backend == "natten" or (lacking is None and _natten_is_faster(query, value)):
            return _natten(axes, query, key, value, window, scale, additional_keys, additional_values, return_lse)
        backend = "auto"

    groups = static_size(query.shape[-2]) // static_size(key.shape[-2])
    prefix = 0 if additional_keys is None else static_size(additional_keys.shape[1])
    if additional_keys is not None and additional_values is not None:
        # Prefix tokens are seen by all tokens; what they see themselves is thrown away.
        queries = query.new_zeros(query.shape[0], prefix, *query.shape[-2:])
        q = _sequence(torch.cat([queries, query.flatten(1, axes)], 1), 1)
        k = _sequence(torch.cat([additional_keys, key.flatten(1, axes)], 1), groups)
        v = _sequence(torch.cat([additional_values, value.flatten(1, axes)], 1), groups)
    else:
        q = _sequence(query.flatten(1, axes), 1)
        k, v = (_sequence(t.flatten(1, axes), groups) for t in (key, value))
    grid = tuple(map(static_size, query.shape[1:-2]))
    pattern = neighborhood_pattern(static_size(query.shape[-2]), grid, window, rpb is not None, prefix)
    bias = None if rpb is None else rpb.flatten(1)
    if attn_mask is not None:
        masked = _masked_pairs(attn_mask, pattern, q)
        bias = masked if bias is None else table_by_pair(bias, pattern).to(masked.dtype) + masked
    log_sums = None
    if return_lse:
        out, log_sums = _with_log_sums(q, k, v, pattern, bias, scale, dropout_p, backend)
    else:
        out = sparse_attention(q, k, v, pattern, bias=bias, scale=scale, dropout_p=dropout_p, backend=backend)
    return _grid(out, prefix, grid), None if log_sums is None else _grid(log_sums, prefix, grid)


def _sequence(x: Tensor, groups: int) -> Tensor:
    """``(B, N, heads, D)`` as ``(B, heads * groups, N, D)``."""
    return (x if groups == 1 else x.repeat_interleave(groups, 2)).transpose(1, 2)


def _grid(x: Tensor, prefix: int, grid: tuple[int, ...]) -> Tensor:
    """``(B, heads, prefix + N, ...)`` as ``(B, *grid, heads, ...)``."""
    return x.transpose(1, 2)[:, prefix:].unflatten(1, grid)


def _masked_pairs(attn_mask: Tensor, pattern: Pattern, q: Tensor) -> Tensor:
    """Minus infinity for each pair whose key is masked, ``(1 or B, 1, pairs)``."""
    _, _, key = pair_indices(pattern, q.device)
    seen = attn_mask.flatten(1)
    if pattern.prefix_tokens:
        seen = torch.cat([seen.new_ones(len(seen), pattern.prefix_tokens), seen], 1)
    bias = torch.zeros(seen.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return bias.masked_fill(~seen, float("-inf"))[:, None, key]


def _with_log_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    bias: Tensor | None,
    scale: float | None,
    dropout_p: float,
    backend: NeighborhoodBackend,
) -> tuple[Tensor, Tensor]:
    if backend not in ("auto", "gather"):
        raise ValueError(f"return_lse=True is served by the backend 'gather' (or natten on CUDA), got {backend!r}")
    if torch.onnx.is_in_onnx_export():
        raise ValueError("return_lse=True cannot be exported to ONNX")
    check_arguments(q, k, v, pattern, bias, "-inf", None, dropout_p, scale)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    return attention_and_log_sum(AttentionCall(q, k, v, pattern, bias, scale, False, None, dropout_p, False))


def _check_tensors(
    axes: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    additional_keys: Tensor | None,
    additional_values: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    given = {
        "query": query,
        "key": key,
        "value": value,
        "additional_keys": additional_keys,
        "additional_values": additional_values,
        "attn_mask": attn_mask,
    }
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("query", "key", "value")):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor is None:
            continue
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the device of query ({query.device}), got {tensor.device}")
        if name != "attn_mask" and tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise ValueError(f"{name} must have the dtype of query ({query.dtype}), got {tensor.dtype}")
    names = "B, " + ", ".join("DHW"[-axes:] if axes > 1 else "N")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != axes + 3:
            raise ValueError(f"{name} must be of shape ({names}, heads, head_dim), got {tuple(tensor.shape)}")
    if key.shape[:-2] != query.shape[:-2] or value.shape[:-2] != query.shape[:-2]:
        raise ValueError(
            f"key and value must have the batch and grid of query {tuple(query.shape[:-2])}, got "
            f"{tuple(key.shape[:-2])} and {tuple(value.shape[:-2])}"
        )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the head_dim of query ({query.shape[-1]}), got {key.shape[-1]}")
    heads, key_heads = query.shape[-2], key.shape[-2]
    if value.shape[-2] != key_heads or not key_heads or heads % key_heads:
        raise ValueError(
            f"the heads of key and value must be equal and divide those of query ({heads}), got {key_heads} and "
            f"{value.shape[-2]}"
        )
    if (additional_keys is None) != (additional_values is None):
        raise ValueError("additional_keys and additional_values must be given together")
    if additional_keys is not None and additional_values is not None:
        if additional_keys.ndim != 4:
            raise ValueError(
                f"additional_keys must be of shape (B, n, heads, head_dim), got {tuple(additional_keys.shape)}"
            )
        wanted = (query.shape[0], additional_keys.shape[1])
        for name, tensor, like in (("keys", additional_keys, key), ("values", additional_values, value)):
            if tuple(tensor.shape) != (*wanted, *like.shape[-2:]):
                raise ValueError(
                    f"additional_{name} must be of shape (B, n, heads, head_dim) = "
                    f"{(wanted[0], 'n', *like.shape[-2:])}, got {tuple(tensor.shape)}"
                )
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            raise TypeError(f"attn_mask must be boolean (True for keys that are seen), got {attn_mask.dtype}")
        if attn_mask.shape[1:] != query.shape[1:-2] or attn_mask.shape[0] not in (1, query.shape[0]):
            raise ValueError(
                f"attn_mask must be of shape ({names}) = {tuple(query.shape[:-2])}, got {tuple(attn_mask.shape)}"
            )


def _check_table(rpb: Tensor | None, heads: int, window: Window) -> None:
    if rpb is None:
        return
    wanted = (heads, *(2 * kernel - 1 for kernel in window.kernel_size))
    if tuple(rpb.shape) != wanted:
        raise ValueError(f"rpb must be of shape (heads, 2 * kernel_size - 1, ...) = {wanted}, got {tuple(rpb.shape)}")


@functools.cache
def _natten_problem() -> str | None:
    """Why natten cannot be used at all, or None."""
    try:
        spec = importlib.util.find_spec("natten")
    except ValueError:  # a module without a spec has taken its name
        spec = None
    # A folder that happens to have the name has no origin, and fibottention.compat.natten another name.
    if spec is None or spec.origin is None or spec.name != "natten":
        return "natten is not installed"
    if "stride" not in inspect.signature(importlib.import_module("natten").na2d).parameters:
        return "natten is older than 0.20"
    return None


def _natten_lacks(
    tensors: Sequence[Tensor | None], rpb: Tensor | None, attn_mask: Tensor | None, dropout_p: float
) -> str | None:
    """Why natten cannot serve a call, or None."""
    query = tensors[0]
    assert query is not None
    if (problem := _natten_problem()) is not None:
        return problem
    if rpb is not None:
        return "it has no relative bias (rpb)"
    if attn_mask is not None:
        return "it has no attn_mask"
    if dropout_p:
        return "it has no dropout"
    if query.dtype == torch.float64:
        return "it has no float64"
    with_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if query.device.type != "cuda" and with_gradient:
        return f"it has no gradients on {query.device.type}"
    return None


def _natten_is_faster(query: Tensor, value: Tensor) -> bool:
    """Whether natten's compiled kernels can serve a call that natten can serve at all."""
    natten = importlib.import_module("natten")
    dim = query.shape[-1]
    return bool(getattr(natten, "HAS_LIBNATTEN", False)) and value.shape[-1] == dim and dim % 8 == 0


def _natten(
    axes: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: Window,
    scale: float | None,
    additional_keys: Tensor | None,
    additional_values: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    natten = importlib.import_module("natten")
    result = getattr(natten, f"na{axes}d")(
        query,
        key,
        value,
        kernel_size=window.kernel_size,
        stride=window.stride,
        dilation=window.dilation,
        is_causal=window.is_causal,
        scale=scale,
        additional_keys=additional_keys,
        additional_values=additional_values,
        return_lse=return_lse,
    )
    return result if return_lse else (result, None)


def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: CausalPerAxis = False,
    scale: float | None = None,
    rpb: Tensor | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: NeighborhoodBackend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Neighborhood attention on sequences ``(B, N, heads, head_dim)``; else as `na2d`."""
    out, log_sums = neighborhood_attention(
        1,
        query,
        key,
        value,
        kernel_size,
        stride,
        dilation,
        is_causal,
        scale,
        rpb,
        additional_keys,
        additional_values,
        attn_mask,
        return_lse,
        backend,
    )
    return out if log_sums is None else (out, log_sums)


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: CausalPerAxis = False,
    scale: float | None = None,
    rpb: Tensor | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: NeighborhoodBackend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Neighborhood attention on images: each query attends to the window of keys around it, shifted in at the borders.

    With ``dilation`` above 1 this is dilated neighborhood attention. Differentiable in query, key, value, rpb and the
    additional keys and values. Sources: Hassani et al., arXiv 2204.07143 (NA) and arXiv 2209.15001 (DiNA); arguments
    and shapes as in natten 0.21.

    Args:
        query: ``(B, H, W, heads, head_dim)``; float64, float32, bfloat16 or float16.
        key: ``(B, H, W, key heads, head_dim)``; the key heads divide the heads (grouped queries).
        value: ``(B, H, W, key heads, value_dim)``.
        kernel_size: Keys along each axis, one number or one per axis (so for the next three, too).
        stride: Number of successive queries that share one window, at most ``kernel_size``.
        dilation: Step between keys; ``kernel_size * dilation`` must be at most the length of the axis.
        is_causal: Whether no key after the query is seen along an axis.
        scale: Factor of the scores; ``head_dim ** -0.5`` if None.
        rpb: Table of relative biases ``(heads, 2 * kernel_size - 1, 2 * kernel_size - 1)``, read at
            ``kernel_size - 1 + (key - query) / dilation`` along each axis. Needs ``stride=1``.
        additional_keys: ``(B, n, key heads, head_dim)`` that every query attends to as well.
        additional_values: ``(B, n, key heads, value_dim)``.
        attn_mask: Boolean ``(B or 1, H, W)``, False for keys that no query sees. A query that sees no key gives zeros.
        return_lse: Also return the log-sum-exp of the scores, ``(B, H, W, heads)``, differentiable as well. It is
            computed by the backend ``"gather"``, which is an order of magnitude slower on the CPU.
        backend: As in `fibottention.sparse_attention`, or ``"natten"``; ``"auto"`` takes natten on CUDA where it is
            installed with its kernels and has what the call asks for.

    Returns:
        The output ``(B, H, W, heads, value_dim)``, or the output and the log-sum-exp.

    Raises:
        ValueError: If shapes or options do not fit together, or the named backend cannot serve the call.
        TypeError: If a dtype is not supported.
    """
    out, log_sums = neighborhood_attention(
        2,
        query,
        key,
        value,
        kernel_size,
        stride,
        dilation,
        is_causal,
        scale,
        rpb,
        additional_keys,
        additional_values,
        attn_mask,
        return_lse,
        backend,
    )
    return out if log_sums is None else (out, log_sums)


def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: CausalPerAxis = False,
    scale: float | None = None,
    rpb: Tensor | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: NeighborhoodBackend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Neighborhood attention on volumes or videos ``(B, D, H, W, heads, head_dim)``; else as `na2d`."""
    out, log_sums = neighborhood_attention(
        3,
        query,
        key,
        value,
        kernel_size,
        stride,
        dilation,
        is_causal,
        scale,
        rpb,
        additional_keys,
        additional_values,
        attn_mask,
        return_lse,
        backend,
    )
    return out if log_sums is None else (out, log_sums)
