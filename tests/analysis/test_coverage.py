"""Reach of patterns, by hand and by products of masks."""

import numpy as np
import pytest
import torch

from fibottention.analysis.coverage import coverage, draw_coverage
from fibottention.patterns import Pattern, bigbird, sliding_window, wythoff


def by_masks(patterns, prefix):
    """Reach by products of dense boolean masks."""
    length = patterns[0].sequence_length
    start = patterns[0].prefix_tokens
    known = torch.eye(length, dtype=torch.bool)
    shares = []
    for pattern in patterns:
        mask = pattern.mask().any(0)
        if not prefix:
            mask[:start] = mask[:, :start] = False
        known = known | ((mask.float() @ known.float()) > 0)
        shares.append(known[start:, start:].float().mean().item())
    return shares


@pytest.mark.parametrize(
    "patterns",
    [
        [sliding_window(2, 12, 1)] * 4,
        [wythoff(3, 30, prefix_tokens=1), wythoff(3, 30, prefix_tokens=1, head_order=(2, 3, 1))],
        [bigbird(2, 20, seed=i, prefix_tokens=2) for i in range(3)],
    ],
)
def test_reach_is_that_of_products_of_masks(patterns):
    result = coverage(patterns)
    assert result.reached == pytest.approx(by_masks(patterns, False))
    assert result.reached_with_prefix == pytest.approx(by_masks(patterns, True))
    start = patterns[0].prefix_tokens
    union = [p.mask()[:, start:, start:].any(0).float().mean().item() for p in patterns]
    assert result.union == pytest.approx(union)


def test_a_window_spreads_by_its_width():
    result = coverage([sliding_window(1, 5, 1)] * 4)
    assert result.reached == pytest.approx([13 / 25, 19 / 25, 23 / 25, 1.0])
    assert result.layers_to_all == 4
    assert coverage([sliding_window(1, 5, 1)]).layers_to_all is None


def test_distances_by_head():
    result = coverage([Pattern.from_offsets([[-2, 2], [0, 1]], 6, num_heads=2)])
    expected = np.zeros((1, 2, 6))
    expected[0, 0, 2] = 1.0
    expected[0, 1, 0] = 1.0
    expected[0, 1, 1] = 0.5  # one side only
    np.testing.assert_allclose(result.distances, expected)
    axes = draw_coverage(result).axes
    assert axes[0].get_xlabel() == "distance |query - key|"
    with pytest.raises(ValueError, match="patterns must be one or more for the same tokens and heads"):
        coverage([])
    with pytest.raises(ValueError, match="got a single pattern"):
        coverage(sliding_window(1, 5, 1))


def test_many_tokens_without_a_dense_matrix():
    result = coverage([wythoff(12, 3000, prefix_tokens=1)] * 2)
    assert 0 < result.reached[0] < result.reached[1] < 1
    assert result.reached_with_prefix[1] == 1.0
