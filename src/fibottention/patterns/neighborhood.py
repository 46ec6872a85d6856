"""Neighborhood attention: each query sees the tokens around it on a grid of one to three axes."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fibottention.patterns.pattern import Int64Array, Pattern, check_sizes

__all__ = ["clear_neighborhood_cache", "flag_per_axis", "neighborhood", "per_axis"]

# Pairs of all patterns that are kept for the next call. A pair takes about 40 bytes for the CPU kernel, and three times
# as much once the backend `gather` has used it.
_CACHED_PAIRS = 2**23


class _Recent:
    """The patterns that were asked for last, up to a number of pairs in all."""

    def __init__(self) -> None:
        self._patterns: OrderedDict[tuple[object, ...], Pattern] = OrderedDict()
        self._pairs = 0
        self._lock = threading.Lock()

    def get(self, arguments: tuple[object, ...]) -> Pattern | None:
        with self._lock:
            if (known := self._patterns.get(arguments)) is not None:
                self._patterns.move_to_end(arguments)
            return known

    def put(self, arguments: tuple[object, ...], pattern: Pattern) -> None:
        with self._lock:
            if self._patterns.setdefault(arguments, pattern) is not pattern:
                return
            self._pairs += pattern.stored_pairs
            while len(self._patterns) > 1 and self._pairs > _CACHED_PAIRS:
                self._pairs -= self._patterns.popitem(last=False)[1].stored_pairs

    def clear(self) -> None:
        with self._lock:
            self._patterns.clear()
            self._pairs = 0


_recent = _Recent()


def clear_neighborhood_cache() -> None:
    """Forget the patterns that `neighborhood` keeps for the next call, and the memory that they hold.

    They are kept up to 8 million pairs in all; larger ones one at a time.
    """
    _recent.clear()


class _Axis(NamedTuple):
    """The windows along one axis.

    Attributes:
        keys: ``(length, kernel_size)`` position of each key.
        kept: ``(length, kernel_size)`` whether the query sees it; None if all are seen.
        relation: ``(length, kernel_size)`` row of a table of relative biases, of 2 * kernel_size - 1 rows.
    """

    keys: Int64Array
    kept: NDArray[np.bool_] | None
    relation: Int64Array


def per_axis(name: str, value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One number per axis, from a number for all or a sequence.

    Raises:
        ValueError: If it is neither a number above 0 nor a sequence of ``axes`` of them.
    """
    if type(value) is int and value > 0:
        return (value,) * axes
    values = tuple(value) if isinstance(value, Sequence) else (value,) * axes
    if len(values) != axes or not all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in values):
        raise ValueError(f"{name} must be a whole number or {axes} of them, got {value!r}")
    if min(values) < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return tuple(int(v) for v in values)


def flag_per_axis(name: str, value: bool | Sequence[bool], axes: int) -> tuple[bool, ...]:
    """True or False per axis, from one for all or a sequence.

    Raises:
        ValueError: If it is neither.
    """
    values = tuple(value) if isinstance(value, Sequence) else (value,) * axes
    if len(values) != axes or not all(isinstance(v, bool | np.bool_) for v in values):
        raise ValueError(f"{name} must be True or False or {axes} of them, got {value!r}")
    return tuple(bool(v) for v in values)


