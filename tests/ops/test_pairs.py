"""The pair operations as registered operators."""

import pytest
import torch

from fibottention import patterns
from fibottention.ops import pair_dot, pair_softmax, pair_sum, pair_sum_transposed, pairs
from fibottention.patterns import wythoff

PATTERNS = [wythoff(3, 11, prefix_tokens=1), patterns.fixed(3, 12), patterns.random(3, 9, 0.3)]


def tensors(pattern, batch=2, dim=5):
    generator = torch.Generator().manual_seed(0)
    groups = pattern.num_heads // pattern.stored_heads
    shape = (batch, pattern.num_heads, pattern.sequence_length, dim)
    a, b = (torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2))
    weights = torch.randn(
        batch, groups, pattern.nnz // groups, dtype=torch.float64, generator=generator, requires_grad=True
    )
    return a, b, weights


def dense(weights, pattern):
    """Pair values as a ``(B, H, T, T)`` tensor."""
    head, query, key = pattern.pairs()
    out = weights.new_zeros(weights.shape[0], pattern.num_heads, pattern.sequence_length, pattern.sequence_length)
    if pattern.stored_heads == 1:
        out[:, :, query, key] = weights
    else:
        out[:, head, query, key] = weights[:, 0]
    return out


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_definitions(pattern):
    a, b, weights = tensors(pattern)
    square = dense(weights, pattern)
    torch.testing.assert_close(dense(pair_dot(a, b, pattern.key), pattern), a @ b.mT * pattern.mask())
    torch.testing.assert_close(pair_sum(weights, a, pattern.key), square @ a)
    torch.testing.assert_close(pair_sum_transposed(weights, a, pattern.key), square.mT @ a)
    soft, outside = pair_softmax(weights, pattern.key, False)
    masked = square.masked_fill(~pattern.mask(), float("-inf"))
    torch.testing.assert_close(dense(soft, pattern), masked.softmax(-1))
    assert (outside == 0).all()
    soft, outside = pair_softmax(weights, pattern.key, True)
    everything = square.softmax(-1)
    torch.testing.assert_close(dense(soft, pattern), everything * pattern.mask())
    filled = outside.unsqueeze(-1).expand_as(everything)
    torch.testing.assert_close(filled * ~pattern.mask(), everything * ~pattern.mask())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_registration_is_sound(pattern):
    a, b, weights = tensors(pattern, batch=1, dim=3)
    for op, arguments in (
        (pair_dot, (a, b, pattern.key)),
        (pair_sum, (weights, a, pattern.key)),
        (pair_sum_transposed, (weights, a, pattern.key)),
        (pair_softmax, (weights, pattern.key, False)),
        (pair_softmax, (weights, pattern.key, True)),
        (torch.ops.fibottention.pattern_mask, (pattern.key, torch.device("cpu"))),
        (torch.ops.fibottention.pair_indices, (pattern.key, torch.device("cpu"))),
        (torch.ops.fibottention.kept_of_union, (pattern.key, torch.device("cpu"))),
    ):
        torch.library.opcheck(op, arguments)
    soft, outside = (t.detach() for t in pair_softmax(weights, pattern.key, True))
    arguments = (torch.ones_like(soft), torch.ones_like(outside), soft, outside, pattern.key, True)
    permuted = torch.randn(1, pattern.sequence_length, 3, 4, dtype=torch.float64).transpose(1, 2)
    torch.library.opcheck(pair_dot, (permuted, permuted, pattern.key))
    torch.library.opcheck(pair_sum, (weights, permuted, pattern.key))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(pairs.pair_softmax_backward, arguments, test_utils=checks)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_gradients_to_second_order(pattern):
    a, b, weights = tensors(pattern, batch=1, dim=2)
    for function, arguments in (
        (lambda a, b: pair_dot(a, b, pattern.key), (a, b)),
        (lambda w, x: pair_sum(w, x, pattern.key), (weights, a)),
        (lambda w, x: pair_sum_transposed(w, x, pattern.key), (weights, a)),
    ):
        assert torch.autograd.gradcheck(function, arguments)
        assert torch.autograd.gradgradcheck(function, arguments)
    for zero_fill in (False, True):
        assert torch.autograd.gradcheck(lambda s, z=zero_fill: pair_softmax(s, pattern.key, z), (weights,))


def test_chunks_do_not_change_the_result(monkeypatch):
    pattern = PATTERNS[0]
    a, b, weights = tensors(pattern)
    whole = pair_dot(a, b, pattern.key), pair_sum(weights, a, pattern.key), pair_sum_transposed(weights, a, pattern.key)
    monkeypatch.setattr(pairs, "_CPU_CHUNK_ELEMENTS", 40)
    parts = pair_dot(a, b, pattern.key), pair_sum(weights, a, pattern.key), pair_sum_transposed(weights, a, pattern.key)
    for x, y in zip(whole, parts, strict=True):
        torch.testing.assert_close(x, y)
