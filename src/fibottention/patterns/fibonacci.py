"""Dilation sequences per head: the general case of the Fibottention paper, and its Fibonacci and Wythoff instances."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from fibottention.patterns.pattern import Pattern, check_sizes
from fibottention.sequences import fibonacci as fibonacci_terms
from fibottention.sequences import head_window, modified_wythoff_row, wythoff_row

__all__ = ["OnEmpty", "Variant", "default_windows", "fibonacci", "offsets", "wythoff"]

Variant = Literal["wythoff", "modified"]
OnEmpty = Literal["cycle", "self", "first", "error"]

_ROWS: dict[str, Callable[[int], tuple[int, int]]] = {"wythoff": wythoff_row, "modified": modified_wythoff_row}


def offsets(
    sequences: Sequence[Iterable[int]],
    num_tokens: int,
    windows: int | Sequence[int] | None = None,
    *,
    prefix_tokens: int = 0,
    allow_empty: bool = False,
) -> Pattern:
    """Any dilation sequence per head: head ``i`` keeps ``|query - key| = d`` for its terms ``d`` within its window.

    Prefix tokens see and are seen by all tokens. Source: arXiv 2406.19391, section 3.

    Args:
        sequences: One finite collection of distances (at least 0) per head.
        num_tokens: Number of patch tokens.
        windows: Largest distance to keep (inclusive), one number for all heads or one per head; None keeps all.
        prefix_tokens: Number of prefix tokens.
        allow_empty: Accept queries that keep no key.

    Raises:
        ValueError: If a distance is negative, the numbers of windows and sequences differ, or a query keeps no key.
    """
    if windows is None or isinstance(windows, int):
        limits = [num_tokens if windows is None else windows] * len(sequences)
    else:
        limits = list(windows)
    if len(limits) != len(sequences):
        raise ValueError(f"windows must hold one number per head ({len(sequences)}), got {len(limits)}")
    signed = []
    for h, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
        distances = [int(d) for d in sequence]
        if any(d < 0 for d in distances):
            raise ValueError(f"sequences[{h}] must hold distances of at least 0, got {min(distances)}")
        signed.append([s for d in distances if d <= limit for s in (d, -d)])
    return Pattern.from_offsets(signed, num_tokens, prefix_tokens=prefix_tokens, allow_empty=allow_empty)


def fibonacci(
    num_heads: int,
    num_tokens: int,
    window: int | None = None,
    *,
    include_self: bool = True,
    prefix_tokens: int = 0,
    allow_empty: bool = False,
) -> Pattern:
    """The Fibonacci numbers 1, 2, 3, 5, ... as distances, the same in all heads.

    Prefix tokens see and are seen by all tokens.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        window: Largest distance (inclusive); ``num_tokens // 3`` if None.
        include_self: Keep the token itself (distance 0) too.
        prefix_tokens: Number of prefix tokens.
        allow_empty: Accept queries that keep no key.
    """
    terms = fibonacci_terms(1, 2, num_tokens // 3 if window is None else window)
    distances = (0, *terms) if include_self else terms
    return offsets([distances] * num_heads, num_tokens, prefix_tokens=prefix_tokens, allow_empty=allow_empty)


def default_windows(num_tokens: int, w_min: int, w_max: int | None) -> tuple[int, int]:
    """Published head windows for a token count: ``w_max`` is ``num_tokens // 3`` if None, and then caps ``w_min``."""
    if w_max is None:
        w_max = num_tokens // 3
        w_min = min(w_min, w_max)
    return w_min, w_max


def wythoff(
    num_heads: int,
    num_tokens: int,
    w_min: int = 5,
    w_max: int | None = None,
    variant: Variant = "wythoff",
    on_empty: OnEmpty = "cycle",
    prefix_tokens: int = 0,
    head_order: Sequence[int] | None = None,
    *,
    allow_empty: bool = False,
) -> Pattern:
    """Fibottention: head ``i`` keeps the distances in row ``i`` of the Wythoff array, within the head's window.

    Prefix tokens see and are seen by all tokens, in every head. Source: arXiv 2406.19391, section 3.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens, in raster order.
        w_min: Window of head 1, in tokens.
        w_max: Window of the last head; ``num_tokens // 3`` if None, as published.
        variant: ``"wythoff"`` for the rows themselves (heads share no distance), ``"modified"`` for the rows with the
            two preceding terms in front.
        on_empty: What a head gets whose row has no term within its window. ``"cycle"``: row ``(i - 1) mod R + 1``,
            where R rows have a term within ``w_max``; of this row the terms within the head's window, at least the
            first. ``"self"``: the token itself. ``"first"``: the first term of its row although it exceeds the
            window, as in the released code. ``"error"``: raise.
        prefix_tokens: Number of prefix tokens.
        head_order: Row of each head slot, a permutation of ``1..num_heads``; ascending if None.
        allow_empty: Accept queries that keep no key.

    Raises:
        ValueError: If an argument is out of range, or a head or query is left without a key.
    """
    if variant not in _ROWS:
        raise ValueError(f"variant must be 'wythoff' or 'modified', got {variant!r}")
    if on_empty not in ("cycle", "self", "first", "error"):
        raise ValueError(f"on_empty must be 'cycle', 'self', 'first' or 'error', got {on_empty!r}")
    check_sizes(num_heads, num_tokens, prefix_tokens)
    row_start = _ROWS[variant]
    w_min, w_max = default_windows(num_tokens, w_min, w_max)
    # First terms grow with the row, so the rows with a term within w_max are the first ones.
    usable_rows = 0
    while usable_rows < num_heads and row_start(usable_rows + 1)[0] <= w_max:
        usable_rows += 1
    sequences: list[tuple[int, ...]] = []
    for i in range(1, num_heads + 1):
        window = head_window(i, num_heads, w_min, w_max)
        terms = fibonacci_terms(*row_start(i), window)
        if not terms and on_empty == "error":
            raise ValueError(
                f"head {i} of {num_heads} has no term within its window {window} for num_tokens={num_tokens} (its "
                f"first is {row_start(i)[0]}); use fewer heads, more tokens, a larger w_max, or on_empty='cycle'"
            )
        if not terms and on_empty == "first":
            first = row_start(i)[0]
            if first >= num_tokens:
                raise ValueError(
                    f"on_empty='first' is not possible: the first term of head {i} is {first}, which needs more than "
                    f"num_tokens={num_tokens} tokens; use on_empty='cycle'"
                )
            terms = (first,)
        if not terms and on_empty == "cycle" and usable_rows:
            row = row_start((i - 1) % usable_rows + 1)
            terms = fibonacci_terms(*row, window) or (row[0],)
        sequences.append(terms or (0,))
    if head_order is not None:
        if sorted(head_order) != list(range(1, num_heads + 1)):
            raise ValueError(f"head_order must be a permutation of 1..{num_heads}, got {list(head_order)}")
        sequences = [sequences[i - 1] for i in head_order]
    return offsets(sequences, num_tokens, prefix_tokens=prefix_tokens, allow_empty=allow_empty)
