"""na1d, na2d and na3d against natten's own results and a dense float64 oracle from the formula."""

import itertools
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from fibottention import na1d, na2d, na3d
from fibottention.ops.neighborhood import _natten_problem, neighborhood_attention
from tests.patterns.test_neighborhood import keys_by_formula

GOLDEN = np.load(Path(__file__).with_name("natten_golden.npz"))
CASES = sorted(name[:-4] for name in GOLDEN.files if name.endswith(" out") and "mixed" not in name)
FUNCTIONS = {1: na1d, 2: na2d, 3: na3d}
BACKENDS = ("reference", "gather", "sdpa", "cpu", "triton")
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}


def golden(name):
    return torch.from_numpy(GOLDEN[name])


@pytest.mark.parametrize("case", CASES)
def test_equals_natten(case):
    axes, kernel, stride, dilation, causal, more = case.split()
    q, k, v = (golden(f"{axes} {name}") for name in "qkv")
    options = {"stride": int(stride), "dilation": int(dilation), "is_causal": causal == "1"}
    if more == "1":
        options |= {"additional_keys": golden(f"{axes} more_k"), "additional_values": golden(f"{axes} more_v")}
    function = FUNCTIONS[int(axes[0])]
    out, log_sums = function(q, k, v, int(kernel), **options, return_lse=True)
    torch.testing.assert_close(out, golden(f"{case} out"), rtol=0, atol=2e-6)
    torch.testing.assert_close(log_sums, golden(f"{case} lse"), rtol=0, atol=2e-6)
    for backend in ("cpu", "sdpa"):
        torch.testing.assert_close(
            function(q, k, v, int(kernel), **options, backend=backend), golden(f"{case} out"), rtol=0, atol=2e-6
        )


def test_equals_natten_with_own_numbers_along_each_axis():
    q, k, v = (golden(f"3d {name}") for name in "qkv")
    out = na3d(q, k, v, (2, 3, 2), (1, 2, 1), (1, 1, 2), (True, False, False))
    torch.testing.assert_close(out, golden("3d mixed out"), rtol=0, atol=2e-6)


