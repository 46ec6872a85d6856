"""Attention specs: small frozen dataclasses that say how a layer attends, by name, from YAML or in code.

A spec builds the pattern of a layer from its number of heads and tokens. Specs are all that most users need:
``sparsify(model, Fibottention())``.
"""

from fibottention.specs.base import AttentionCost, AttentionSpec, GridSize, make_spec, nearest, spec_names, square_grid
from fibottention.specs.keep import (
    BigBird,
    CrissCross,
    Dense,
    DilatedWindow,
    Exponential,
    Fibonacci,
    Fibottention,
    GridAttention,
    Longformer,
    Neighborhood,
    RandomPairs,
    SlidingWindow,
    SparseTransformer,
    WindowPartition,
)
from fibottention.specs.rivals import EfficientAttention, Linformer, TopK
from fibottention.specs.size import fit_macs, fit_share
from fibottention.specs.weights import LSA, SATA

__all__ = [
    "LSA",
    "SATA",
    "AttentionCost",
    "AttentionSpec",
    "BigBird",
    "CrissCross",
    "Dense",
    "DilatedWindow",
    "EfficientAttention",
    "Exponential",
    "Fibonacci",
    "Fibottention",
    "GridAttention",
    "GridSize",
    "Linformer",
    "Longformer",
    "Neighborhood",
    "RandomPairs",
    "SlidingWindow",
    "SparseTransformer",
    "TopK",
    "WindowPartition",
    "fit_macs",
    "fit_share",
    "make_spec",
    "nearest",
    "spec_names",
    "square_grid",
]
