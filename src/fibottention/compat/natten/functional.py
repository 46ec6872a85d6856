"""natten's functions of versions 0.14 to 0.17, with gradients on every device.

The unfused ones give and take attention weights. Their layouts are natten's: queries, keys and values
``(B, heads, *grid, head_dim)``; weights ``(B, heads, *grid, window)``, the window in row-major order, followed by the
additional keys. A scale is the caller's business, as it was.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fibottention.ops import neighborhood
from fibottention.ops.arguments import table_by_pair
from fibottention.ops.neighborhood import Window, neighborhood_pattern
from fibottention.ops.pairs import pair_dot, pair_sum
from fibottention.patterns.pattern import Pattern

__all__ = [
    "NATTEN1DAVFunction",
    "NATTEN1DQKRPBFunction",
    "NATTEN2DAVFunction",
    "NATTEN2DQKRPBFunction",
    "NATTEN3DAVFunction",
    "NATTEN3DQKRPBFunction",
    "na1d",
    "na1d_av",
    "na1d_qk",
    "na1d_qk_with_bias",
    "na2d",
    "na2d_av",
    "na2d_qk",
    "na2d_qk_with_bias",
    "na3d",
    "na3d_av",
    "na3d_qk",
    "na3d_qk_with_bias",
    "natten1dav",
    "natten1dqk",
    "natten1dqkrpb",
    "natten2dav",
    "natten2dqk",
    "natten2dqkrpb",
    "natten3dav",
    "natten3dqk",
    "natten3dqkrpb",
]

PerAxis = int | Sequence[int]


def _pattern(axes: int, x: Tensor, kernel_size: PerAxis, dilation: PerAxis | None, relation: bool) -> Pattern:
    if x.ndim != axes + 3:
        raise ValueError(f"expected a tensor (B, heads, *grid, channels) of {axes + 3} axes, got {tuple(x.shape)}")
    window = Window.of(axes, kernel_size, 1, 1 if dilation is None else dilation, False)
    return neighborhood_pattern(x.shape[1], tuple(x.shape[2:-1]), window, relation, 0)


def _scores(
    axes: int,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size: PerAxis,
    dilation: PerAxis | None,
    additional_keys: Tensor | None,
) -> Tensor:
    if key.shape != query.shape:
        raise ValueError(f"key must have the shape of query {tuple(query.shape)}, got {tuple(key.shape)}")
    pattern = _pattern(axes, query, kernel_size, dilation, bias is not None)
    scores = pair_dot(query.flatten(2, -2), key.flatten(2, -2), pattern.key)
    if bias is not None:
        if bias.ndim != axes + 1 or bias.flatten(1).shape != (pattern.num_heads, pattern.num_buckets):
            raise ValueError(f"rpb must be of shape (heads, 2 * kernel_size - 1, ...), got {tuple(bias.shape)}")
        scores = scores + table_by_pair(bias.flatten(1), pattern).to(scores.dtype)
    window = pattern.stored_pairs // pattern.num_tokens
    scores = scores.view(*query.shape[:-1], window).to(query.dtype)
    if additional_keys is None:
        return scores
    more = query.flatten(2, -2) @ additional_keys.mT
    return torch.cat([scores, more.view(*query.shape[:-1], additional_keys.shape[2])], -1)


def _values(
    axes: int,
    attn: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    dilation: PerAxis | None,
    additional_values: Tensor | None,
) -> Tensor:
    pattern = _pattern(axes, value, kernel_size, dilation, False)
    window = pattern.stored_pairs // pattern.num_tokens
    more = 0 if additional_values is None else additional_values.shape[2]
    if attn.shape != (*value.shape[:-1], window + more):
        raise ValueError(f"attn must be of shape {(*value.shape[:-1], window + more)}, got {tuple(attn.shape)}")
    weights = attn[..., :window].flatten(2)
    weights = weights if attn.dtype == torch.float64 else weights.float()
    out = pair_sum(weights, value.flatten(2, -2), pattern.key).view(value.shape)
    if additional_values is None:
        return out
    return out + (attn[..., window:].flatten(2, -2) @ additional_values).view(value.shape)


def _refuse_causal(is_causal: bool | Sequence[bool] | None) -> None:
    if is_causal not in (None, False) and (is_causal is True or any(is_causal)):
        raise NotImplementedError("is_causal is not supported by the unfused functions; use fibottention.na2d")


def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    *,
    stride: PerAxis = 1,
    dilation: PerAxis | None = 1,
    is_causal: bool | Sequence[bool] | None = False,
    rpb: Tensor | None = None,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
) -> Tensor:
    """Attention on sequences, heads last; see `fibottention.na1d`.

    What follows ``kernel_size`` goes by name: its order changed between natten 0.17 and 0.20.
    """
    return neighborhood.na1d(  # pyright: ignore[reportReturnType]
        query,
        key,
        value,
        kernel_size,
        stride,
        1 if dilation is None else dilation,
        is_causal or False,
        scale,
        rpb,
        additional_keys,
        additional_values,
    )


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    *,
    stride: PerAxis = 1,
    dilation: PerAxis | None = 1,
    is_causal: bool | Sequence[bool] | None = False,
    rpb: Tensor | None = None,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
) -> Tensor:
    """Attention on images, heads last; see `fibottention.na2d`.

    What follows ``kernel_size`` goes by name: its order changed between natten 0.17 and 0.20.
    """
    return neighborhood.na2d(  # pyright: ignore[reportReturnType]
        query,
        key,
        value,
        kernel_size,
        stride,
        1 if dilation is None else dilation,
        is_causal or False,
        scale,
        rpb,
        additional_keys,
        additional_values,
    )


def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    *,
    stride: PerAxis = 1,
    dilation: PerAxis | None = 1,
    is_causal: bool | Sequence[bool] | None = False,
    rpb: Tensor | None = None,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
) -> Tensor:
    """Attention on volumes, heads last; see `fibottention.na3d`.

    What follows ``kernel_size`` goes by name: its order changed between natten 0.17 and 0.20.
    """
    return neighborhood.na3d(  # pyright: ignore[reportReturnType]
        query,
        key,
        value,
        kernel_size,
        stride,
        1 if dilation is None else dilation,
        is_causal or False,
        scale,
        rpb,
        additional_keys,
        additional_values,
    )


def na1d_qk(
    query: Tensor,
    key: Tensor,
    kernel_size: PerAxis,
    dilation: PerAxis | None = 1,
    additional_keys: Tensor | None = None,
    is_causal: bool | Sequence[bool] | None = False,
    rpb: Tensor | None = None,
) -> Tensor:
    """Dot products of each query with the keys of its window, on sequences, plus ``rpb``."""
    _refuse_causal(is_causal)
    return _scores(1, query, key, rpb, kernel_size, dilation, additional_keys)


def na1d_av(
    attn: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    dilation: PerAxis | None = 1,
    additional_values: Tensor | None = None,
    is_causal: bool | Sequence[bool] | None = False,
) -> Tensor:
    """Sum of the values of each window by the weights ``attn``, on sequences."""
    _refuse_causal(is_causal)
    return _values(1, attn, value, kernel_size, dilation, additional_values)


def na2d_qk(
    query: Tensor,
    key: Tensor,
    kernel_size: PerAxis,
    dilation: PerAxis | None = 1,
    additional_keys: Tensor | None = None,
    is_causal: bool | Sequence[bool] | None = False,
    rpb: Tensor | None = None,
) -> Tensor:
    """Dot products of each query with the keys of its window, on images, plus ``rpb``."""
    _refuse_causal(is_causal)
    return _scores(2, query, key, rpb, kernel_size, dilation, additional_keys)


def na2d_av(
    attn: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    dilation: PerAxis | None = 1,
    additional_values: Tensor | None = None,
    is_causal: bool | Sequence[bool] | None = False,
) -> Tensor:
    """Sum of the values of each window by the weights ``attn``, on images."""
    _refuse_causal(is_causal)
    return _values(2, attn, value, kernel_size, dilation, additional_values)


def na3d_qk(
    query: Tensor,
    key: Tensor,
    kernel_size: PerAxis,
    *,
    dilation: PerAxis | None = 1,
    additional_keys: Tensor | None = None,
    is_causal: bool | Sequence[bool] | None = False,
    rpb: Tensor | None = None,
) -> Tensor:
    """Dot products of each query with the keys of its window, on volumes, plus ``rpb``.

    What follows ``kernel_size`` goes by name: 0.15 had other arguments there than 0.17.
    """
    _refuse_causal(is_causal)
    return _scores(3, query, key, rpb, kernel_size, dilation, additional_keys)


def na3d_av(
    attn: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    *,
    dilation: PerAxis | None = 1,
    additional_values: Tensor | None = None,
    is_causal: bool | Sequence[bool] | None = False,
) -> Tensor:
    """Sum of the values of each window by the weights ``attn``, on volumes.

    What follows ``kernel_size`` goes by name: 0.15 had other arguments there than 0.17.
    """
    _refuse_causal(is_causal)
    return _values(3, attn, value, kernel_size, dilation, additional_values)


def na1d_qk_with_bias(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size: PerAxis,
    dilation: PerAxis | None = 1,
    additional_keys: Tensor | None = None,
) -> Tensor:
    """`na1d_qk` with the bias in third place (0.15)."""
    return _scores(1, query, key, bias, kernel_size, dilation, additional_keys)


def na2d_qk_with_bias(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size: PerAxis,
    dilation: PerAxis | None = 1,
    additional_keys: Tensor | None = None,
) -> Tensor:
    """`na2d_qk` with the bias in third place (0.15)."""
    return _scores(2, query, key, bias, kernel_size, dilation, additional_keys)


def na3d_qk_with_bias(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    kernel_size_d: int,
    kernel_size: int,
    dilation_d: int = 1,
    dilation: int = 1,
    additional_keys: Tensor | None = None,
) -> Tensor:
    """Dot products on volumes plus a bias, with the depth's kernel and dilation first (0.15)."""
    kernels, dilations = (kernel_size_d, kernel_size, kernel_size), (dilation_d, dilation, dilation)
    return _scores(3, query, key, bias, kernels, dilations, additional_keys)