def oracle(q, k, v, kernel, stride, dilation, causal, scale=None, rpb=None, more=None, mask=None):
    """Dense float64 attention, from the formulas of the facts on neighborhood attention, section 1."""
    axes = q.ndim - 3
    grid = tuple(q.shape[1:-2])
    q, k, v = (t.double().flatten(1, axes).transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    kept = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    index = torch.zeros(*scores.shape[-2:], axes, dtype=torch.long)
    for query, keys in enumerate(keys_by_formula(grid, kernel, stride, dilation, causal)):
        kept[query, keys] = True
        for key in keys:
            steps = zip(np.unravel_index(key, grid), np.unravel_index(query, grid), kernel, dilation)
            index[query, key] = torch.tensor([size - 1 + int(b - a) // d for b, a, size, d in steps])
    if rpb is not None:
        scores = scores + rpb.double()[:, *index.unbind(-1)].where(kept, 0.0)
    kept = kept.expand(len(q), -1, -1)
    if mask is not None:
        kept = kept & mask.flatten(1)[:, None]
    if more is not None:
        more_k, more_v = (t.double().transpose(1, 2).repeat_interleave(groups, 1) for t in more)
        scores = torch.cat([q @ more_k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale), scores], -1)
        kept = torch.cat([kept.new_ones(*kept.shape[:2], more_k.shape[2]), kept], -1)
        v = torch.cat([more_v, v], 2)
    scores = scores.masked_fill(~kept[:, None], -torch.inf)
    dead = ~kept.any(-1)[:, None, :, None]
    weights = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    log_sums = scores.masked_fill(dead, 0).logsumexp(-1).masked_fill(dead[..., 0], -torch.inf)
    return (weights @ v).transpose(1, 2).unflatten(1, grid), log_sums.transpose(1, 2).unflatten(1, grid)


def tensors(grid, heads, dim, dtype, key_heads=None, value_dim=None, kernel=None, more=0, batch=2):
    generator = torch.Generator().manual_seed(1)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    key_heads, value_dim = key_heads or heads, value_dim or dim
    return {
        "query": make(batch, *grid, heads, dim),
        "key": make(batch, *grid, key_heads, dim),
        "value": make(batch, *grid, key_heads, value_dim),
        "rpb": None if kernel is None else make(heads, *(2 * k - 1 for k in kernel)),
        "additional_keys": make(batch, more, key_heads, dim) if more else None,
        "additional_values": make(batch, more, key_heads, value_dim) if more else None,
    }


def compare(inputs, kernel, stride, dilation, causal, backend, mask=None, scale=None):
    """Compare values and every gradient with the oracle."""
    q, k, v, rpb = (inputs[name] for name in ("query", "key", "value", "rpb"))
    leaves = [t for t in inputs.values() if t is not None]
    out = FUNCTIONS[q.ndim - 3](**inputs, kernel_size=kernel, stride=stride, dilation=dilation, is_causal=causal,
                                attn_mask=mask, scale=scale, backend=backend)  # fmt: skip
    more = None if inputs["additional_keys"] is None else (inputs["additional_keys"], inputs["additional_values"])
    expected, _ = oracle(q, k, v, kernel, stride, dilation, causal, scale, rpb, more, mask)
    assert out.dtype == q.dtype
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(q.dtype)
    ours = torch.autograd.grad((out * grad).sum(), leaves)
    theirs = torch.autograd.grad((expected * grad).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        scaled = tolerance * max(1.0, b.double().abs().max().item())
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=scaled)


SETTINGS = {
    "1d": ((11,), (3,), (1,), (2,), (False,)),
    "1d_stride": ((11,), (4,), (3,), (2,), (False,)),
    "2d": ((7, 6), (3, 3), (1, 1), (2, 1), (False, False)),
    "2d_even_causal": ((6, 5), (2, 4), (1, 1), (2, 1), (True, False)),
    "2d_stride": ((6, 7), (5, 3), (2, 3), (1, 2), (False, True)),
    "2d_whole": ((3, 5), (3, 5), (1, 1), (1, 1), (False, False)),
    "3d": ((3, 4, 5), (3, 2, 3), (1, 1, 1), (1, 2, 1), (False, False, True)),
    "1_token": ((1, 1), (1, 1), (1, 1), (1, 1), (False, False)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in SETTINGS]
    + [("2d", d) for d in TOLERANCE if d != torch.float64]
    + [("2d_stride", torch.float32)],
)
def test_values_and_gradients(name, dtype, backend):
    grid, kernel, stride, *rest = SETTINGS[name]
    bias = kernel if set(stride) == {1} else None
    compare(tensors(grid, 2, 8, dtype, kernel=bias), kernel, stride, *rest, backend)


@pytest.mark.parametrize("backend", ["auto", "gather", "cpu"])
@pytest.mark.parametrize("name", ["1d", "2d", "2d_stride", "3d"])
def test_additional_keys_grouped_queries_value_dims_and_scale(name, backend):
    grid, kernel, stride, *rest = SETTINGS[name]
    bias = kernel if set(stride) == {1} else None
    inputs = tensors(grid, 6, 5, torch.float64, key_heads=2, value_dim=7, kernel=bias, more=3)
    compare(inputs, kernel, stride, *rest, backend, scale=0.7)


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["1d", "2d", "2d_stride"])
def test_masked_keys(name, backend, more):
    grid, kernel, stride, *rest = SETTINGS[name]
    bias = kernel if set(stride) == {1} else None
    mask = torch.ones(2, *grid, dtype=torch.bool)
    mask[1, ..., 2:] = False
    mask[0].view(-1)[0] = False
    mask[1, 0] = False
    compare(tensors(grid, 2, 8, torch.float32, kernel=bias, more=more), kernel, stride, *rest, backend, mask=mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_whose_window_is_masked_gives_zeros(backend):
    inputs = tensors((12,), 2, 8, torch.float32)
    mask = torch.arange(12)[None] < 6
    out = na1d(**inputs, kernel_size=3, attn_mask=mask, backend=backend)
    assert (out[:, 8:] == 0).all()
    assert (out[:, :7] != 0).any(-1).all()
    out.sum().backward()
    for name in ("query", "key", "value"):
        assert inputs[name].grad.isfinite().all()
        assert (inputs[name].grad[:, 8:] == 0).all()


def test_masked_keys_equal_a_shorter_sequence():
    """Padding at the end that is masked changes nothing for queries whose window does not reach it."""
    inputs = {name: t.detach() for name, t in tensors((20,), 2, 8, torch.float64).items() if t is not None}
    mask = torch.arange(20)[None] < 15
    padded = na1d(**inputs, kernel_size=5, is_causal=True, attn_mask=mask)
    short = na1d(**{name: t[:, :15] for name, t in inputs.items()}, kernel_size=5, is_causal=True)
    torch.testing.assert_close(padded[:, :15], short)


@pytest.mark.parametrize("mask", [False, True])
def test_gradients_of_the_log_sum(mask):
    grid, kernel, *rest = SETTINGS["2d"]
    inputs = tensors(grid, 2, 4, torch.float64, kernel=kernel, more=2)
    seen = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0)) < 0.5 if mask else None
    leaves = list(inputs.values())
    out, log_sums = na2d(**inputs, kernel_size=kernel, dilation=rest[1], attn_mask=seen, return_lse=True)
    more = (inputs["additional_keys"], inputs["additional_values"])
    expected = oracle(inputs["query"], inputs["key"], inputs["value"], kernel, *rest, None, inputs["rpb"], more, seen)
    torch.testing.assert_close((out, log_sums), expected)
    ours = torch.autograd.grad(out.sum() + log_sums.sin().sum(), leaves)
    theirs = torch.autograd.grad(expected[0].sum() + expected[1].sin().sum(), leaves)
    torch.testing.assert_close(ours, theirs)


