import math

import numpy as np
import pytest

from fibottention import patterns
from fibottention.patterns import Pattern, wythoff
from fibottention.sequences import fibonacci, head_window, wythoff_row

# Facts, section 1: h=12, N=196, w_min=5, w_max=65.
WYTHOFF = ["1 2 3 5", "4 7", "6 10", "9 15", "12 20", "14 23", "17 28", "19 31", "22 36", "25 41", "27 44", "30 49"]
MODIFIED = [
    "0 1 2 3 5", "1 3 4 7", "2 4 6 10", "3 6 9 15", "4 8 12 20", "5 9 14 23", "6 11 17 28", "7 12 19 31",
    "8 14 22 36", "9 16 25 41", "10 17 27 44", "11 19 30 49",
]  # fmt: skip


def distances(pattern: Pattern) -> list[list[int]]:
    return [[o for o in head if o >= 0] for head in pattern.offsets]


def both_sides(pattern: Pattern) -> bool:
    return all({-o for o in head} == set(head) for head in pattern.offsets)


@pytest.mark.parametrize(("variant", "table"), [("wythoff", WYTHOFF), ("modified", MODIFIED)])
def test_offsets_of_the_paper(variant, table):
    for w_max in (65, None):
        pattern = wythoff(12, 196, 5, w_max, variant)
        assert distances(pattern) == [[int(d) for d in row.split()] for row in table]
        assert both_sides(pattern)


def test_counts_of_the_paper():
    pattern = wythoff(12, 196, prefix_tokens=1)
    assert pattern.patch_counts == (1546, 762, 752, 736, 720, 710, 694, 684, 668, 652, 642, 626)
    assert sum(pattern.patch_counts) == 9192
    assert pattern.density(include_prefix=False) == pytest.approx(0.01994, abs=5e-6)
    assert pattern.density() == pytest.approx(0.02986, abs=5e-6)
    modified = wythoff(12, 196, variant="modified", prefix_tokens=1)
    assert sum(modified.patch_counts) == 17642
    assert modified.density(include_prefix=False) == pytest.approx(0.03827, abs=5e-6)
    assert modified.density() == pytest.approx(0.04801, abs=5e-6)
    for variant, share in (("wythoff", 0.04478), ("modified", 0.06311)):
        assert wythoff(12, 196, 196, 196, variant).density() == pytest.approx(share, abs=5e-6)


def test_macs_of_vit_b():
    # Facts, section 4: 12 layers, 12 heads of 64.
    assert 12 * patterns.dense(12, 196, prefix_tokens=1).macs(64) == pytest.approx(0.715e9, rel=1e-3)
    assert 12 * wythoff(12, 196).macs(64) == pytest.approx(0.0141e9, rel=5e-3)
    assert 12 * wythoff(12, 196, prefix_tokens=1).macs(64) == pytest.approx(0.0214e9, rel=5e-3)


def test_wythoff_heads_share_no_distance():
    pattern = wythoff(32, 4096, 4096, 4096)
    everything = [d for head in distances(pattern) for d in head]
    assert len(set(everything)) == len(everything)


def test_head_order_is_a_permutation_of_rows():
    order = [3, 1, 2]
    assert wythoff(3, 60, head_order=order) is wythoff(3, 60).permute_heads([2, 0, 1])
    with pytest.raises(ValueError, match=r"permutation of 1\.\.3"):
        wythoff(3, 60, head_order=[0, 1, 2])


@pytest.mark.parametrize("heads", [12, 16, 24, 32])
def test_many_heads_on_a_swin_window(heads):
    # Facts, section 1: a head without a term in its window takes row ((i - 1) mod R) + 1; here a_6 = 14 <= 16 < a_7.
    pattern = wythoff(heads, 49)
    for i, head in enumerate(distances(pattern), 1):
        window = head_window(i, heads, 5, 16)
        own = fibonacci(*wythoff_row(i), window)
        row = wythoff_row((i - 1) % 6 + 1)
        assert tuple(head) == (own or fibonacci(*row, window) or (row[0],))
        assert max(head) <= 16


def test_on_empty_choices():
    assert distances(wythoff(12, 49, on_empty="self"))[-1] == [0]
    assert distances(wythoff(12, 49, on_empty="first", prefix_tokens=1))[-1] == [30]
    assert distances(wythoff(12, 196, on_empty="error"))[-1] == [30, 49]
    with pytest.raises(ValueError, match="head 4 of 12 has no term within its window 8 for num_tokens=49"):
        wythoff(12, 49, on_empty="error")
    with pytest.raises(ValueError, match="'first' is not possible: the first term of head 9 is 22"):
        wythoff(12, 20, on_empty="first")
    with pytest.raises(ValueError, match="on_empty must be"):
        wythoff(12, 49, on_empty="other")


