"""Windows of diagonals, the same in all heads unless said: dense, sliding, dilated, exponential, Longformer."""

from collections.abc import Sequence

import numpy as np

from fibottention.patterns.pattern import Pattern, pattern_from_pairs

__all__ = ["dense", "dilated_window", "exponential", "longformer", "sliding_window"]


def dense(num_heads: int, num_tokens: int, *, prefix_tokens: int = 0) -> Pattern:
    """Every query sees every key, prefix tokens included.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        prefix_tokens: Number of prefix tokens.
    """
    return Pattern.from_offsets(
        [range(1 - num_tokens, num_tokens)], num_tokens, num_heads=num_heads, prefix_tokens=prefix_tokens
    )


def sliding_window(
    num_heads: int,
    num_tokens: int,
    window: int,
    *,
    include_self: bool = True,
    prefix_tokens: int = 0,
    allow_empty: bool = False,
) -> Pattern:
    """Each query sees the ``window`` tokens on each side of it. Prefix tokens see and are seen by all tokens.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        window: Tokens on each side, at least 0 (1 keeps three keys per query).
        include_self: Keep the token itself too.
        prefix_tokens: Number of prefix tokens.
        allow_empty: Accept queries that keep no key.
    """
    return dilated_window(
        num_heads,
        num_tokens,
        window,
        1,
        include_self=include_self,
        prefix_tokens=prefix_tokens,
        allow_empty=allow_empty,
    )


def dilated_window(
    num_heads: int,
    num_tokens: int,
    window: int,
    dilation: int | Sequence[int] = 2,
    *,
    include_self: bool = True,
    prefix_tokens: int = 0,
    allow_empty: bool = False,
) -> Pattern:
    """Each query sees the distances ``dilation * n`` for n up to ``window``, the paper's constant sequence.

    Prefix tokens see and are seen by all tokens.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        window: Number of distances on each side, at least 0.
        dilation: Step between distances, at least 1; one number for all heads or one per head.
        include_self: Keep the token itself too.
        prefix_tokens: Number of prefix tokens.
        allow_empty: Accept queries that keep no key.

    Raises:
        ValueError: If a number is out of range.
    """
    if window < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    dilations = [dilation] if isinstance(dilation, int) else list(dilation)
    if any(d < 1 for d in dilations):
        raise ValueError(f"dilation must be at least 1, got {min(dilations)}")
    signed = [[d * n for n in range(-window, window + 1) if n or include_self] for d in dilations]
    return Pattern.from_offsets(
        signed, num_tokens, num_heads=num_heads, prefix_tokens=prefix_tokens, allow_empty=allow_empty
    )


def exponential(
    num_heads: int,
    num_tokens: int,
    base: int = 2,
    window: int | None = None,
    *,
    include_self: bool = True,
    prefix_tokens: int = 0,
    allow_empty: bool = False,
) -> Pattern:
    """Each query sees the distances 1, base, base^2, ..., the paper's exponential sequence.

    Prefix tokens see and are seen by all tokens.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        base: Base of the powers, at least 2.
        window: Largest distance (inclusive); ``num_tokens // 3`` if None.
        include_self: Keep the token itself too.
        prefix_tokens: Number of prefix tokens.
        allow_empty: Accept queries that keep no key.

    Raises:
        ValueError: If ``base`` is below 2.
    """
    if base < 2:
        raise ValueError(f"base must be at least 2, got {base}")
    limit = num_tokens // 3 if window is None else window
    distances = [0] if include_self else []
    term = 1
    while term <= limit:
        distances.append(term)
        term *= base
    signed = [s * d for d in distances for s in (1, -1)]
    return Pattern.from_offsets(
        [signed], num_tokens, num_heads=num_heads, prefix_tokens=prefix_tokens, allow_empty=allow_empty
    )


def longformer(
    num_heads: int, num_tokens: int, window: int = 1, global_tokens: int = 0, *, prefix_tokens: int = 0
) -> Pattern:
    """Longformer: a sliding window, and global tokens that see and are seen by all tokens.

    Prefix tokens are global tokens. Source: Beltagy et al., arXiv 2004.05150, section 3.1.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        window: Tokens on each side, at least 0.
        global_tokens: Number of patch tokens, spread evenly over the sequence, that are global as well.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If a number is out of range.
    """
    local = sliding_window(num_heads, num_tokens, window, prefix_tokens=prefix_tokens)
    return local | global_pattern(num_heads, num_tokens, global_tokens, prefix_tokens) if global_tokens else local


def global_pattern(num_heads: int, num_tokens: int, global_tokens: int, prefix_tokens: int) -> Pattern:
    """Evenly spread patch tokens that see and are seen by all; other queries keep nothing else."""
    if not 0 <= global_tokens <= num_tokens:
        raise ValueError(f"global_tokens must be in 0..num_tokens ({num_tokens}), got {global_tokens}")
    chosen = np.arange(global_tokens) * num_tokens // max(global_tokens, 1)
    everyone = np.arange(num_tokens)
    query = np.concatenate([np.repeat(chosen, num_tokens), np.tile(everyone, global_tokens)])
    key = np.concatenate([np.tile(everyone, global_tokens), np.repeat(chosen, num_tokens)])
    return pattern_from_pairs(
        np.zeros_like(query),
        query,
        key,
        num_tokens=num_tokens,
        stored_heads=1,
        num_heads=num_heads,
        prefix_tokens=prefix_tokens,
    )
