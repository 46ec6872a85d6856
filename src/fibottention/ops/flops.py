"""Floating-point operations of the pair operators, for ``torch.utils.flop_counter``."""

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from fibottention.ops.pairs import pair_dot, pair_sum, pair_sum_transposed
from fibottention.patterns.pattern import Pattern

__all__: list[str] = []


def _pair_flops(x_shape: Any, pattern: str) -> int:
    """One multiplication and one addition per pair and channel."""
    return 2 * x_shape[0] * Pattern.parse(pattern).nnz * x_shape[-1]


@register_flop_formula(pair_dot._opoverload.overloadpacket)
def _dot_flops(a_shape: Any, b_shape: Any, pattern: str, **kwargs: Any) -> int:
    return _pair_flops(a_shape, pattern)


@register_flop_formula([op._opoverload.overloadpacket for op in (pair_sum, pair_sum_transposed)])
def _sum_flops(weights_shape: Any, x_shape: Any, pattern: str, **kwargs: Any) -> int:
    return _pair_flops(x_shape, pattern)
