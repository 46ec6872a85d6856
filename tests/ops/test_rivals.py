"""Top-k, Linformer and efficient attention: against their formulas written down, and their costs as counted."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fibottention import EfficientAttention, Linformer, TopK
from fibottention.ops.rivals import EfficientAttentionOp, LinformerOp, TopKOp


def tensors(tokens=9, dim=5, batch=2, heads=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, tokens, heads, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    return tuple(t.to(dtype).transpose(1, 2).requires_grad_() for t in (q, k, v))  # not contiguous


def dense(scores, v):
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("count", [1, 3, 9, 20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_topk_is_masked_attention(count, with_bias):
    q, k, v = tensors()
    bias = torch.randn(1, 3, 9, 9, dtype=torch.float64, requires_grad=True) if with_bias else None
    scores = q @ k.mT * 0.4 + (0 if bias is None else bias)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row, out in zip(scores.reshape(-1, 9), kept.view(-1, 9), strict=True):
        for j in range(9):
            out[j] = int((row > row[j]).sum()) < count
    expected = dense(scores.masked_fill(~kept, float("-inf")), v)
    out = TopKOp(count)(q, k, v, bias=bias, scale=0.4, dropout_p=0.0)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    leaves = (q, k, v) if bias is None else (q, k, v, bias)
    grad = torch.randn_like(out)
    for own, other in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


def test_topk_repeats_a_bias_of_windows_along_the_batch():
    q, k, v = tensors(batch=4)
    masks = torch.randn(2, 1, 9, 9, dtype=torch.float64)
    out = TopKOp(4)(q, k, v, bias=masks, scale=1.0, dropout_p=0.0)
    for i in range(4):
        one = TopKOp(4)(q[i : i + 1], k[i : i + 1], v[i : i + 1], bias=masks[i % 2, None], scale=1.0, dropout_p=0.0)
        torch.testing.assert_close(out[i : i + 1], one)


def test_linformer_is_its_formula():
    q, k, v = tensors()
    torch.manual_seed(0)
    op = LinformerOp(4, 9).double()
    out = op(q, k, v, bias=None, scale=0.4, dropout_p=0.0)
    keys = torch.einsum("pn,bhnd->bhpd", op.key_projection, k)
    values = torch.einsum("pn,bhnd->bhpd", op.value_projection, v)
    expected = dense(torch.einsum("bhnd,bhpd->bhnp", q, keys) * 0.4, values)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    leaves, grad = (q, k, v, *op.parameters()), torch.randn_like(out)
    for own, other in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)
    keys_of_noise = LinformerOp(64, 4096).key_projection @ torch.randn(4096, 64)
    assert keys_of_noise.std().item() == pytest.approx(1, rel=0.1)
    with pytest.raises(ValueError, match="was made for 9 tokens, prefix tokens included, got 8"):
        op(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], bias=None, scale=1.0, dropout_p=0.0)


def test_efficient_attention_is_its_formula():
    q, k, v = tensors()
    out = EfficientAttentionOp()(q, k, v, bias=None, scale=0.4, dropout_p=0.0)
    weights = q.softmax(-1) @ k.softmax(-2).mT  # the paper's implicit attention map: rows that sum to 1
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    expected = weights @ v
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(out)
    for own, other in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


OPS = {
    "topk": lambda n: TopKOp(3),
    "linformer": lambda n: LinformerOp(4, n),
    "efficient": lambda n: EfficientAttentionOp(),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_gradcheck(name, tokens):
    op = OPS[name](tokens).double()
    leaves = tensors(tokens, dim=3, batch=1, heads=2)
    assert torch.autograd.gradcheck(lambda q, k, v: op(q, k, v, bias=None, scale=0.7, dropout_p=0.0), leaves)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_dtypes_and_autocast(name, dtype, limit):
    op = OPS[name](9).double()
    exact = op(*tensors(), bias=None, scale=0.4, dropout_p=0.0)
    op = op.to(dtype)
    out = op(*tensors(dtype=dtype), bias=None, scale=0.4, dropout_p=0.0)
    assert out.dtype == dtype
    if name != "topk":  # rounding may change which scores are the largest
        torch.testing.assert_close(out.double(), exact, rtol=limit, atol=limit)
    assert out.isfinite().all()
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", dtype=dtype):
            assert op.float()(*tensors(dtype=torch.float32), bias=None, scale=0.4, dropout_p=0.0).dtype == dtype


@pytest.mark.parametrize(
    ("spec", "pruned"), [(TopK(), 0.9848), (Linformer(), 0.9796)]
)  # arXiv 2406.19391's later benchmark code, at 196 patches with CLS or without
def test_published_share_of_pruned_pairs(spec, pruned):
    shares = [1 - spec.head_cost(n, 64)[0] / n**2 for n in (196, 197)]
    assert min(abs(share - pruned) for share in shares) < 5e-5


@pytest.mark.parametrize("spec", [TopK(), Linformer(), EfficientAttention()])
def test_costs_are_those_that_are_counted(spec):
    heads, tokens, dim = 3, 50, 16
    op = spec.attention(tokens)
    q, k, v = tensors(tokens, dim, 1, heads, torch.float32)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        op(q, k, v, bias=None, scale=1.0, dropout_p=0.0)
    cost = spec.cost(heads, tokens - 1, dim, prefix_tokens=1)
    counted = counter.get_total_flops() // 2
    assert cost.macs == counted
    assert cost.dense_macs == 2 * heads * tokens**2 * dim


@pytest.mark.parametrize("name", ["linformer", "efficient"])
def test_what_cannot_be(name):
    q, k, v = tensors(dtype=torch.float32)
    op = OPS[name](9)
    with pytest.raises(ValueError, match="takes no bias or mask"):
        op(q, k, v, bias=torch.zeros(1, 1, 9, 9), scale=1.0, dropout_p=0.0)
    if name == "efficient":
        with pytest.raises(ValueError, match="no weights to drop: it needs a dropout of 0, got 0.1"):
            op(q, k, v, bias=None, scale=1.0, dropout_p=0.1)
    for spec in (TopK, Linformer):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            spec(0)
    with pytest.raises(ValueError, match="sequence_length must be given for linformer"):
        Linformer().attention(None)
    with pytest.raises(ValueError, match="topk has no fixed pattern: The keys with the k largest scores"):
        TopK().pattern(2, 9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_topk_compares_exact_scores(dtype):
    """Products of half precision would overflow, or round scores to be equal."""
    q, k, v = (torch.full((1, 1, 6, 64), value, dtype=dtype) for value in (40.0, 40.0, 1.0))
    out = TopKOp(3)(q, k, v, bias=None, scale=0.125, dropout_p=0.0)
    torch.testing.assert_close(out, v)
    k = torch.ones(1, 1, 6, 64, dtype=dtype)
    k[..., 4, 0] = 1 + 2**-6  # differs from the others by less than half precision tells apart in a sum of 64
    v = torch.arange(6, dtype=dtype).view(1, 1, 6, 1)
    out = TopKOp(1)(torch.ones_like(k), k, v, bias=None, scale=1.0, dropout_p=0.0)
    assert (out == 4).all()


def test_topk_gives_zeros_where_all_keys_are_masked():
    q, k, v = tensors()
    bias = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    bias[..., 2, :] = float("-inf")
    bias[..., 3, 2:] = float("-inf")
    out = TopKOp(3)(q, k, v, bias=bias, scale=0.4, dropout_p=0.0)
    assert (out[:, :, 2] == 0).all()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(t.isfinite().all() for t in (out, *grads))
