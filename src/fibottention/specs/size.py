"""Specs of a given cost, so that different kinds of attention can be compared at equal cost."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from fibottention.patterns.pattern import check_sizes
from fibottention.specs.base import AttentionSpec, GridSize
from fibottention.specs.weights import SATA

__all__ = ["fit_macs", "fit_share"]

_LARGEST_MISFIT = 1.5  # as a factor
_CLOSE = 0.02  # of the logarithm of the share


def fit_macs(
    spec: AttentionSpec,
    share: float,
    num_heads: int,
    num_tokens: int,
    head_dim: int,
    *,
    prefix_tokens: int = 0,
    grid_size: GridSize | None = None,
) -> AttentionSpec:
    """The spec with its size (window, number of keys, ...) set so that its multiply-accumulates are nearest to a share.

    Args:
        spec: The spec; its other options stay.
        share: Multiply-accumulates of QK^T and AV as a share of those over all pairs, in (0, 1].
        num_heads: Number of heads of a layer.
        num_tokens: Number of patch tokens.
        head_dim: Size of one head.
        prefix_tokens: Number of prefix tokens.
        grid_size: Height and width of the grid of patch tokens; a square if None.

    Raises:
        ValueError: If the share is out of range, or the spec cannot come within a factor of 1.5 of it.
    """
    check_sizes(num_heads, num_tokens, prefix_tokens)

    def share_of(candidate: AttentionSpec) -> float:
        cost = candidate.cost(num_heads, num_tokens, head_dim, prefix_tokens=prefix_tokens, grid_size=grid_size)
        return cost.macs / cost.dense_macs

    return fit_share(spec, share, share_of, num_tokens)


def fit_share(
    spec: AttentionSpec, share: float, share_of: Callable[[AttentionSpec], float], largest: int
) -> AttentionSpec:
    """The spec with its size set so that a share is nearest to a given one.

    Args:
        spec: The spec; its other options stay.
        share: The share, in (0, 1].
        share_of: The share that a candidate has; raises ValueError for one that cannot be had.
        largest: Largest size that is tried.

    Raises:
        ValueError: If the share is out of range, or the spec cannot come within a factor of 1.5 of it.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    if isinstance(spec, SATA):
        over = fit_share(spec.base, share, lambda base: share_of(replace(spec, over=base)), largest)
        return replace(spec, over=over)
    misfits: list[tuple[float, AttentionSpec, float]] = []
    reason: ValueError | None = None
    for candidate in (*_automatic(spec), *_candidates(spec, share, largest)):
        try:
            reached = share_of(candidate)
        except ValueError as error:
            reason = error  # too large for these tokens, or without a key for some query
            continue
        if spec.size_option != "stride" and reached > 3 * share and misfits and reached > misfits[-1][2]:
            break  # sizes only grow, and so does the cost
        misfits.append((abs(math.log(reached / share)), candidate, reached))
    if not misfits:
        raise ValueError(f"{spec.name} cannot be had in any size: {reason}") from reason
    smallest, _, reached = min(misfits, key=lambda entry: entry[0])
    if smallest > math.log(_LARGEST_MISFIT):
        raise ValueError(
            f"{spec.name} cannot be brought to {share:.2%} of the multiply-accumulates of dense attention here; the "
            f"nearest is {reached:.2%}"
        )
    # Nearly as good is good enough: an automatic size stays, else the largest is taken, wherever the search began.
    good = [candidate for misfit, candidate, _ in misfits if misfit <= smallest + _CLOSE]
    is_automatic = spec.size_option is not None and getattr(spec, spec.size_option) is None
    return spec if spec in good and (is_automatic or len(good) == 1) else good[-1]


def _automatic(spec: AttentionSpec) -> list[AttentionSpec]:
    """The spec itself if it has no size, or one that follows from the tokens."""
    return [spec] if spec.size_option is None or getattr(spec, spec.size_option) is None else []


def _candidates(spec: AttentionSpec, share: float, largest: int) -> Iterator[AttentionSpec]:
    option = spec.size_option
    if option is None:
        return
    if {field.name: field.type for field in fields(spec)}[option] is float:
        # The share of patch pairs is at most that of all pairs.
        for step in range(1, 101):
            yield replace(spec, **{option: share * step / 100})
        return
    size = getattr(spec, "w_min", 1) if option == "w_max" else 0 if option == "window" else 1
    while size <= largest:
        yield replace(spec, **{option: size})
        size = max(size + 1, int(size * 1.04))
