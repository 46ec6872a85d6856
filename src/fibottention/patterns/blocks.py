"""Patterns with explicit rows: Sparse Transformer, BigBird, random pairs, axial and grid attention."""

import numpy as np

from fibottention.patterns.pattern import Int64Array, Pattern, pattern_from_pairs
from fibottention.patterns.windows import global_pattern, sliding_window

__all__ = ["axial", "bigbird", "fixed", "grid", "random", "strided"]


def strided(
    num_heads: int,
    num_tokens: int,
    stride: int | None = None,
    window: int | None = None,
    *,
    split_heads: bool = False,
    prefix_tokens: int = 0,
) -> Pattern:
    """Sparse Transformer, strided: a local window and every ``stride``-th token, on both sides.

    Prefix tokens see and are seen by all tokens. Source: Child et al., arXiv 1904.10509, section 4.3, without the
    causal half.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        stride: Distance between the far keys; the rounded square root of ``num_tokens`` if None, as the paper advises.
        window: Tokens on each side of the local part; ``stride - 1`` if None, as in the paper.
        split_heads: Give the local part to the first half of the heads and the far keys to the others, instead of
            both to every head.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If ``stride`` is below 1 or ``window`` below 0.
    """
    stride = _stride(num_tokens, stride)
    window = stride - 1 if window is None else window
    if window < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    local = set(range(-window, window + 1))
    steps = num_tokens // stride
    far = {stride * n for n in range(-steps, steps + 1)}
    first_half = (num_heads + 1) // 2
    heads = [local] * first_half + [far] * (num_heads - first_half) if split_heads else [local | far]
    return Pattern.from_offsets(heads, num_tokens, num_heads=num_heads, prefix_tokens=prefix_tokens)


def fixed(
    num_heads: int, num_tokens: int, stride: int | None = None, summary: int = 1, *, prefix_tokens: int = 0
) -> Pattern:
    """Sparse Transformer, fixed: the query's own block, and the last ``summary`` tokens of every block.

    Prefix tokens see and are seen by all tokens. Source: Child et al., arXiv 1904.10509, section 4.3, without the
    causal half.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        stride: Block length; the rounded square root of ``num_tokens`` if None.
        summary: Tokens at the end of each block that every query sees, in 0..stride.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If ``stride`` or ``summary`` is out of range.
    """
    stride = _stride(num_tokens, stride)
    if not 0 <= summary <= stride:
        raise ValueError(f"summary must be in 0..stride ({stride}), got {summary}")
    token = np.arange(num_tokens)
    own = token[:, None] // stride * stride + np.arange(stride)[None]
    summaries = np.tile(token[token % stride >= stride - summary], (num_tokens, 1))
    return _shared_rows(np.concatenate([own, summaries], 1), num_heads, num_tokens, prefix_tokens)


def bigbird(
    num_heads: int,
    num_tokens: int,
    window: int = 1,
    random_keys: int = 1,
    global_tokens: int = 0,
    seed: int = 0,
    *,
    prefix_tokens: int = 0,
) -> Pattern:
    """BigBird: a sliding window, random keys (drawn per head), and global tokens.

    Prefix tokens are global tokens, so the default with a CLS token has one global token, as in the published
    comparison. Source: Zaheer et al., arXiv 2007.14062, section 2, with blocks of one token.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        window: Tokens on each side, at least 0.
        random_keys: Random keys per query, outside the window where there are enough.
        global_tokens: Number of patch tokens, spread evenly, that are global as well.
        seed: Seed of the random keys.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If a number is out of range.
    """
    if random_keys < 0:
        raise ValueError(f"random_keys must be at least 0, got {random_keys}")
    pattern = sliding_window(num_heads, num_tokens, window, prefix_tokens=prefix_tokens)
    outside = num_tokens - 2 * window - 1
    if random_keys and outside > 0:
        # A shift of window + 1 .. N - window - 1, taken modulo N, lands outside the window of every query.
        shifts = _distinct_keys(num_heads * num_tokens, outside, min(random_keys, outside), seed) + window + 1
        query = np.tile(np.arange(num_tokens), num_heads)[:, None]
        pattern |= _head_rows((query + shifts) % num_tokens, num_heads, num_tokens, prefix_tokens)
    if global_tokens:
        pattern |= global_pattern(num_heads, num_tokens, global_tokens, prefix_tokens)
    return pattern


