"""Every backend against the dense float64 oracle: values and all gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fibottention import Twist, explain_backend, patterns, sparse_attention
from fibottention.patterns import Pattern, wythoff

PATTERNS = {
    "wythoff": wythoff(4, 37),
    "wythoff_cls": wythoff(4, 37, prefix_tokens=1),
    "modified_2_prefix": wythoff(4, 37, variant="modified", prefix_tokens=2),
    "random": patterns.random(4, 30, 0.1, prefix_tokens=1),
    "bigbird": patterns.bigbird(4, 30),
    "shared_rows": patterns.fixed(4, 30, prefix_tokens=1),
    "shared_offsets": patterns.sliding_window(4, 30, 2),
    "dense": patterns.dense(4, 9, prefix_tokens=1),
    "one_token": patterns.wythoff(4, 1),
    "one_head": patterns.wythoff(1, 20),
    "empty_rows": Pattern.from_offsets([[1], [2], [0], [-3]], 20, allow_empty=True),
    "no_pairs": Pattern.from_offsets([[]], 5, num_heads=4, allow_empty=True),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def oracle(q, k, v, mask, bias=None, scale=None, fill="-inf"):
    """The released code's dense formulas, written down once more and independently of the package."""
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if fill == "zero":
        weights = (scores * mask).softmax(-1)  # released code: scores times a 0/1 mask
    else:
        weights = torch.where(mask, scores.exp(), 0.0)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return weights @ v


def sliding_with_relation(heads, tokens, prefix=0, per_head=False):
    """A window of two tokens on each side, whose five offsets are the buckets of a relative bias."""
    offsets = [range(-2, 3)] * heads
    if per_head:
        offsets = [[o for o in range(-2, 3) if o != 2 - h % 3] for h in range(heads)]
    pattern = Pattern.from_offsets(offsets, tokens, num_heads=heads, prefix_tokens=prefix)
    _, query, key = pattern.pairs()
    patch = (query >= prefix) & (key >= prefix)
    return pattern.with_relation((key - query + 2)[patch], 5)


def inputs(pattern, dtype=torch.float64, dim=6, value_dim=None, batch=2, layout="timm", seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads, length = pattern.num_heads, pattern.sequence_length
    value_dim = value_dim or dim

    def draw(size):
        return torch.randn(batch, length, heads, size, dtype=torch.float64, generator=generator).to(dtype)

    if layout == "timm":  # views of one tensor, as timm's attention makes them
        qkv = torch.stack([draw(dim) for _ in range(3)], 2).permute(2, 0, 3, 1, 4)
        q, k, v = (t.detach().requires_grad_() for t in qkv.unbind(0))
    else:
        q, k, v = (draw(d).transpose(1, 2).contiguous().requires_grad_() for d in (dim, dim, value_dim))
    grad = torch.randn(batch, heads, length, v.shape[-1], dtype=torch.float64, generator=generator)
    return q, k, v, grad


def compare(pattern, backend, fill, dtype=torch.float64, with_bias=False, **kwargs):
    q, k, v, grad = inputs(pattern, dtype, **kwargs)
    leaves = [q, k, v]
    bias = None
    if with_bias:
        generator = torch.Generator().manual_seed(1)
        shape = (1, pattern.num_heads, pattern.sequence_length, pattern.sequence_length)
        bias = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        leaves.append(bias)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = oracle(*exact[:3], pattern.mask(), exact[3] if with_bias else None, fill=fill)
    expected_grads = torch.autograd.grad((expected * grad).sum(), exact)
    out = sparse_attention(q, k, v, pattern, bias=bias, fill=fill, backend=backend)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    grads = torch.autograd.grad((out * grad.to(dtype)).sum(), leaves)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for own, exact_grad in zip(grads, expected_grads, strict=True):
        size = max(1.0, float(exact_grad.abs().max()))
        torch.testing.assert_close(own.double(), exact_grad, rtol=tolerance, atol=4 * tolerance * size)


@pytest.mark.parametrize("fill", ["-inf", "zero"])
@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
@pytest.mark.parametrize("name", PATTERNS)
def test_values_and_gradients(name, backend, fill):
    for with_bias in (False, True):
        compare(PATTERNS[name], backend, fill, with_bias=with_bias)


@pytest.mark.parametrize("name", [n for n, p in PATTERNS.items() if not p.allow_empty])
def test_sdpa_values_and_gradients(name):
    for with_bias in (False, True):
        compare(PATTERNS[name], "sdpa", "-inf", with_bias=with_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu"])
def test_lower_precision(backend, dtype):
    compare(PATTERNS["wythoff_cls"], backend, "-inf", dtype, dim=16)
    if backend != "sdpa":
        compare(PATTERNS["wythoff_cls"], backend, "zero", dtype, dim=16)


@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu"])
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (3, 5), (7, 2), (33, 33)])
def test_odd_head_dims_and_contiguous_inputs(backend, dim, value_dim):
    compare(PATTERNS["wythoff_cls"], backend, "-inf", dim=dim, value_dim=value_dim, layout="contiguous")


