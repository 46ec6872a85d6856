"""Exact integer sequences: Fibonacci, the rows of the Wythoff array, and the head windows.

Everything here is integer arithmetic, so the results are exact for any index.
Source: Fibottention, arXiv 2406.19391, section 3.
"""

from math import isqrt

__all__ = ["fibonacci", "head_window", "modified_wythoff_row", "wythoff_row"]


def fibonacci(a: int, b: int, limit: int) -> tuple[int, ...]:
    """Terms of the generalized Fibonacci sequence ``a, b, a + b, ...`` that do not exceed ``limit``.

    Args:
        a: First term, at least 0.
        b: Second term, at least 0. ``a`` and ``b`` must not both be 0.
        limit: Largest term to keep (inclusive). The first term is checked too.

    Returns:
        The kept terms in sequence order, repeated terms included (``fibonacci(0, 1, 3)`` is ``(0, 1, 1, 2, 3)``).

    Raises:
        ValueError: If a term is negative or both are 0.
    """
    if a < 0 or b < 0 or a == b == 0:
        raise ValueError(f"a and b must be at least 0 and not both 0, got a={a}, b={b}")
    terms = [a] if a <= limit else []
    while b <= limit:
        terms.append(b)
        a, b = b, a + b
    return tuple(terms)


def _golden_floor(i: int) -> int:
    return (i + isqrt(5 * i * i)) // 2


def _check_row(i: int) -> None:
    if i < 1:
        raise ValueError(f"i must be at least 1 (rows are counted from 1), got {i}")


def wythoff_row(i: int) -> tuple[int, int]:
    """First two terms of row ``i`` of the Wythoff array: floor(floor(i phi) phi) and floor(floor(i phi) phi^2).

    Args:
        i: Row number, counted from 1.

    Returns:
        The pair ``(a, b)``; ``fibonacci(a, b, limit)`` continues the row.
    """
    _check_row(i)
    f = _golden_floor(i)
    a = f + i - 1
    return a, a + f


def modified_wythoff_row(i: int) -> tuple[int, int]:
    """First two terms of row ``i`` with the two preceding terms of the Wythoff row put in front.

    Args:
        i: Row number, counted from 1.

    Returns:
        The pair ``(i - 1, floor(i phi))``, whose sequence goes on with ``wythoff_row(i)``.
    """
    _check_row(i)
    return i - 1, _golden_floor(i)


def head_window(i: int, num_heads: int, w_min: int, w_max: int) -> int:
    """Window of head ``i``: ``w_min + floor((w_max - w_min) (i - 1) / (num_heads - 1))``.

    Args:
        i: Head number, counted from 1 to ``num_heads``.
        num_heads: Number of heads. A single head gets ``w_max``.
        w_min: Window of the first head, in tokens.
        w_max: Window of the last head, in tokens; at least ``w_min``.

    Returns:
        The largest offset that head ``i`` may use.

    Raises:
        ValueError: If a number is out of range.
    """
    if not 1 <= i <= num_heads:
        raise ValueError(f"i must be in 1..num_heads ({num_heads}), got {i}")
    if not 0 <= w_min <= w_max:
        raise ValueError(f"w_min and w_max must satisfy 0 <= w_min <= w_max, got w_min={w_min}, w_max={w_max}")
    if num_heads == 1:
        return w_max
    return w_min + (w_max - w_min) * (i - 1) // (num_heads - 1)