def random(
    num_heads: int, num_tokens: int, density: float = 0.0195, seed: int = 0, *, prefix_tokens: int = 0
) -> Pattern:
    """Random keys: every query of every head sees the same number of keys, drawn without repetition.

    Prefix tokens see and are seen by all tokens.

    Args:
        num_heads: Number of heads.
        num_tokens: Number of patch tokens.
        density: Share of keys to keep per query, in (0, 1]; at least one key is kept. The default is the published
            masking ratio of .9805.
        seed: Seed of the draw.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If ``density`` is out of range.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}")
    keys = _distinct_keys(num_heads * num_tokens, num_tokens, max(1, round(density * num_tokens)), seed)
    return _head_rows(keys, num_heads, num_tokens, prefix_tokens)


def axial(num_heads: int, grid_size: tuple[int, int], *, prefix_tokens: int = 0) -> Pattern:
    """Axial (criss-cross) attention: each query sees the tokens of its row and of its column.

    Prefix tokens see and are seen by all tokens. Source: CCNet, arXiv 1811.11721.

    Args:
        num_heads: Number of heads.
        grid_size: Height and width of the grid of patch tokens, in raster order.
        prefix_tokens: Number of prefix tokens.
    """
    height, width = grid_size
    y, x = np.divmod(np.arange(height * width), width)
    row = y[:, None] * width + np.arange(width)[None]
    column = np.arange(height)[None] * width + x[:, None]
    return _shared_rows(np.concatenate([row, column], 1), num_heads, height * width, prefix_tokens)


def grid(num_heads: int, grid_size: tuple[int, int], size: int = 7, *, prefix_tokens: int = 0) -> Pattern:
    """Sparse grid attention: each query sees ``size`` by ``size`` tokens, spread evenly and itself one of them.

    Tokens see each other if they are a multiple of a step apart in both directions; the step is the side of the grid
    divided by ``size``, rounded up. Prefix tokens see and are seen by all tokens. Source: MaxViT, arXiv 2204.01697.

    Args:
        num_heads: Number of heads.
        grid_size: Height and width of the grid of patch tokens, in raster order.
        size: Tokens along each axis that a query sees; one fewer for some where the side is no multiple of it.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If ``size`` is below 1 or larger than the grid.
    """
    height, width = grid_size
    if not 1 <= size <= min(grid_size):
        raise ValueError(f"size must be in 1..{min(grid_size)} for a grid of {height} x {width}, got {size}")
    steps = -(-height // size), -(-width // size)
    y, x = np.divmod(np.arange(height * width), width)
    rows = y[:, None] % steps[0] + np.arange(size)[None] * steps[0]
    columns = x[:, None] % steps[1] + np.arange(size)[None] * steps[1]
    return _rows_by_columns(rows, columns, num_heads, grid_size, prefix_tokens)


def window_partition(num_heads: int, grid_size: tuple[int, int], size: int = 14, *, prefix_tokens: int = 0) -> Pattern:
    """Windows side by side: each query sees the tokens of its own window of ``size`` by ``size``.

    Windows at the right and at the bottom are smaller where the grid is no multiple of their size. Prefix tokens see
    and are seen by all tokens. Source: ViTDet, arXiv 2203.16527, without its padding.

    Args:
        num_heads: Number of heads.
        grid_size: Height and width of the grid of patch tokens, in raster order.
        size: Side of a window.
        prefix_tokens: Number of prefix tokens.

    Raises:
        ValueError: If ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    height, width = grid_size
    y, x = np.divmod(np.arange(height * width), width)
    rows, columns = (
        axis[:, None] // size * size + np.arange(min(size, side)) for axis, side in zip((y, x), grid_size, strict=True)
    )
    return _rows_by_columns(rows, columns, num_heads, grid_size, prefix_tokens)


def _stride(num_tokens: int, stride: int | None) -> int:
    stride = round(num_tokens**0.5) if stride is None else stride
    if stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}")
    return stride


def _rows_by_columns(
    rows: Int64Array, columns: Int64Array, num_heads: int, grid_size: tuple[int, int], prefix_tokens: int
) -> Pattern:
    """Pattern of queries that see the tokens where their rows and columns of the grid cross, those outside dropped."""
    height, width = grid_size
    keys = rows[:, :, None] * width + columns[:, None, :]
    outside = (rows >= height)[:, :, None] | (columns >= width)[:, None, :]
    keys = np.where(outside, height * width, keys).reshape(height * width, -1)
    return _shared_rows(keys, num_heads, height * width, prefix_tokens)


def _shared_rows(keys: Int64Array, num_heads: int, num_tokens: int, prefix_tokens: int) -> Pattern:
    """Row pattern for all heads from ``(N, K)`` keys; keys past the end are dropped."""
    query, slot = np.nonzero(keys < num_tokens)
    return pattern_from_pairs(
        np.zeros_like(query),
        query,
        keys[query, slot],
        num_tokens=num_tokens,
        stored_heads=1,
        num_heads=num_heads,
        prefix_tokens=prefix_tokens,
    )


def _head_rows(keys: Int64Array, num_heads: int, num_tokens: int, prefix_tokens: int) -> Pattern:
    """Row pattern from the ``(H * N, K)`` keys of all heads."""
    row = np.repeat(np.arange(num_heads * num_tokens), keys.shape[1])
    return pattern_from_pairs(
        row // num_tokens,
        row % num_tokens,
        keys.reshape(-1),
        num_tokens=num_tokens,
        stored_heads=num_heads,
        num_heads=num_heads,
        prefix_tokens=prefix_tokens,
    )


def _distinct_keys(rows: int, population: int, count: int, seed: int) -> Int64Array:
    """``(rows, count)`` draws from ``range(population)``, without repetition within a row."""
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    generator = np.random.default_rng(seed)
    if count * count > population:
        # Many draws from few keys would repeat often: order random numbers instead, a block of rows at a time.
        block = max(1, 2**22 // population)
        parts = [
            generator.random((min(block, rows - start), population)).argsort(1)[:, :count]
            for start in range(0, rows, block)
        ]
        return np.concatenate(parts)
    keys = generator.integers(population, size=(rows, count))
    repeated = np.arange(rows)
    while repeated.size:
        ordered = np.sort(keys[repeated], 1)
        repeated = repeated[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
        keys[repeated] = generator.integers(population, size=(repeated.size, count))
    return keys
