"""Attention specs: small frozen dataclasses that say how a layer attends, by name, from YAML or in code.

A spec builds the pattern of a layer from its number of heads and tokens. Specs are all that most users need:
``sparsify(model, Fibottention())``.
"""

from fibottention.specs.base import AttentionSpec, GridSize, make_spec, nearest, spec_names, square_grid
from fibottention.specs.keep import (
    BigBird,
    Dense,
    DilatedWindow,
    Exponential,
    Fibottention,
    Longformer,
    Neighborhood,
    RandomPairs,
    SlidingWindow,
    SparseTransformer,
)
from fibottention.specs.weights import LSA, SATA

__all__ = [
    "LSA",
    "SATA",
    "AttentionSpec",
    "BigBird",
    "Dense",
    "DilatedWindow",
    "Exponential",
    "Fibottention",
    "GridSize",
    "Longformer",
    "Neighborhood",
    "RandomPairs",
    "SlidingWindow",
    "SparseTransformer",
    "make_spec",
    "nearest",
    "spec_names",
    "square_grid",
]