def test_on_empty_first_leaves_empty_queries_to_the_pattern():
    # Head 10 starts at 25: |j - i| = 25 among 49 tokens reaches no key from token 24.
    with pytest.raises(ValueError, match="query 24 of head 9 would keep no key"):
        wythoff(12, 49, on_empty="first")


@pytest.mark.parametrize("variant", ["wythoff", "modified"])
@pytest.mark.parametrize("heads", [1, 2, 3, 12, 32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 16, 49, 64, 100, 196, 256])
def test_every_query_keeps_a_key_at_any_size(variant, heads, tokens):
    pattern = wythoff(heads, tokens, variant=variant)
    assert pattern.mask().any(-1).all()


def test_empty_queries_are_accepted_on_request():
    with pytest.raises(ValueError, match="query 8 of head 4 would keep no key.*allow_empty=True"):
        wythoff(12, 20, 20, 20)
    assert not wythoff(12, 20, 20, 20, allow_empty=True).mask().any(-1).all()
    for make in (
        lambda **kwargs: patterns.sliding_window(2, 9, 0, include_self=False, **kwargs),
        lambda **kwargs: patterns.exponential(2, 9, window=0, include_self=False, **kwargs),
        lambda **kwargs: patterns.fibonacci(2, 9, 0, include_self=False, **kwargs),
    ):
        with pytest.raises(ValueError, match="allow_empty=True"):
            make()
        assert make(allow_empty=True).nnz == 0


def test_robot_setting_keeps_all_terms():
    # Facts, section 5: w_min = w_max = N = 81.
    pattern = wythoff(12, 81, 81, 81)
    assert distances(pattern)[0] == [1, 2, 3, 5, 8, 13, 21, 34, 55]
    assert distances(pattern)[11] == [30, 49, 79]


def test_explicit_window_below_w_min_is_an_error():
    with pytest.raises(ValueError, match="w_min <= w_max, got w_min=5, w_max=3"):
        wythoff(3, 60, 5, 3)
    assert wythoff(3, 12).nnz  # floor(12 / 3) = 4 caps w_min where w_max is the default


def test_general_sequences():
    pattern = patterns.offsets([[1, 2, 4, 8], [3, 3, 9]], 20, [4, 20])
    assert distances(pattern) == [[1, 2, 4], [3, 9]]
    assert patterns.offsets([[0, 5]], 20, 4).nnz == 20
    with pytest.raises(ValueError, match="one number per head"):
        patterns.offsets([[1], [2]], 20, [4])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        patterns.offsets([[-1]], 20)


def test_diagonal_families():
    assert distances(patterns.fibonacci(2, 30)) == [[0, 1, 2, 3, 5, 8]]
    assert distances(patterns.fibonacci(2, 30, 5, include_self=False)) == [[1, 2, 3, 5]]
    assert distances(patterns.sliding_window(2, 30, 2)) == [[0, 1, 2]]
    assert distances(patterns.dilated_window(2, 30, 2, [1, 5])) == [[0, 1, 2], [0, 5, 10]]
    assert distances(patterns.exponential(2, 30, 3)) == [[0, 1, 3, 9]]
    assert patterns.dense(3, 5, prefix_tokens=2).is_dense
    # Facts, section 6: half-window 1 prunes 98.47 %.
    assert patterns.longformer(12, 196).density() == pytest.approx(1 - 0.9847, abs=1e-3)
    for pattern in (patterns.fibonacci(2, 30), patterns.exponential(2, 30), patterns.dilated_window(2, 30, 2)):
        assert both_sides(pattern)
    for call in (
        lambda: patterns.sliding_window(2, 30, -1),
        lambda: patterns.dilated_window(2, 30, 2, 0),
        lambda: patterns.exponential(2, 30, 1),
        lambda: patterns.strided(2, 30, 0),
        lambda: patterns.strided(2, 30, 3, -1),
        lambda: patterns.fixed(2, 30, 3, 4),
        lambda: patterns.random(2, 30, 0.0),
        lambda: patterns.longformer(2, 30, 1, 31),
        lambda: wythoff(2, 30, variant="other"),
        lambda: patterns.bigbird(2, 30, random_keys=-1),
        lambda: patterns.random(2, 30, seed=-1),
    ):
        with pytest.raises(ValueError, match="got"):
            call()


