import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fibottention.patterns import clear_neighborhood_cache, neighborhood


def axis_by_formula(query, length, kernel, stride, dilation, causal):
    """Facts on neighborhood attention, section 1, one query at a time."""
    g, p = query % dilation, query // dilation
    length_g = -(-(length - g) // dilation)
    left = kernel // 2
    if causal:
        lead = min((p // stride) * stride + stride - 1, length_g - 1)
        a, b = max(lead - kernel + 1, 0), p + 1
    else:
        lead = min((p // stride) * stride + stride // 2, length_g - 1)
        a = min(max(lead - left, 0), length_g - kernel)
        b = a + kernel
    return [j * dilation + g for j in range(a, b)]


def keys_by_formula(grid, kernel, stride, dilation, causal):
    rows = []
    for query in itertools.product(*map(range, grid)):
        along = [axis_by_formula(q, *rest) for q, *rest in zip(query, grid, kernel, stride, dilation, causal)]
        rows.append([int(np.ravel_multi_index(key, grid)) for key in itertools.product(*along)])
    return rows


def rows_of(pattern):
    return [part.tolist() for part in np.split(pattern.row_form.indices, pattern.row_form.starts[1:-1])]


@st.composite
def arguments(draw):
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        length = draw(st.integers(kernel * dilation, kernel * dilation + 4))
        axes.append((length, kernel, draw(st.integers(1, kernel)), dilation, draw(st.booleans())))
    return tuple(zip(*axes))


@settings(deadline=None, max_examples=60)
@given(arguments())
def test_equals_the_formula(drawn):
    grid, kernel, stride, dilation, causal = drawn
    pattern = neighborhood(3, grid, kernel, stride, dilation, causal)
    assert rows_of(pattern) == keys_by_formula(grid, kernel, stride, dilation, causal)
    assert (pattern.num_heads, pattern.stored_heads) == (3, 1)


@settings(deadline=None, max_examples=60)
@given(arguments())
def test_what_holds_for_every_window(drawn):
    grid, kernel, stride, dilation, causal = drawn
    rows = rows_of(neighborhood(1, grid, kernel, stride, dilation, causal))
    place = np.stack(np.unravel_index(np.arange(int(np.prod(grid))), grid), 1)
    for query, keys in enumerate(rows):
        assert keys == sorted(set(keys))
        if not any(causal):
            assert len(keys) == np.prod(kernel)
        # The keys are in the residue class of the query (arXiv 2209.15001, section 3.2), which sees itself.
        assert not ((place[keys] - place[query]) % np.array(dilation)).any()
        assert query in keys
        for axis, is_causal in enumerate(causal):
            assert not is_causal or (place[keys, axis] <= place[query, axis]).all()


def test_windows_shift_at_the_borders():
    assert rows_of(neighborhood(1, (6,), 3)) == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [3, 4, 5]]
    assert rows_of(neighborhood(1, (6,), 3, dilation=2))[:3] == [[0, 2, 4], [1, 3, 5], [0, 2, 4]]
    assert rows_of(neighborhood(1, (7,), 6))[3] == [0, 1, 2, 3, 4, 5]  # three to the left, itself, two to the right


def test_a_window_as_large_as_the_grid_is_dense():
    assert neighborhood(2, (5, 3), (5, 3)).is_dense


def test_the_relation_is_the_step_from_query_to_key():
    kernel, dilation, grid = (3, 5), (2, 1), (7, 6)
    pattern = neighborhood(2, grid, kernel, 1, dilation, relation=True)
    assert pattern.num_buckets == 5 * 9
    expected = []
    for query, keys in enumerate(keys_by_formula(grid, kernel, (1, 1), dilation, (False, False))):
        for key in keys:
            steps = [
                (b - a) // d for a, b, d in zip(np.unravel_index(query, grid), np.unravel_index(key, grid), dilation)
            ]
            expected.append((steps[0] + 2) * 9 + steps[1] + 4)
    assert pattern.relation.tolist() == expected


def test_prefix_tokens_see_and_are_seen_by_all():
    pattern = neighborhood(1, (4, 4), 3, prefix_tokens=2)
    mask = pattern.mask()[0]
    assert mask[:2].all()
    assert mask[:, :2].all()
    assert mask[2:, 2:].sum() == 16 * 9


def test_equal_arguments_give_the_pattern_that_is_known():
    assert neighborhood(4, (8, 8), 3) is neighborhood(4, [8, 8], (3, 3), dilation=[1, 1])


def test_the_cache_forgets_the_oldest_when_it_holds_too_many_pairs(monkeypatch):
    module = neighborhood.__globals__
    clear_neighborhood_cache()
    kept = module["_recent"]._patterns
    monkeypatch.setitem(module, "_CACHED_PAIRS", 1000)
    for length in range(50, 60):
        neighborhood(1, (length,), 5)
        assert sum(p.stored_pairs for p in kept.values()) == module["_recent"]._pairs <= 1000
    neighborhood(1, (1000,), 5)
    assert len(kept) == 1
    clear_neighborhood_cache()
    assert not kept


def test_many_threads_may_ask_at_once(monkeypatch):
    monkeypatch.setitem(neighborhood.__globals__, "_CACHED_PAIRS", 2000)

    def ask(seed):
        generator = random.Random(seed)
        for _ in range(300):
            grid = (generator.randint(5, 40), generator.randint(5, 40))
            assert neighborhood(1, grid, 3).num_tokens == grid[0] * grid[1]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((8, 8), 9), r"kernel_size \* dilation must be at most the length of the axis \(8\), got 9 \* 1"),
        (((8, 8), 3, 1, 3), r"kernel_size \* dilation must be .* got 3 \* 3"),
        (((8, 8), 0), "kernel_size must be at least 1, got 0"),
        (((8, 8), 3, 4), r"stride must be at most kernel_size \(3\), got 4"),
        (((8, 8), 3, 1, 0), "dilation must be at least 1, got 0"),
        (((8, 8), (3, 3, 3)), r"kernel_size must be a whole number or 2 of them, got \(3, 3, 3\)"),
        (((8, 8), 3.0), "kernel_size must be a whole number"),
        (((8, 8), True), "kernel_size must be a whole number or 2 of them, got True"),
        (((8, 8), 3, 1, 1, 5), "is_causal must be True or False or 2 of them, got 5"),
        (((8, 8, 8, 8), 3), "grid_size must have one to three axes"),
        (((), 3), "grid_size must have one to three axes"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        neighborhood(1, *arguments)


def test_a_relation_needs_stride_1():
    with pytest.raises(ValueError, match="a relative bias needs stride=1, got 2"):
        neighborhood(1, (8,), 3, 2, relation=True)