@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu"])
@pytest.mark.parametrize(("prefix", "per_head"), [(0, False), (2, False), (1, True)])
def test_bias_from_a_table_by_relation(backend, prefix, per_head):
    pattern = sliding_with_relation(3, 20, prefix, per_head)
    q, k, v, grad = inputs(pattern)
    table = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    length = pattern.sequence_length
    token = torch.arange(length)
    bucket = token[None] - token[:, None] + 2
    inside = (bucket >= 0) & (bucket < 5) & (token >= prefix) & (token[:, None] >= prefix)
    dense = torch.where(inside, table[:, bucket.clamp(0, 4)], 0.0)[None]
    expected = oracle(q, k, v, pattern.mask(), dense)
    out = sparse_attention(q, k, v, pattern, bias=table, backend=backend)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for own, other in zip(
        torch.autograd.grad((out * grad).sum(), (q, k, v, table)),
        torch.autograd.grad((expected * grad).sum(), (q, k, v, table)),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu", "triton"])
@pytest.mark.parametrize("name", ["wythoff_cls", "shared_rows", "random"])
@pytest.mark.parametrize(("images", "one_group"), [(1, False), (2, True), (4, False)])
def test_bias_by_pair_equals_the_dense_bias(backend, name, images, one_group):
    pattern = PATTERNS[name]
    q, k, v, grad = inputs(pattern, batch=4)
    groups = pattern.num_heads // pattern.stored_heads
    by_pair = torch.randn(images, 1 if one_group else groups, pattern.stored_pairs, dtype=torch.float64)
    by_pair.requires_grad_()
    head, query, key = pattern.pairs()
    dense = torch.zeros(images, pattern.num_heads, *[pattern.sequence_length] * 2, dtype=torch.float64)
    if pattern.stored_heads == 1:
        dense[:, :, query, key] = by_pair.expand(-1, groups, -1)
    else:
        dense[:, head, query, key] = by_pair[:, 0]
    out = sparse_attention(q, k, v, pattern, bias=by_pair, backend=backend)
    expected = oracle(q, k, v, pattern.mask(), dense.repeat(4 // images, 1, 1, 1))
    torch.testing.assert_close(out, expected)
    leaves = (q, k, v, by_pair)
    torch.testing.assert_close(
        torch.autograd.grad((out * grad).sum(), leaves), torch.autograd.grad((expected * grad).sum(), leaves)
    )


def test_infinity_fill_equals_masked_sdpa():
    pattern = PATTERNS["modified_2_prefix"]
    q, k, v, grad = inputs(pattern)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=pattern.mask())
    out = sparse_attention(q, k, v, pattern, backend="gather")
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for own, other in zip(
        torch.autograd.grad((out * grad).sum(), (q, k, v)),
        torch.autograd.grad((expected * grad).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_large_scores_do_not_overflow(backend):
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, _ = inputs(pattern, torch.float32)
    for scale, fill in ((300.0, "-inf"), (300.0, "zero"), (-300.0, "zero")):
        out = sparse_attention(q, k, v, pattern, scale=scale, fill=fill, backend=backend)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(t.isfinite().all() for t in (out, *grads))


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_queries_without_a_key_give_zeros_and_take_no_gradient(backend):
    pattern = PATTERNS["empty_rows"]
    q, k, v, _ = inputs(pattern)
    out = sparse_attention(q, k, v, pattern, backend=backend)
    empty = ~pattern.mask().any(-1)
    assert (out[:, empty] == 0).all()
    assert (out[:, ~empty] != 0).any()
    grad_q, grad_k, grad_v = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert (grad_q[:, empty] == 0).all()
    unseen = ~pattern.mask().any(-2)
    assert (grad_k[:, unseen] == 0).all()
    assert (grad_v[:, unseen] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu"])
def test_a_row_masked_whole_by_the_bias_gives_zeros(backend):
    pattern = PATTERNS["wythoff"]
    q, k, v, _ = inputs(pattern)
    bias = torch.zeros(1, 1, 37, 37, dtype=torch.float64)
    bias[:, :, 3] = float("-inf")
    out = sparse_attention(q, k, v, pattern, bias=bias, backend=backend)
    assert (out[:, :, 3] == 0).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu"])
def test_bias_of_few_images_is_repeated_over_the_batch(backend):
    pattern = PATTERNS["shared_offsets"]
    q, k, v, _ = inputs(pattern, batch=6)
    bias = torch.randn(3, 4, 30, 30, dtype=torch.float64)
    out = sparse_attention(q, k, v, pattern, bias=bias, backend=backend)
    expected = oracle(q, k, v, pattern.mask(), bias.repeat(2, 1, 1, 1))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["wythoff_cls", "shared_rows", "empty_rows"])
@pytest.mark.parametrize("fill", ["-inf", "zero"])
def test_returned_weights(name, fill):
    pattern = PATTERNS[name]
    q, k, v, _ = inputs(pattern)
    mask = pattern.mask()
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if fill == "zero":
        dense = (scores * mask).softmax(-1)
    else:
        dense = torch.where(mask, scores.exp(), 0.0)
        dense = dense / dense.sum(-1, keepdim=True).clamp(min=1e-300)
    head, query, key = pattern.pairs()
    if pattern.stored_heads == 1:
        expected = dense[:, :, query, key]
    else:
        expected = dense[:, head, query, key].unsqueeze(1)
    for backend in ("reference", "gather", "cpu"):
        out, weights = sparse_attention(q, k, v, pattern, fill=fill, return_weights=True, backend=backend)
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
        own = torch.autograd.grad(weights.square().sum() + out.sum(), (q, k, v), retain_graph=True)
        other = torch.autograd.grad(expected.square().sum() + (dense @ v).sum(), (q, k, v), retain_graph=True)
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_transform_acts_row_by_row_on_the_kept_weights():
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, _ = inputs(pattern)
    strength = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def transform(weights):
        top = weights.amax(-1, keepdim=True)
        return torch.where(weights < top, strength * weights, weights)

    results = []
    for backend in ("reference", "gather"):
        out, weights = sparse_attention(q, k, v, pattern, transform=transform, return_weights=True, backend=backend)
        results.append((out, weights, *torch.autograd.grad(out.square().sum(), (q, k, v, strength))))
    plain = sparse_attention(q, k, v, pattern, backend="reference")
    assert not torch.allclose(plain, results[0][0])
    nothing = PATTERNS["no_pairs"]
    q, k, v, _ = inputs(nothing)
    assert (sparse_attention(q, k, v, nothing, transform=transform, backend="gather") == 0).all()
    q, k, v, _ = inputs(pattern)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu"])
def test_dropout_keeps_the_mean_and_follows_the_generator(backend):
    pattern = patterns.sliding_window(2, 400, 4)
    q, k, v, _ = inputs(pattern, torch.float32, batch=4)
    v = v.detach().abs()

    def run(seed):
        torch.manual_seed(seed)
        return sparse_attention(q, k, v, pattern, dropout_p=0.4, backend=backend)

    full = sparse_attention(q, k, v, pattern, backend=backend)
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert abs((run(1).mean() / full.mean()).item() - 1) < 0.03


@pytest.mark.parametrize("backend", ["gather", "reference", "cpu"])
def test_gradcheck(backend):
    pattern = wythoff(2, 7, prefix_tokens=1)
    q, k, v, _ = inputs(pattern, dim=3, batch=1, layout="contiguous")
    bias = torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    for fill in ("-inf", "zero"):
        assert torch.autograd.gradcheck(
            lambda q, k, v, b, fill=fill: sparse_attention(q, k, v, pattern, bias=b, fill=fill, backend=backend),
            (q, k, v, bias),
        )


@given(st.integers(1, 3), st.integers(1, 14), st.integers(0, 2), st.integers(1, 9), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_any_mask(heads, tokens, prefix, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    density = torch.rand(1, generator=generator)
    mask = torch.rand(heads, tokens, tokens, generator=generator) < density
    pattern = Pattern.from_mask(mask, prefix_tokens=prefix, allow_empty=True)
    for fill in ("-inf", "zero"):
        for backend in ("gather", "cpu"):
            compare(pattern, backend, fill, dim=dim, seed=seed)


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_repeated_calls_are_equal_bit_for_bit(backend):
    pattern = patterns.random(4, 200, 0.05, prefix_tokens=1)
    q, k, v, grad = inputs(pattern, torch.float32)

    def run():
        out = sparse_attention(q, k, v, pattern, backend=backend)
        return out, *torch.autograd.grad((out * grad.float()).sum(), (q, k, v))

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


def test_the_pattern_may_be_a_temporary():
    q, k, v, _ = inputs(wythoff(4, 37))
    sparse_attention(q, k, v, Pattern.from_mask(torch.eye(37, dtype=torch.bool), num_heads=4)).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.ones_like(v))


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_memory_does_not_grow_with_the_square_of_the_tokens(backend):
    # 40,000 tokens: one head's square would be 6.4 GB.
    pattern = wythoff(2, 40_000, w_max=2000)
    q, k, v, _ = inputs(pattern, torch.float32, dim=4, batch=1)
    out = sparse_attention(q, k, v, pattern, backend=backend)
    out.sum().backward()
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "gather", "sdpa", "cpu"])
def test_autocast_casts_like_sdpa(backend):
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, grad = inputs(pattern, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sparse_attention(q, k, v, pattern, backend=backend)
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad((out.float() * grad.float()).sum(), (q, k, v))
    half = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    expected = sparse_attention(*half, pattern, backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=0 if backend in ("gather", "cpu") else 2e-2)
    for own, other in zip(grads, torch.autograd.grad((expected.float() * grad.float()).sum(), half), strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other.float(), rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", enabled=False):
        assert sparse_attention(q, k, v, pattern, backend=backend).dtype == torch.float32


@pytest.mark.parametrize("backend", ["gather", "sdpa", "reference", "cpu"])
def test_compiles_without_graph_breaks(backend):
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, grad = inputs(pattern, torch.float32)
    bias = torch.randn(1, 4, 38, 38)

    def run(q, k, v):
        return sparse_attention(q, k, v, pattern, bias=bias, backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, out = run(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(out, expected)
    for a, b in zip(
        torch.autograd.grad((out * grad.float()).sum(), (q, k, v)),
        torch.autograd.grad((expected * grad.float()).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_forward_mode_derivatives_are_right_or_refused_and_never_zero():
    pattern = PATTERNS["wythoff"]
    q, k, v, _ = (t.detach() for t in inputs(pattern))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        out = sparse_attention(dual, k, v, pattern, backend="reference")
        assert torch.autograd.forward_ad.unpack_dual(out).tangent.abs().max() > 0
        for backend in ("gather", "cpu", "triton"):
            with pytest.raises(RuntimeError, match=f"backend '{backend}' .* has no forward-mode derivative"):
                sparse_attention(dual, k, v, pattern, backend=backend)


def test_auto_explains_its_choice():
    sparse, full = wythoff(4, 196), patterns.dense(4, 50)
    q = torch.zeros(1, 4, 196, 16)
    assert explain_backend(q, sparse).backend == "cpu"
    assert "below" in explain_backend(q, sparse).reason
    assert explain_backend(q, sparse, transform=torch.nn.Identity()).backend == "gather"
    q = torch.zeros(1, 4, 50, 8)
    assert explain_backend(q, full).backend == "sdpa"
    choice = explain_backend(q, full, return_weights=True)
    assert choice.backend == "cpu"
    assert "weights" in choice.reason
    choice = explain_backend(q, full, transform=torch.nn.Identity())
    assert choice.backend == "reference"
    assert "transform" in choice.reason
    long = patterns.sliding_window(4, 40_000, 1500)
    choice = explain_backend(torch.empty(1, 4, 40_000, 16, device="meta"), long, transform=torch.nn.Identity())
    assert choice.backend == "gather"
    assert "too large" in choice.reason


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bias": torch.zeros(1, 4, 7)}, ValueError, "bias must be of shape .* pairs="),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"q": torch.zeros(2, 4, 37)}, ValueError, r"q must be of shape \(B, H, N, D\), got \(2, 4, 37\)"),
        ({"k": torch.zeros(2, 4, 36, 6)}, ValueError, "k must have the shape of q"),
        ({"v": torch.zeros(2, 3, 37, 6)}, ValueError, "v must have the batch, heads and tokens of q"),
        ({"k": torch.zeros(2, 4, 37, 6, dtype=torch.float64)}, ValueError, "k must have the dtype and device of q"),
        ({"q": torch.zeros(2, 4, 37, 6, dtype=torch.int32)}, TypeError, "q must be float64, .* got torch.int32"),
        ({"scale": torch.tensor(0.1)}, TypeError, "scale must be a number, got a tensor"),
        ({name: torch.zeros(2, 4, 37, 0) for name in "qkv"}, ValueError, "q must have at least one channel"),
        (
            {"bias": torch.zeros(1, 1, 37, 37, device="meta")},
            ValueError,
            r"bias must be on the device of q \(cpu\), got meta",
        ),
        ({"transform": Twist().to("meta")}, ValueError, "the scale of transform must be on the device of q"),
        ({"pattern": wythoff(3, 37)}, ValueError, "pattern has 3 heads, but q has 4"),
        ({"pattern": wythoff(4, 36)}, ValueError, r"pattern has 36 tokens \(0 prefix \+ 36\), but q has 37"),
        ({"pattern": "wythoff"}, TypeError, "pattern must be a fibottention.Pattern, got str"),
        ({"fill": "one"}, ValueError, "fill must be '-inf' or 'zero', got 'one'"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"fill": "zero", "dropout_p": 0.1}, ValueError, "fill='zero' .* dropout_p"),
        ({"fill": "zero", "transform": torch.nn.Identity()}, ValueError, "fill='zero' .* transform"),
        ({"bias": torch.zeros(37, 37, 1)}, ValueError, "bias must be of shape"),
        ({"bias": torch.zeros(4, 9)}, ValueError, "bias is a table .*, but the pattern has no relation"),
        (
            {"bias": torch.zeros(4, 9), "pattern": sliding_with_relation(4, 37)},
            ValueError,
            r"bias must be of shape \(H, buckets\) = \(4, 5\), got \(4, 9\)",
        ),
        ({"bias": torch.zeros(1, 3, 37, 37)}, ValueError, "bias must be of shape"),
        ({"bias": torch.zeros(5, 1, 37, 37)}, ValueError, r"batch of bias must divide the batch of q \(2\), got 5"),
        ({"backend": "flash"}, ValueError, "backend must be one of auto, .*, cpu, triton, got 'flash'"),
        (
            {"backend": "cpu", "transform": torch.nn.Identity()},
            ValueError,
            "backend 'cpu' cannot serve this call: of all transforms it knows only Twist",
        ),
        ({"backend": "sdpa", "fill": "zero"}, ValueError, "backend 'sdpa' cannot serve this call"),
        ({"backend": "sdpa", "return_weights": True}, ValueError, "backend 'sdpa' cannot serve this call"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {name: torch.zeros(2, 4, 37, 6) for name in "qkv"} | {"pattern": PATTERNS["wythoff"]} | change
    q, k, v, pattern = (arguments.pop(name) for name in ("q", "k", "v", "pattern"))
    with pytest.raises(error, match=message):
        sparse_attention(q, k, v, pattern, **arguments)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_is_not_taken_for_a_bias(dtype):
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(
        ValueError, match="bias must be of a floating dtype, since it is added to the scores, got torch"
    ):
        sparse_attention(q, q, q, patterns.dense(2, 9), bias=torch.ones(1, 2, 9, 9, dtype=dtype))