def natten3dqk(
    query: Tensor, key: Tensor, kernel_size_d: int, kernel_size: int, dilation_d: int = 1, dilation: int = 1
) -> Tensor:
    """`na3d_qk_with_bias` without a bias."""
    return na3d_qk_with_bias(query, key, None, kernel_size_d, kernel_size, dilation_d, dilation)


def natten3dav(
    attn: Tensor, value: Tensor, kernel_size_d: int, kernel_size: int, dilation_d: int = 1, dilation: int = 1
) -> Tensor:
    """`na3d_av` with the depth's kernel and dilation first (0.14 and 0.15)."""
    kernels, dilations = (kernel_size_d, kernel_size, kernel_size), (dilation_d, dilation, dilation)
    return _values(3, attn, value, kernels, dilations, None)


natten1dqk, natten1dav, natten1dqkrpb = na1d_qk, na1d_av, na1d_qk_with_bias
natten2dqk, natten2dav, natten2dqkrpb = na2d_qk, na2d_av, na2d_qk_with_bias
natten3dqkrpb = na3d_qk_with_bias


class _Function:
    """What code calls ``.apply`` of: the autograd functions of 0.14."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.apply = function


NATTEN1DQKRPBFunction, NATTEN1DAVFunction = _Function(natten1dqkrpb), _Function(natten1dav)
NATTEN2DQKRPBFunction, NATTEN2DAVFunction = _Function(natten2dqkrpb), _Function(natten2dav)
NATTEN3DQKRPBFunction, NATTEN3DAVFunction = _Function(natten3dqkrpb), _Function(natten3dav)