def neighborhood(
    num_heads: int,
    grid_size: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    *,
    relation: bool = False,
    prefix_tokens: int = 0,
) -> Pattern:
    """Each query sees a window of ``kernel_size`` tokens around it, ``dilation`` apart, on a grid.

    A window that would leave the grid is shifted back into it, so that every query has the same number of keys, unless
    the axis is causal. Prefix tokens see and are seen by all tokens. The patterns asked for last are kept in memory:
    see `clear_neighborhood_cache`. Sources: Hassani et al., arXiv 2204.07143 (NA) and arXiv 2209.15001 (DiNA);
    ``stride`` and ``is_causal`` as in natten 0.21.

    Args:
        num_heads: Number of heads.
        grid_size: Length of each axis, of one to three; tokens are numbered in row-major order.
        kernel_size: Keys along each axis; an even one reaches one token further to the front than to the back.
        stride: Number of successive queries that share the window of one of them, at most ``kernel_size``.
        dilation: Step between the keys along each axis, at least 1.
        is_causal: Whether an axis sees no token behind the query.
        relation: Number the pairs by the step from query to key along each axis, for a relative bias: the pattern then
            takes a table ``(H, prod(2 * kernel_size - 1))`` as its bias. Needs ``stride=1``.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If a number is out of range, or ``kernel_size * dilation`` exceeds the length of an axis.
    """
    axes = len(grid_size)
    if not 1 <= axes <= 3:
        raise ValueError(f"grid_size must have one to three axes, got {tuple(grid_size)}")
    grid = per_axis("grid_size", grid_size, axes)
    kernels = per_axis("kernel_size", kernel_size, axes)
    strides = per_axis("stride", stride, axes)
    dilations = per_axis("dilation", dilation, axes)
    causal = flag_per_axis("is_causal", is_causal, axes)
    arguments = (num_heads, grid, kernels, strides, dilations, causal, relation, prefix_tokens)
    if (known := _recent.get(arguments)) is not None:
        return known
    check_sizes(num_heads, int(np.prod(grid)), prefix_tokens)
    if relation and set(strides) != {1}:
        raise ValueError(f"a relative bias needs stride=1, got {stride}")
    windows = [_windows(grid, *of_axis) for of_axis in zip(grid, kernels, strides, dilations, causal, strict=True)]
    pattern = _product(num_heads, grid, kernels, windows, relation, prefix_tokens)
    _recent.put(arguments, pattern)
    return pattern


def _windows(grid: tuple[int, ...], length: int, kernel: int, stride: int, dilation: int, causal: bool) -> _Axis:
    if stride > kernel:
        raise ValueError(f"stride must be at most kernel_size ({kernel}), got {stride}")
    if kernel * dilation > length:
        raise ValueError(
            f"kernel_size * dilation must be at most the length of the axis ({length}), got {kernel} * {dilation}; the "
            f"grid is {' x '.join(map(str, grid))}"
        )
    query = np.arange(length)
    # Tokens of one residue modulo the dilation form a sequence of their own, in which windows are contiguous.
    residue, position = query % dilation, query // dilation
    last = (length - 1 - residue) // dilation
    first_of_group = position // stride * stride
    if causal:
        leader = np.minimum(first_of_group + stride - 1, last)
        start = np.maximum(leader - kernel + 1, 0)
    else:
        leader = np.minimum(first_of_group + stride // 2, last)
        start = np.clip(leader - kernel // 2, 0, last + 1 - kernel)
    window = start[:, None] + np.arange(kernel)
    step = window - position[:, None]
    kept = step <= 0 if causal else None
    return _Axis(window * dilation + residue[:, None], kept, step + kernel - 1)


def _product(
    num_heads: int,
    grid: tuple[int, ...],
    kernels: tuple[int, ...],
    windows: list[_Axis],
    relation: bool,
    prefix_tokens: int,
) -> Pattern:
    axes, num_tokens = len(grid), int(np.prod(grid))

    def spread(values: NDArray[Any], axis: int) -> NDArray[Any]:
        """From ``(length, kernel)`` to the axes of all queries followed by those of all keys."""
        shape = [1] * (2 * axes)
        shape[axis], shape[axes + axis] = values.shape
        return values.reshape(shape)

    full = (*grid, *kernels)
    keys, buckets = np.zeros(full, np.int64), np.zeros(full if relation else 1, np.int32)
    kept = np.ones(full, np.bool_) if any(w.kept is not None for w in windows) else None
    for axis, window in enumerate(windows):
        keys *= grid[axis]
        keys += spread(window.keys, axis)
        if relation:
            buckets *= 2 * kernels[axis] - 1
            buckets += spread(window.relation.astype(np.int32), axis)
        if kept is not None and window.kept is not None:
            kept &= spread(window.kept, axis)
    if kept is None:
        counts = np.full(num_tokens, int(np.prod(kernels)), np.int64)
        keys, buckets = keys.reshape(-1), buckets.reshape(-1)
    else:
        counts = kept.reshape(num_tokens, -1).sum(1)
        keys, buckets = keys[kept], buckets[kept] if relation else buckets
    return Pattern._from_sorted_rows(
        counts,
        keys,
        stored_heads=1,
        num_tokens=num_tokens,
        num_heads=num_heads,
        prefix_tokens=prefix_tokens,
        allow_empty=False,
        relation=buckets if relation else None,
        num_buckets=int(np.prod([2 * k - 1 for k in kernels])) if relation else 0,
    )
