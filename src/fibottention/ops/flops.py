"""Floating-point operations of the sparse operators, for ``torch.utils.flop_counter``."""

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from fibottention.ops import cpu, triton
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


@register_flop_formula(cpu.attention_operator._opoverload.overloadpacket)
def _attention_flops(q_shape: Any, k_shape: Any, v_shape: Any, *others: Any, **kwargs: Any) -> int:
    """Dot products with the keys and sums of the values, as PyTorch counts its own attention."""
    pattern = others[3]
    return _pair_flops(q_shape, pattern) + _pair_flops(v_shape, pattern)


@register_flop_formula(cpu.attention_backward_operator._opoverload.overloadpacket)
def _attention_backward_flops(grad_shape: Any, weights: Any, q_shape: Any, *others: Any, **kwargs: Any) -> int:
    """Gradients of weights, q, k and v; the probabilities are saved, so nothing is computed again."""
    pattern = others[9]
    return 2 * _pair_flops(q_shape, pattern) + 2 * _pair_flops(grad_shape, pattern)


@register_flop_formula(triton.attention_operator._opoverload.overloadpacket)
def _triton_flops(
    q_shape: Any, k_shape: Any, v_shape: Any, bias: Any, pattern: str, *others: Any, **kwargs: Any
) -> int:
    return _pair_flops(q_shape, pattern) + _pair_flops(v_shape, pattern)


@register_flop_formula(triton.attention_backward_operator._opoverload.overloadpacket)
def _triton_backward_flops(grad_shape: Any, q_shape: Any, *others: Any, **kwargs: Any) -> int:
    """As on the CPU, and the scores once more, which are not saved."""
    pattern = others[5]
    return 3 * _pair_flops(q_shape, pattern) + 2 * _pair_flops(grad_shape, pattern)
