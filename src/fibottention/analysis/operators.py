"""Convolutions and attention side by side: receptive field, multiply-accumulates, parameters and stored weights.

Source: arXiv 2209.15001, table 1, computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fibottention.patterns import neighborhood
from fibottention.specs import AttentionSpec

__all__ = ["Operator", "axis_field", "operators"]

_Links = Callable[[int, int], NDArray[np.bool_]]


@dataclass(frozen=True)
class Operator:
    """One kind of layer on a square feature map.

    Attributes:
        name: What it is.
        field: Height and width of the receptive field of the central token after all layers, in tokens.
        reached: Share of all tokens that are in it: within its bounds there may be gaps.
        macs: Multiply-accumulates of one layer; for attention with the projections of queries, keys, values and output.
        parameters: Weights of one layer, without biases and without what a spec learns beside the projections.
        stored_weights: Attention weights of one layer, over all heads; 0 for convolutions.
    """

    name: str
    field: tuple[int, int]
    reached: float
    macs: int
    parameters: int
    stored_weights: int


def operators(
    side: int,
    dim: int,
    num_heads: int,
    kernel_size: int,
    layers: int,
    specs: Mapping[str, AttentionSpec] | None = None,
) -> list[Operator]:
    """The rows of the table.

    Dilated layers have the dilations 1, k, k^2, ..., as far as the feature map allows.

    Args:
        side: Height and width of the feature map, in tokens.
        dim: Channels.
        num_heads: Heads of the attention layers.
        kernel_size: Side k of kernels, windows and neighborhoods.
        layers: Layers after which the receptive field is taken.
        specs: Further rows, by name.

    Raises:
        ValueError: If a number is below 1, the kernel is even or larger than the feature map, or a spec does not fit.
    """
    for name, value in (("side", side), ("dim", dim), ("num_heads", num_heads), ("layers", layers)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 1 <= kernel_size <= side or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd and in 1..side ({side}), got {kernel_size}")
    tokens, area, projections = side**2, kernel_size**2, 4 * dim**2

    def dilation(layer: int) -> int:
        return max(1, min(kernel_size**layer, side // kernel_size))

    def convolution(name: str, links: _Links, depthwise: bool) -> Operator:
        weights = area * dim * (1 if depthwise else dim)
        return Operator(name, *_square_field(links, side, layers), tokens * weights, weights, 0)

    def attention(name: str, links: _Links, keys: int) -> Operator:
        macs = tokens * projections + 2 * tokens * keys * dim
        return Operator(name, *_square_field(links, side, layers), macs, projections, tokens * keys * num_heads)

    def near(step: Callable[[int], int]) -> _Links:
        return lambda n, layer: _steps(n, kernel_size, step(layer))

    def around(step: Callable[[int], int]) -> _Links:
        return lambda n, layer: neighborhood(1, (n,), kernel_size, dilation=step(layer)).mask()[0].numpy()

    def windows(shift: Callable[[int], int]) -> _Links:
        return lambda n, layer: _same_block(n, kernel_size, shift(layer))

    def of_spec(name: str, spec: AttentionSpec) -> Operator:
        cost = spec.cost(num_heads, tokens, dim // num_heads, grid_size=(side, side))
        field, reached = _field_of_spec(spec, num_heads, side, layers)
        return Operator(name, field, reached, tokens * projections + cost.macs, projections, cost.pairs)

    once: Callable[[int], int] = lambda layer: 1  # noqa: E731
    return [
        convolution("convolution", near(once), False),
        convolution("depthwise convolution", near(once), True),
        convolution("dilated convolution", near(dilation), False),
        attention("self-attention", lambda n, layer: np.ones((n, n), dtype=bool), tokens),
        attention("window attention", windows(lambda layer: 0), area),
        attention("shifted-window attention", windows(lambda layer: layer % 2 * (kernel_size // 2)), area),
        attention("neighborhood attention", around(once), area),
        attention("dilated neighborhood attention", around(dilation), area),
        *(of_spec(name, spec) for name, spec in (specs or {}).items()),
    ]


def _square_field(links: _Links, side: int, layers: int) -> tuple[tuple[int, int], float]:
    """The field and the share of the tokens, of a layer that does the same along both axes."""
    seen = _seen(links, side, layers)
    length = _stretch(seen)
    return (length, length), float(seen.mean()) ** 2


def _field_of_spec(spec: AttentionSpec, num_heads: int, side: int, layers: int) -> tuple[tuple[int, int], float]:
    """The same for a spec, over all its heads."""
    if not spec.has_pattern:
        return (side, side), 1.0
    seen = np.zeros(side**2, dtype=bool)
    seen[side // 2 * side + side // 2] = True
    for layer in reversed(range(layers)):
        pattern = spec.pattern(num_heads, side**2, layer=layer, grid_size=(side, side))
        _, query, key = (part.numpy() for part in pattern.pairs())
        further = np.zeros_like(seen)
        further[key[seen[query]]] = True
        seen = further
    grid = seen.reshape(side, side)
    rows, columns = (np.asarray(grid.any(axis)) for axis in (1, 0))
    return (_stretch(rows), _stretch(columns)), float(seen.mean())


def axis_field(links: _Links, side: int, layers: int) -> int:
    """Length of the stretch of inputs that the central token of an axis depends on after some layers.

    Args:
        links: Which tokens (columns) each token (rows) sees in a layer, from the length of the axis and the layer.
        side: Length of the axis.
        layers: Number of layers.
    """
    return _stretch(_seen(links, side, layers))


def _seen(links: _Links, side: int, layers: int) -> NDArray[np.bool_]:
    seen = np.zeros(side, dtype=bool)
    seen[side // 2] = True
    for layer in reversed(range(layers)):
        seen = np.asarray(links(side, layer)[seen].any(0))
    return seen


def _stretch(seen: NDArray[np.bool_]) -> int:
    """Length from the first to the last one that is seen."""
    inside: Sequence[int] = np.flatnonzero(seen).tolist()
    return inside[-1] - inside[0] + 1


def _steps(n: int, kernel_size: int, dilation: int) -> NDArray[np.bool_]:
    distance = np.arange(n)[None] - np.arange(n)[:, None]
    return (distance % dilation == 0) & (abs(distance) <= dilation * (kernel_size // 2))


def _same_block(n: int, size: int, shift: int) -> NDArray[np.bool_]:
    block = (np.arange(n) + size - shift) // size
    return block[None] == block[:, None]
