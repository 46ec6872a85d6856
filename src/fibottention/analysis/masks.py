"""Pictures of patterns: the mask of each head."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fibottention.patterns.pattern import Pattern

__all__ = ["draw_masks", "mask_figure"]

_LARGEST_PICTURE = 1024  # cells a side; longer sequences are binned


def _picture(pattern: Pattern, head: int) -> np.ndarray:
    """Which cells of a picture of a head's mask hold a kept pair."""
    stored = head if pattern.stored_heads > 1 else 0
    if pattern.offsets is not None:
        return _picture_of_offsets(pattern, pattern.offsets[stored])
    rows, length = pattern.rows, pattern.sequence_length
    first, last = rows.starts[stored * length], rows.starts[(stored + 1) * length]
    counts = np.diff(rows.starts[stored * length : (stored + 1) * length + 1])
    query, key = np.repeat(np.arange(length), counts), rows.indices[first:last]
    step = math.ceil(length / _LARGEST_PICTURE)
    side = math.ceil(length / step)
    picture = np.bincount(query // step * side + key // step, minlength=side * side).reshape(side, side)
    return picture > 0


def _picture_of_offsets(pattern: Pattern, offsets: Sequence[int]) -> np.ndarray:
    """The same from diagonals, without a list of the pairs, which may be too long for the memory."""
    length, prefix = pattern.sequence_length, pattern.prefix_tokens
    step = math.ceil(length / _LARGEST_PICTURE)
    side = math.ceil(length / step)
    picture = np.zeros((side, side), dtype=bool)
    picture[: math.ceil(prefix / step)] = picture[:, : math.ceil(prefix / step)] = True
    cells = np.arange(side)[None]
    for begin in range(0, len(offsets), _LARGEST_PICTURE):
        offset = np.array(offsets[begin : begin + _LARGEST_PICTURE])[:, None]
        # Queries of each row of cells that are on the diagonal; their keys are in one cell or in two.
        first = np.maximum(cells * step, prefix + np.maximum(0, -offset))
        last = np.minimum((cells + 1) * step, length - np.maximum(0, offset)) - 1
        on = first <= last
        for query in (first, last):
            picture[np.broadcast_to(cells, on.shape)[on], ((query + offset) // step)[on]] = True
    return picture


def mask_figure(pattern: Pattern, title: str = "") -> Figure:
    """One panel per head: kept pairs dark, queries down, keys across.

    Args:
        pattern: The pattern.
        title: Title of the whole figure.
    """
    heads = pattern.num_heads if pattern.stored_heads > 1 else 1
    columns = min(heads, 6 if heads > 4 else 4)
    lines = math.ceil(heads / columns)
    figure = Figure(figsize=(2.1 * columns + 0.4, 2.35 * lines + 0.6), layout="constrained")
    axes = np.atleast_1d(figure.subplots(lines, columns, squeeze=False)).reshape(-1)
    length = pattern.sequence_length
    for head, axis in enumerate(axes):
        if head >= heads:
            axis.set_visible(False)
            continue
        axis.imshow(
            _picture(pattern, head),
            cmap="Blues",
            vmin=0,
            vmax=1,
            interpolation="nearest" if length <= 64 else "antialiased",
            extent=(-0.5, length - 0.5, length - 0.5, -0.5),
        )
        axis.set_title(f"head {head + 1}" if pattern.stored_heads > 1 else "all heads", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.label_outer()
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("key token", fontsize=9)
    figure.supylabel("query token", fontsize=9)
    return figure


def draw_masks(pattern: Pattern, path: str | Path, title: str = "") -> None:
    """Save a picture of the masks of all heads as PNG.

    Args:
        pattern: The pattern.
        path: File to write.
        title: Title of the picture.
    """
    mask_figure(pattern, title).savefig(str(path), dpi=150, format="png")
