"""TWIST on every backend, against the formula written down as loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fibottention import Twist, sparse_attention
from fibottention.patterns import Pattern, wythoff
from tests.ops.test_sparse_attention import PATTERNS, inputs


def by_the_letter(row, threshold, scale, mode):
    """arXiv 2210.12333, one attention row: trivial entries become s A^2 / S."""
    limit = threshold * max(row) if mode == "relative" else threshold
    trivial = [a <= limit for a in row]
    total = sum(a for a, small in zip(row, trivial, strict=True) if small)
    return [scale * a * a / total if small and total > 0 else a for a, small in zip(row, trivial, strict=True)]


@pytest.mark.parametrize("mode", ["relative", "absolute"])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 1.0])
def test_formula(mode, threshold):
    rows = torch.rand(20, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(4).softmax(-1)
    expected = torch.tensor([by_the_letter(row.tolist(), threshold, 0.7, mode) for row in rows], dtype=torch.float64)
    twist = Twist(threshold, 0.7, mode=mode).double()
    torch.testing.assert_close(twist(rows), expected, rtol=1e-7, atol=1e-12)
    assert (twist(rows) != rows).any() == (threshold > 0)


@given(
    scores=st.lists(st.lists(st.floats(-30, 30), min_size=5, max_size=5), min_size=1, max_size=4),
    threshold=st.floats(0, 1),
    scale=st.floats(0, 2),
)
def test_the_suppressed_weight_is_bounded(scores, threshold, scale):
    """The sum of the transformed trivial weights is at most s * t * m (facts on SATA), and none is negative."""
    rows = torch.tensor(scores, dtype=torch.float64).softmax(-1)
    top = rows.amax(-1, keepdim=True)
    out = Twist(threshold, scale).double()(rows)
    trivial = torch.where(rows <= threshold * top, out, 0.0).sum(-1, keepdim=True)
    assert (trivial <= scale * threshold * top * (1 + 1e-6) + 1e-30).all()
    assert (out >= 0).all()
    assert (out[rows > threshold * top] == rows[rows > threshold * top]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_limits_have_closed_forms(backend, dtype):
    """t = 1: all weights are trivial and sum to 1; t = 0: none is; one trivial weight with s = 1 stays."""
    pattern = Pattern.from_offsets([range(-11, 12)], 12, num_heads=2)
    q, k, v = (t.to(dtype) for t in torch.randn(3, 1, 2, 12, 8, generator=torch.Generator().manual_seed(0)))
    scores = q.double() @ k.double().mT / 8**0.5
    weights = scores.softmax(-1)
    limit = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for threshold, scale, expected in (
        (1.0, 0.5, 0.5 * weights**2),
        (1.0, 0.0, 0.0 * weights),
        (1.0, 1.0, weights**2),
        (0.0, 0.5, weights),
    ):
        out = sparse_attention(q, k, v, pattern, transform=Twist(threshold, scale), backend=backend)
        torch.testing.assert_close(out.double(), expected @ v.double(), rtol=limit, atol=limit)
    two = Pattern.from_offsets([[0, 1]], 12, num_heads=2, allow_empty=True)
    kept = scores.masked_fill(~two.mask(), float("-inf")).softmax(-1)
    for threshold in (0.0, 0.9, 0.999):  # at most the smaller one of the two weights is trivial
        out = sparse_attention(q, k, v, two, transform=Twist(threshold, 1.0), backend=backend)
        torch.testing.assert_close(out.double(), kept @ v.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
@pytest.mark.parametrize("mode", ["relative", "absolute"])
@pytest.mark.parametrize("name", ["wythoff_cls", "shared_rows", "empty_rows", "dense", "one_token", "bigbird"])
def test_values_and_gradients_in_attention(name, mode, backend):
    pattern = PATTERNS[name]
    q, k, v, grad = inputs(pattern)
    threshold = 0.4 if mode == "relative" else 0.15
    twist = Twist(threshold, 0.7, mode=mode).double()
    mask = pattern.mask()
    scores = torch.where(mask, (q @ k.mT / q.shape[-1] ** 0.5).exp(), 0.0)
    weights = scores / scores.sum(-1, keepdim=True).clamp(min=1e-300)
    limit = threshold * weights.detach().amax(-1, keepdim=True) if mode == "relative" else threshold
    trivial = (weights.detach() <= limit) & mask
    total = torch.where(trivial, weights, 0.0).sum(-1, keepdim=True)
    suppressed = twist.scale * weights * weights / torch.where(total > 0, total, 1.0)
    expected = torch.where(trivial, suppressed, weights) @ v
    assert trivial.any() == (name not in ("one_token", "empty_rows"))  # rows of one key have no trivial weight
    out = sparse_attention(q, k, v, pattern, transform=twist, backend=backend)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    leaves = (q, k, v, twist.scale)
    for own, other in zip(
        torch.autograd.grad((out * grad).sum(), leaves),
        torch.autograd.grad((expected * grad).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_gradcheck(backend):
    pattern = wythoff(2, 7, prefix_tokens=1)
    q, k, v, _ = inputs(pattern, dim=3, batch=1, layout="contiguous")
    twist = Twist(0.5).double()

    def attend(q, k, v, scale):
        own = Twist(0.5).double()
        del own.scale
        own.scale = scale
        return sparse_attention(q, k, v, pattern, transform=own, backend=backend)

    assert torch.autograd.gradcheck(attend, (q, k, v, twist.scale))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_no_nan(backend, dtype):
    """Rows without trivial entries, with one key, with equal scores, and with keys masked by the bias."""
    window = Pattern.from_offsets([range(-3, 4)], 12, num_heads=2)
    alone = Pattern.from_offsets([[0]], 12, num_heads=2)
    q = torch.randn(1, 2, 12, 8).to(dtype).requires_grad_()
    masked = torch.zeros(1, 1, 12, 12)
    masked[..., 5:] = float("-inf")
    for pattern, query, bias, threshold in (
        (window, q, None, 0.0),
        (alone, q, None, 0.1),
        (window, torch.zeros_like(q, requires_grad=True), None, 1.0),
        (window, q, masked, 0.1),
        (window, q * 1000, None, 0.1),
    ):
        twist = Twist(threshold)
        out = sparse_attention(query, q, q, pattern, bias=bias, transform=twist, backend=backend)
        grads = torch.autograd.grad(out.float().sum(), (q, twist.scale))
        assert all(t.isfinite().all() for t in (out, *grads))


def test_settings():
    assert isinstance(Twist().scale, torch.nn.Parameter)
    fixed = Twist(scale=0.75, learnable=False)
    assert not list(fixed.parameters())
    assert fixed.state_dict()["scale"] == 0.75
    assert repr(fixed) == "Twist(threshold=0.1, scale=0.75, learnable=False, mode='relative')"
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\], got 1.5"):
        Twist(1.5)
    with pytest.raises(ValueError, match="mode must be one of relative, absolute, got 'both'"):
        Twist(mode="both")
