"""Patterns: which query-key pairs each head may look at. See `Pattern` and the factories, one per family.

In every factory ``num_tokens`` counts the patch tokens; prefix tokens (CLS, registers) come on top of it.
"""

from fibottention.patterns.blocks import axial, bigbird, fixed, grid, random, strided, window_partition
from fibottention.patterns.fibonacci import fibonacci, offsets, wythoff
from fibottention.patterns.neighborhood import clear_neighborhood_cache, neighborhood
from fibottention.patterns.pattern import Pattern, SparseRows
from fibottention.patterns.windows import dense, dilated_window, exponential, longformer, sliding_window

__all__ = [
    "Pattern",
    "SparseRows",
    "axial",
    "bigbird",
    "clear_neighborhood_cache",
    "dense",
    "dilated_window",
    "exponential",
    "fibonacci",
    "fixed",
    "grid",
    "longformer",
    "neighborhood",
    "offsets",
    "random",
    "sliding_window",
    "strided",
    "window_partition",
    "wythoff",
]
