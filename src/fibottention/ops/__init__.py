"""Sparse attention and its backends."""

import fibottention.ops.flops  # noqa: F401  (registers the formulas)
from fibottention.ops.arguments import WeightTransform
from fibottention.ops.attention import Backend, BackendChoice, Fill, explain_backend, sparse_attention
from fibottention.ops.neighborhood import na1d, na2d, na3d
from fibottention.ops.pairs import pair_dot, pair_softmax, pair_sum, pair_sum_transposed
from fibottention.ops.twist import Twist

__all__ = [
    "Backend",
    "BackendChoice",
    "Fill",
    "Twist",
    "WeightTransform",
    "explain_backend",
    "na1d",
    "na2d",
    "na3d",
    "pair_dot",
    "pair_softmax",
    "pair_sum",
    "pair_sum_transposed",
    "sparse_attention",
]