def test_sparse_transformer():
    # Child et al., section 4.3, on both sides: the last l positions and every l-th; own block and block ends.
    tokens, stride = 23, 5
    i, j = np.mgrid[:tokens, :tokens]
    expected = (abs(i - j) < stride) | ((i - j) % stride == 0)
    assert (patterns.strided(2, tokens, stride).mask()[0].numpy() == expected).all()
    split = patterns.strided(2, tokens, stride, split_heads=True).mask().numpy()
    assert (split[0] == (abs(i - j) < stride)).all()
    assert (split[1] == ((i - j) % stride == 0)).all()
    expected = (i // stride == j // stride) | (j % stride >= stride - 2)
    assert (patterns.fixed(2, tokens, stride, 2).mask()[1].numpy() == expected).all()
    assert patterns.fixed(1, tokens, stride, 0).nnz == 4 * 25 + 9
    assert patterns.strided(1, 25).key == patterns.strided(1, 25, 5).key


def test_bigbird():
    pattern = patterns.bigbird(3, 196, prefix_tokens=1)
    mask = pattern.mask()[:, 1:, 1:]
    i, j = np.mgrid[:196, :196]
    assert mask[:, abs(i - j) <= 1].all()
    assert (mask.sum(-1)[:, 1:-1] == 4).all()
    # Facts, section 6: window 1, 1 random key: 97.96 % pruned.
    assert pattern.density(include_prefix=False) == pytest.approx(1 - 0.9796, abs=2e-4)
    assert pattern.stored_heads == 3
    assert pattern is patterns.bigbird(3, 196, prefix_tokens=1)
    assert pattern is not patterns.bigbird(3, 196, seed=1, prefix_tokens=1)
    full = patterns.bigbird(2, 30, global_tokens=2).mask()
    assert full[:, [0, 15]].all()
    assert full[:, :, [0, 15]].all()
    assert patterns.bigbird(2, 3, window=1).is_dense is False
    assert patterns.bigbird(2, 2).is_dense


def test_random_keeps_the_same_number_of_keys_in_every_row():
    pattern = patterns.random(4, 196)
    assert (pattern.mask().sum(-1) == 4).all()  # 196 * .0195 = 3.8
    assert pattern is patterns.random(4, 196)
    assert (patterns.random(2, 50, 0.5).mask().sum(-1) == 25).all()
    assert patterns.random(2, 5, 1.0).is_dense
    counts = patterns.random(8, 400, 0.02, seed=3).mask().sum((0, 1)).float()
    assert counts.mean() == 8 * 8
    assert 5 < counts.std() < 11  # binomial: sqrt(64)


@pytest.mark.parametrize(("grid_size", "size"), [((14, 14), 7), ((14, 14), 2), ((5, 7), 3), ((4, 6), 1), ((3, 3), 3)])
def test_grid_attention_by_loops(grid_size, size):
    height, width = grid_size
    pattern = patterns.grid(2, grid_size, size, prefix_tokens=1)
    steps = [math.ceil(side / size) for side in grid_size]
    mask = pattern.mask()[0, 1:, 1:]
    for query in range(height * width):
        for key in range(height * width):
            rows, columns = (query // width - key // width), (query % width - key % width)
            assert bool(mask[query, key]) == (rows % steps[0] == 0 and columns % steps[1] == 0)
    if grid_size == (14, 14):  # MaxViT's 7 x 7 grid: every query has 49 keys; 2 x 2 keeps 2 % of 196
        assert pattern.density(include_prefix=False) == pytest.approx(size**2 / 196)


def test_grid_size_is_checked():
    with pytest.raises(ValueError, match=r"size must be in 1\.\.5 for a grid of 5 x 7, got 6"):
        patterns.grid(2, (5, 7), 6)


@pytest.mark.parametrize(("grid_size", "size"), [((14, 14), 7), ((5, 7), 3), ((4, 6), 1), ((3, 9), 20)])
def test_window_partition_by_loops(grid_size, size):
    height, width = grid_size
    mask = patterns.window_partition(2, grid_size, size, prefix_tokens=1).mask()
    for query in range(height * width):
        for key in range(height * width):
            same_row = query // width // size == key // width // size
            same_column = query % width // size == key % width // size
            assert bool(mask[1, 1 + query, 1 + key]) == (same_row and same_column)
    assert mask[:, 0].all()
    assert mask[:, :, 0].all()
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        patterns.window_partition(2, grid_size, 0)


def test_axial():
    pattern = patterns.axial(2, (3, 4), prefix_tokens=1)
    i, j = np.mgrid[:12, :12]
    expected = (i // 4 == j // 4) | (i % 4 == j % 4)
    assert (pattern.mask()[0, 1:, 1:].numpy() == expected).all()


@pytest.mark.parametrize("prefix", [1, 2])
def test_prefix_tokens_see_and_are_seen_by_all(prefix):
    for pattern in (
        wythoff(3, 30, prefix_tokens=prefix),
        patterns.longformer(3, 30, 1, 2, prefix_tokens=prefix),
        patterns.bigbird(3, 30, prefix_tokens=prefix),
        patterns.random(3, 30, prefix_tokens=prefix),
        patterns.fixed(3, 30, prefix_tokens=prefix),
        patterns.strided(3, 30, prefix_tokens=prefix),
        patterns.axial(3, (5, 6), prefix_tokens=prefix),
        patterns.exponential(3, 30, prefix_tokens=prefix),
        patterns.fibonacci(3, 30, prefix_tokens=prefix),
    ):
        assert pattern.sequence_length == 30 + prefix
        assert pattern.mask()[:, :prefix].all()
        assert pattern.mask()[:, :, :prefix].all()
