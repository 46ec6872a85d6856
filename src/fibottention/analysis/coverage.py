"""Which tokens heads and layers reach: distances by head, and from where information has arrived after a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fibottention.analysis.colours import COLOURS
from fibottention.patterns.pattern import Pattern

__all__ = ["Coverage", "coverage", "draw_coverage"]

_MOST_QUERIES = 512
_LARGEST_BLOCK = 2**25


@dataclass(frozen=True)
class Coverage:
    """What the layers of a model reach.

    Attributes:
        distances: ``(layers, heads, N)``: pairs of patches at each distance |query - key| in raster order, as a share
            of all pairs at that distance.
        union: Share of the pairs of patches that at least one head keeps, by layer.
        reached: Share of the patches from which information has arrived at a patch after each layer, through patches
            only; mean over patches.
        reached_with_prefix: The same through prefix tokens too, which see and are seen by all.
    """

    distances: NDArray[np.float64]
    union: list[float]
    reached: list[float]
    reached_with_prefix: list[float]

    @property
    def layers_to_all(self) -> int | None:
        """Number of layers after which every patch has heard of every other, through patches; None if it never does."""
        return next((i for i, share in enumerate(self.reached, 1) if share == 1), None)


def coverage(patterns: Sequence[Pattern]) -> Coverage:
    """What a model reaches whose layers have these patterns.

    Reach is computed for all patches, or for 512 spread evenly over them if there are more, over the kept pairs only.

    Args:
        patterns: The pattern of each layer, in order, for the same tokens.

    Raises:
        ValueError: If there is no pattern, or they are for different numbers of tokens.
    """
    if isinstance(patterns, Pattern):
        raise ValueError("patterns must be a sequence, one pattern per layer, got a single pattern")
    sizes = {(pattern.prefix_tokens, pattern.num_tokens, pattern.num_heads) for pattern in patterns}
    if len(sizes) != 1:
        raise ValueError(f"patterns must be one or more for the same tokens and heads, got {sorted(sizes)}")
    ((prefix, tokens, heads),) = sizes
    at_distance = np.concatenate([[tokens], 2.0 * np.arange(tokens - 1, 0, -1)])
    shares = np.zeros((len(patterns), heads, tokens))
    union, edges = [], []
    for layer, pattern in enumerate(patterns):
        head, query, key = (array.numpy().astype(np.int64) for array in pattern.pairs())
        patches = (query >= prefix) & (key >= prefix)
        head, query, key = head[patches], query[patches] - prefix, key[patches] - prefix
        counts = np.zeros((pattern.stored_heads, tokens))
        np.add.at(counts, (head, abs(query - key)), 1)
        shares[layer] = counts / at_distance
        pairs = np.unique(query * tokens + key)
        union.append(len(pairs) / tokens**2)
        edges.append((pairs // tokens, pairs % tokens))
    return Coverage(shares, union, _reached(edges, tokens, False), _reached(edges, tokens, bool(prefix)))


def _reached(edges: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], tokens: int, prefix: bool) -> list[float]:
    """Share of the sources heard of after each layer; a patch keeps what it knows (the residual connection)."""
    sources = np.arange(tokens) if tokens <= _MOST_QUERIES else np.linspace(0, tokens - 1, _MOST_QUERIES).astype(int)
    known = np.zeros((tokens, len(sources)), dtype=bool)  # by patch
    known[sources, np.arange(len(sources))] = True
    of_prefix = np.zeros(len(sources), dtype=bool)
    shares = []
    for query, key in edges:
        before, prefix_before = known, of_prefix
        known = before.copy()
        # Pairs are sorted by query, so the keys of each query are one run; a block of runs at a time, to bound memory.
        starts = np.flatnonzero(np.diff(query, prepend=-1))
        block = max(1, _LARGEST_BLOCK * len(starts) // max(1, len(key) * len(sources)))
        for first in range(0, len(starts), block):
            own = starts[first : first + block]
            stop = starts[first + block] if first + block < len(starts) else len(key)
            known[query[own]] |= np.logical_or.reduceat(before[key[own[0] : stop]], own - own[0])
        if prefix:
            known |= prefix_before
            of_prefix = prefix_before | before.any(0)
        shares.append(float(known.mean()))
    return shares


def draw_coverage(result: Coverage) -> Figure:
    """Distances by head of the first layer and over all layers, and the reach by layer."""
    layers = len(result.distances)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    of_heads, of_layers, reach = figure.subplots(1, 3, width_ratios=[1.2, 1.2, 1])
    shown = max(1, int(np.flatnonzero(result.distances.any((0, 1))).max(initial=0)) + 1)
    for axis, values, label in (
        (of_heads, result.distances[0], "head of layer 1"),
        (of_layers, result.distances.max(1), "layer, any head"),
    ):
        seen = np.ma.masked_equal(values[:, :shown], 0)
        edges = (np.arange(shown + 1) - 0.5, np.arange(len(values) + 1) + 0.5)
        axis.pcolormesh(*edges, seen, cmap="viridis_r", norm=LogNorm(1e-2, 1), rasterized=True)
        axis.set_xlabel("distance |query - key|")
        axis.set_ylabel(label)
        axis.set_yticks(_ticks(len(values)))
        axis.invert_yaxis()
    numbers = range(1, layers + 1)
    reach.plot(numbers, [100 * share for share in result.reached], "o-", color=COLOURS[0], label="through patches")
    if result.reached_with_prefix != result.reached:
        with_prefix = [100 * share for share in result.reached_with_prefix]
        reach.plot(numbers, with_prefix, "s--", color=COLOURS[1], label="and prefix tokens")
    reach.plot(numbers, [100 * share for share in result.union], "^:", color=COLOURS[2], label="one layer alone")
    reach.set_xticks(_ticks(layers))
    reach.set_xlabel("layer")
    reach.set_ylabel("pairs of patches reached (%)")
    reach.set_ylim(0, 103)
    reach.grid(alpha=0.3)
    reach.legend(fontsize=7)
    return figure


def _ticks(count: int) -> list[int]:
    step = max(1, -(-count // 12))
    return list(range(1, count + 1, step))
