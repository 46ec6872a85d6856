"""TWIST on every backend, against the formula written down as loops."""

import pytest
import torch

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


def test_the_suppressed_weight_is_bounded():
    """The sum of the transformed trivial weights is at most s * t * m (facts on SATA)."""
    rows = torch.randn(200, 30, dtype=torch.float64).mul(3).softmax(-1)
    top = rows.amax(-1, keepdim=True)
    out = Twist(0.1, 0.5)(rows)
    trivial = torch.where(rows <= 0.1 * top, out, 0.0).sum(-1, keepdim=True)
    assert (trivial <= 0.5 * 0.1 * top + 1e-12).all()


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
