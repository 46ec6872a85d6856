import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fibottention.patterns import Pattern, dense, sliding_window, wythoff


@st.composite
def patterns(draw, max_tokens=12):
    heads, tokens, prefix = draw(st.integers(1, 4)), draw(st.integers(1, max_tokens)), draw(st.integers(0, 2))
    stored = draw(st.sampled_from([1, heads]))
    if draw(st.booleans()):
        offsets = draw(st.lists(st.lists(st.integers(-15, 15), max_size=5), min_size=stored, max_size=stored))
        return Pattern.from_offsets(offsets, tokens, num_heads=heads, prefix_tokens=prefix, allow_empty=True)
    rows = st.lists(st.integers(0, tokens - 1), max_size=tokens)
    keys = draw(st.lists(st.lists(rows, min_size=tokens, max_size=tokens), min_size=stored, max_size=stored))
    return Pattern.from_rows(keys, tokens, num_heads=heads, prefix_tokens=prefix, allow_empty=True)


def brute_force(pattern: Pattern) -> np.ndarray:
    """The mask by definition, pair by pair."""
    length, prefix = pattern.sequence_length, pattern.prefix_tokens
    mask = np.zeros((pattern.num_heads, length, length), dtype=bool)
    mask[:, :prefix] = mask[:, :, :prefix] = True
    for h in range(pattern.num_heads):
        stored = h if pattern.stored_heads > 1 else 0
        for i in range(pattern.num_tokens):
            if pattern.offsets is not None:
                keys = [i + o for o in pattern.offsets[stored] if 0 <= i + o < pattern.num_tokens]
            else:
                starts, row = pattern.row_form.starts, stored * pattern.num_tokens + i
                keys = pattern.row_form.indices[starts[row] : starts[row + 1]]
            for j in keys:
                mask[h, prefix + i, prefix + j] = True
    return mask


@given(patterns())
@settings(max_examples=200, deadline=None)
def test_everything_agrees_with_the_mask(pattern):
    mask = brute_force(pattern)
    length, prefix = pattern.sequence_length, pattern.prefix_tokens
    assert (pattern.mask().numpy() == mask).all()
    assert pattern.nnz == mask.sum()
    assert pattern.density() == mask.mean()
    assert pattern.density(include_prefix=False) == mask[:, prefix:, prefix:].mean()
    assert pattern.macs(8) == 16 * mask.sum()
    assert pattern.is_dense == mask.all()
    assert list(pattern.patch_counts) == mask[:, prefix:, prefix:].sum((1, 2)).tolist()
    stored = mask[: pattern.stored_heads]
    head, query, key = pattern.pairs()
    assert torch.stack([head, query, key], 1).tolist() == np.argwhere(stored).tolist()
    columns = pattern.columns
    for g in range(pattern.stored_heads):
        for j in range(length):
            entries = slice(columns.starts[g * length + j], columns.starts[g * length + j + 1])
            assert columns.indices[entries].tolist() == np.flatnonzero(stored[g, :, j]).tolist()
            assert (key[columns.pairs[entries]] == j).all()
    assert (pattern.union().mask().numpy() == mask.any(0, keepdims=True)).all()
    assert pattern.union().stored_heads == 1