def test_the_log_sum_of_no_key_is_minus_infinity_without_gradient():
    inputs = tensors((8,), 1, 4, torch.float64)
    mask = torch.zeros(1, 8, dtype=torch.bool)
    out, log_sums = na1d(**inputs, kernel_size=3, attn_mask=mask, return_lse=True)
    assert log_sums.isneginf().all()
    (out.sum() + log_sums.exp().sum()).backward()
    assert all((inputs[name].grad == 0).all() for name in ("query", "key"))


@pytest.mark.parametrize("dim", [3, 8, 16, 24])
def test_gradcheck(dim):
    inputs = tensors((4, 5), 2, dim, torch.float64, kernel=(3, 3), more=1, batch=1)
    names = list(inputs)
    assert torch.autograd.gradcheck(
        lambda *values: na2d(**dict(zip(names, values)), kernel_size=3), tuple(inputs.values()), fast_mode=True
    )


def test_non_contiguous_inputs():
    """The views of a fused projection, and a grid that is cut out of a larger one."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 6, 9, 3, 2, 8, generator=generator)
    for qkv in (fused.unbind(3), fused[:, :, 1:7].unbind(3), fused.transpose(1, 2).unbind(3)):
        out = na2d(*qkv, 3)
        torch.testing.assert_close(out, na2d(*(t.contiguous() for t in qkv), 3))


def test_compiles_in_one_graph():
    inputs = tensors((7, 6), 2, 8, torch.float32, kernel=(3, 3), more=2)
    mask = torch.rand(2, 7, 6, generator=torch.Generator().manual_seed(0)) < 0.7

    def attend(values, seen):
        return na2d(**values, kernel_size=3, dilation=2, attn_mask=seen)

    torch.testing.assert_close(
        torch.compile(attend, fullgraph=True, backend="aot_eager")(inputs, mask), attend(inputs, mask)
    )


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiles_again_for_another_size(fullgraph):
    torch._dynamo.reset()

    def attend(x, rpb):
        return na2d(na2d(x, x, x, 3, rpb=rpb), x, x, 3, dilation=2)

    compiled = torch.compile(attend, fullgraph=fullgraph, backend="aot_eager")
    rpb = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    for size in ((8, 8), (9, 9), (12, 7)):
        x = torch.randn(1, *size, 2, 4, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(compiled(x, rpb), attend(x, rpb))


@pytest.mark.parametrize("return_lse", [False, True])
def test_autocast_gives_half_precision(return_lse):
    inputs = tensors((7, 6), 2, 8, torch.float32, kernel=(3, 3), more=1)
    mixed = {**inputs, "query": inputs["query"].bfloat16()}
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [na2d(**given, kernel_size=3, return_lse=return_lse) for given in (inputs, mixed)]
    for out in outputs:
        out = out[0] if return_lse else out
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), na2d(**inputs, kernel_size=3), rtol=0.05, atol=0.05)


def test_an_empty_batch_gives_an_empty_result():
    inputs = {name: t[:0] for name, t in tensors((7, 6), 2, 8, torch.float32, more=2).items() if t is not None}
    mask = torch.ones(0, 7, 6, dtype=torch.bool)
    assert na2d(**inputs, kernel_size=3).shape == (0, 7, 6, 2, 8)
    assert na2d(**inputs, kernel_size=3, attn_mask=mask).shape == (0, 7, 6, 2, 8)
    out, log_sums = na2d(**inputs, kernel_size=3, return_lse=True)
    assert (out.shape, log_sums.shape) == ((0, 7, 6, 2, 8), (0, 7, 6, 2))
    na2d(**{name: t.requires_grad_() for name, t in inputs.items()}, kernel_size=3, attn_mask=mask).sum().backward()


def test_dropout_is_of_the_weights():
    inputs = {name: t for name, t in tensors((9, 9), 1, 4, torch.float32).items() if t is not None}
    inputs["value"] = torch.ones_like(inputs["value"])
    torch.manual_seed(0)
    out, _ = neighborhood_attention(2, **inputs, kernel_size=3, dropout_p=0.5)
    assert 0.8 < out.mean() < 1.2
    assert out.std() > 0.1


def make(shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": make((2, 6, 8))}, ValueError, r"query must be of shape \(B, H, W, heads, head_dim\)"),
        ({"key": make((2, 6, 7, 2, 8))}, ValueError, "key and value must have the batch and grid of query"),
        ({"key": make((2, 6, 6, 2, 4))}, ValueError, r"key must have the head_dim of query \(8\), got 4"),
        ({"key": make((2, 6, 6, 3, 8))}, ValueError, "the heads of key and value must be equal and divide"),
        ({"kernel_size": 7}, ValueError, r"kernel_size \* dilation must be at most"),
        ({"rpb": make((2, 3, 3))}, ValueError, r"rpb must be of shape .* = \(2, 5, 5\), got \(2, 3, 3\)"),
        ({"rpb": make((2, 5, 5)), "stride": 2}, ValueError, "a relative bias needs stride=1"),
        ({"additional_keys": make((2, 1, 2, 8))}, ValueError, "must be given together"),
        (
            {"additional_keys": make((1, 1, 2, 8)), "additional_values": make((2, 1, 2, 8))},
            ValueError,
            "additional_keys must be of shape",
        ),
        ({"attn_mask": make((2, 6, 6))}, TypeError, "attn_mask must be boolean"),
        ({"attn_mask": make((2, 5, 6), torch.bool)}, ValueError, "attn_mask must be of shape"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, natten, .* got 'cuda'"),
        ({"backend": "cpu", "return_lse": True}, ValueError, "return_lse=True is served by the backend 'gather'"),
        (
            dict.fromkeys(("query", "key", "value"), make((2, 6, 6, 2, 8), torch.int64)),
            TypeError,
            "q must be float64",
        ),
        ({"key": make((2, 6, 6, 2, 8), torch.float64)}, ValueError, "key must have the dtype of query"),
        ({"value": make((2, 6, 6, 2, 8)).to("meta")}, ValueError, r"value must be on the device of query \(cpu\)"),
        ({"query": None}, TypeError, "query must be a torch.Tensor, got NoneType"),
        ({"attn_mask": [True]}, TypeError, "attn_mask must be a torch.Tensor, got list"),
        (
            {"additional_keys": make((2,)), "additional_values": make((2,))},
            ValueError,
            r"additional_keys must be of shape \(B, n, heads, head_dim\), got \(2,\)",
        ),
        (
            dict.fromkeys(("additional_keys", "additional_values"), make((2, 1, 2, 8), torch.bfloat16)),
            ValueError,
            "additional_keys must have the dtype of query",
        ),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    good = dict.fromkeys(("query", "key", "value"), make((2, 6, 6, 2, 8)))
    with pytest.raises(error, match=message):
        na2d(**{**good, "kernel_size": 3, **change})


@pytest.fixture
def natten(monkeypatch):
    """A stand-in that answers like natten 0.21 and remembers the call."""
    calls = []

    def attend(query, key, value, *, stride, **options):
        options["stride"] = stride
        calls.append(options)
        out = torch.full_like(value, 3.0)
        return (out, out[..., 0]) if options["return_lse"] else out

    module = types.ModuleType("natten")
    module.__spec__ = types.SimpleNamespace(name="natten", origin="natten.py")
    module.na2d = attend
    monkeypatch.setitem(sys.modules, "natten", module)
    _natten_problem.cache_clear()
    yield calls
    _natten_problem.cache_clear()


def test_natten_gets_the_call_when_asked(natten):
    q = make((1, 6, 6, 2, 8))
    more = make((1, 2, 2, 8))
    out, log_sums = na2d(q, q, q, 3, 2, (1, 2), (True, False), 0.5, None, more, more, return_lse=True, backend="natten")
    assert (out == 3).all()
    assert log_sums.shape == (1, 6, 6, 2)
    assert natten[0].pop("additional_keys") is more
    assert natten[0].pop("additional_values") is more
    assert natten == [
        {
            "kernel_size": (3, 3),
            "stride": (2, 2),
            "dilation": (1, 2),
            "is_causal": (True, False),
            "scale": 0.5,
            "return_lse": True,
        }
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rpb": make((2, 5, 5))}, "no relative bias"),
        ({"attn_mask": make((1, 6, 6), torch.bool)}, "no attn_mask"),
        ({"query": make((1, 6, 6, 2, 8)).requires_grad_()}, "no gradients on cpu"),
        ({"value": make((1, 6, 6, 2, 8)).requires_grad_()}, "no gradients on cpu"),
    ],
)
def test_natten_is_refused_what_it_cannot_do(natten, change, message):
    good = dict.fromkeys(("query", "key", "value"), make((1, 6, 6, 2, 8)))
    with pytest.raises(ValueError, match=f"backend 'natten' cannot serve this call: it has {message}"):
        na2d(**{**good, "kernel_size": 3, "backend": "natten", **change})


@pytest.mark.parametrize("origin", [None, types.ModuleType("natten")])
def test_natten_that_is_not_installed_is_named(monkeypatch, origin):
    monkeypatch.setitem(sys.modules, "natten", origin)  # nothing, or a module without a spec
    _natten_problem.cache_clear()
    q = make((1, 6, 6, 2, 8))
    with pytest.raises(ValueError, match="natten is not installed"):
        na2d(q, q, q, 3, backend="natten")
    _natten_problem.cache_clear()


def test_every_window_is_used_once_at_large_dilation():
    """56 tokens with dilation 8 and kernel 7 (the first level of DiNAT at 224): each residue class is one window."""
    x = torch.arange(56.0).view(1, 56, 1, 1)
    out = na1d(torch.zeros_like(x), torch.zeros_like(x), x, 7, dilation=8)
    expected = [np.mean([t for t in range(56) if t % 8 == i % 8]) for i in range(56)]
    torch.testing.assert_close(out.flatten(), torch.tensor(expected, dtype=torch.float32))


def test_axes_are_independent_for_separable_values():
    """Uniform weights over a window are the product of uniform weights along its axes."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(9, generator=generator), torch.rand(8, generator=generator)
    value = (a[:, None] * b)[None, :, :, None, None]
    zeros = torch.zeros_like(value)
    image = na2d(zeros, zeros, value, (5, 3), dilation=(1, 2))[0, :, :, 0, 0]
    lines = [
        na1d(torch.zeros(1, len(x), 1, 1), torch.zeros(1, len(x), 1, 1), x.view(1, -1, 1, 1), k, dilation=d).flatten()
        for x, k, d in ((a, 5, 1), (b, 3, 2))
    ]
    torch.testing.assert_close(image, lines[0][:, None] * lines[1])
    assert len(list(itertools.product(a, b))) == image.numel()