@given(patterns(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_permuted_heads_and_unions(pattern, rng):
    order = list(range(pattern.num_heads))
    rng.shuffle(order)
    permuted = pattern.permute_heads(order)
    assert (permuted.mask() == pattern.mask()[order]).all()
    assert ((permuted | pattern).mask() == (pattern.mask() | permuted.mask())).all()


@given(patterns())
@settings(max_examples=60, deadline=None)
def test_equal_patterns_are_one_object(pattern):
    assert Pattern.parse(pattern.key) is pattern
    assert pickle.loads(pickle.dumps(pattern)) is pattern
    assert copy.deepcopy(pattern) is copy.copy(pattern) is pattern
    patch = pattern.mask()[:, pattern.prefix_tokens :, pattern.prefix_tokens :]
    again = Pattern.from_mask(patch, prefix_tokens=pattern.prefix_tokens, allow_empty=True)
    assert (again.mask() == pattern.mask()).all()
    assert again is Pattern.from_mask(patch.numpy(), prefix_tokens=pattern.prefix_tokens, allow_empty=True)


def test_offset_text_survives_the_death_of_the_pattern():
    key = wythoff(3, 40, prefix_tokens=1).key
    assert key == "offsets(heads=3, tokens=40, prefix=1: +-1..3 5 | +-4 7 | +-6 10)"
    assert Pattern.parse(key).key == key
    asymmetric = "offsets(heads=1, tokens=9, prefix=0: -4..-2 0 7)"
    assert Pattern.parse(asymmetric).key == asymmetric
    assert repr(Pattern.parse(asymmetric)) == f"Pattern.{asymmetric}"


def test_patterns_are_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        wythoff(3, 40).num_heads = 4
    with pytest.raises(TypeError, match="from_offsets"):
        Pattern()


def test_equal_heads_are_stored_once():
    assert Pattern.from_offsets([[0, 1], [1, 0]], 5).stored_heads == 1
    assert Pattern.from_rows([[[0], [1]], [[0], [1]]], 2).stored_heads == 1
    assert Pattern.from_rows([[[0], [1]], [[1], [1]]], 2).stored_heads == 2


def test_large_patterns_need_no_square():
    pattern = dense(12, 65536)
    assert pattern.nnz == 12 * 65536**2
    assert pattern.is_dense
    with pytest.raises(ValueError, match=r"mask\(\)"):
        pattern.mask()
    assert sliding_window(2, 65536, 3).rows.indices.size == 7 * 65536 - 2 * (1 + 2 + 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Pattern.from_offsets([[2]], 3), "query 1 of head 0 would keep no key; add offset 0.*allow_empty"),
        (lambda: Pattern.from_offsets([[0], []], 3), "query 0 of head 1 would keep no key"),
        (lambda: Pattern.from_rows([[[0], []]], 2), "query 1 of head 0 would keep no key.*allow_empty"),
        (lambda: Pattern.from_rows([[[0], [2]]], 2), r"keys must be in 0..1 \(num_tokens=2\), got 2"),
        (lambda: Pattern.from_rows([[[0]]], 2), "one row per token"),
        (lambda: Pattern.from_offsets([[0]] * 3, 4, num_heads=2), "num_heads=2"),
        (lambda: wythoff(4, -1), "num_tokens must be at least 1, got -1"),
        (lambda: wythoff(4, 64.0), "num_tokens must be a whole number, got 64.0"),
        (lambda: Pattern.from_offsets([[0]], 0), "num_tokens must be at least 1, got 0"),
        (lambda: Pattern.from_offsets([], 3), "num_heads must be at least 1, got 0"),
        (lambda: Pattern.from_offsets([[0]], 3, prefix_tokens=-1), "prefix_tokens must be at least 0, got -1"),
        (lambda: Pattern.from_mask(torch.ones(2, 3, 4, dtype=torch.bool)), "mask must be boolean"),
        (lambda: Pattern.from_mask(torch.ones(3, 3)), "mask must be boolean"),
        (lambda: wythoff(2, 9) | wythoff(3, 9), "agree"),
        (lambda: wythoff(2, 9).permute_heads([0, 0]), "permutation"),
        (lambda: Pattern.parse("nonsense"), "nonsense"),
        (lambda: Pattern.parse("rows(heads=1, tokens=2, prefix=0: 2 patch pairs, sha256 0)"), "row pattern in memory"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pattern_with_an_empty_row_is_accepted_on_request_or_with_prefix_tokens():
    assert Pattern.from_offsets([[2]], 3, allow_empty=True).nnz == 1
    assert Pattern.from_offsets([[2]], 3, prefix_tokens=1).nnz == 1 + 7


@given(st.integers(1, 12), st.lists(st.integers(-12, 12), max_size=4))
@settings(deadline=None)
def test_empty_rows_are_found_exactly(tokens, offsets):
    mask = Pattern.from_offsets([offsets], tokens, allow_empty=True).mask()[0]
    if mask.any(1).all():
        Pattern.from_offsets([offsets], tokens)
    else:
        first = int((~mask.any(1)).nonzero()[0])
        with pytest.raises(ValueError, match=f"query {first} "):
            Pattern.from_offsets([offsets], tokens)


def test_a_relation_belongs_to_the_pattern():
    window = Pattern.from_offsets([range(-1, 2)], 4, num_heads=2, prefix_tokens=1)
    relation = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]  # key - query + 1 of the ten patch pairs
    pattern = window.with_relation(relation, 3)
    assert pattern.num_buckets == 3
    assert pattern.relation.tolist() == relation
    assert (pattern.mask() == window.mask()).all()
    assert pattern is window.with_relation(torch.tensor(relation), 3)
    assert pattern != window.with_relation(relation, 4)
    assert pattern != window.with_relation(relation[::-1], 3)
    assert window.relation is None
    assert pickle.loads(pickle.dumps(pattern)) is pattern
    assert pattern.union() is pattern
    assert "3 buckets" in repr(pattern)
    with pytest.raises(ValueError, match=r"one bucket per patch pair \(10\), got shape \(9,\)"):
        window.with_relation(relation[1:], 3)
    with pytest.raises(ValueError, match=r"relation must be in 0..1 \(num_buckets=2\), got 0..2"):
        window.with_relation(relation, 2)
    by_head = Pattern.from_offsets([[0], [-1, 0]], 2).with_relation([0, 0, 0, 1, 0], 2)
    assert by_head.stored_heads == 2
    for combine in (lambda: by_head.union(), lambda: by_head | by_head, lambda: by_head.permute_heads([1, 0])):
        with pytest.raises(ValueError, match="of a pattern with a relation is not defined"):
            combine()
    assert Pattern.from_offsets([[0]], 2, num_heads=2).with_relation([0, 1], 2).stored_heads == 1
