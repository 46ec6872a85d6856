"""The Triton kernels, in Triton's interpreter on the CPU; benchmarks/gpu_check.py checks them on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fibottention import Twist, explain_backend, patterns, sparse_attention
from fibottention.ops import triton
from fibottention.patterns import Pattern, wythoff
from tests.ops.test_sparse_attention import (
    PATTERNS,
    TOLERANCE,
    compare,
    inputs,
    oracle,
    sliding_with_relation,
)


@pytest.mark.parametrize("fill", ["-inf", "zero"])
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ("dense", "shared_rows")])
def test_values_and_gradients(name, fill):
    for with_bias in (False, True):
        compare(PATTERNS[name], "triton", fill, with_bias=with_bias)


def test_flops_are_those_of_the_kept_pairs():
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, grad = inputs(pattern, batch=2, dim=8)
    with FlopCounterMode(display=False) as counter:
        out = sparse_attention(q, k, v, pattern, backend="triton")
        assert counter.get_total_flops() == 2 * 2 * pattern.macs(8)
        (out * grad).sum().backward()
        assert counter.get_total_flops() == (2 + 5) * 2 * pattern.macs(8)


def test_full_and_shared_rows():
    compare(patterns.dense(2, 5, prefix_tokens=1), "triton", "zero", with_bias=True)
    compare(patterns.fixed(2, 12, prefix_tokens=1), "triton", "zero", with_bias=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype):
    pattern = wythoff(2, 20, prefix_tokens=1)
    compare(pattern, "triton", "-inf", dtype, dim=16)
    compare(pattern, "triton", "zero", dtype, dim=16, with_bias=True)


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (3, 5), (33, 2)])
def test_odd_head_dims_and_several_blocks(dim, value_dim):
    pattern = wythoff(2, 70, prefix_tokens=1)
    compare(pattern, "triton", "-inf", dim=dim, value_dim=value_dim, layout="contiguous", batch=1)


@pytest.mark.parametrize(("prefix", "per_head"), [(0, False), (2, True)])
def test_bias_from_a_table_by_relation(prefix, per_head):
    pattern = sliding_with_relation(3, 12, prefix, per_head)
    q, k, v, grad = inputs(pattern)
    table = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for backend in ("triton", "reference"):
        out = sparse_attention(q, k, v, pattern, bias=table, backend=backend)
        results.append((out, *torch.autograd.grad((out * grad).sum(), (q, k, v, table))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_bias_of_few_images_and_rows_masked_whole():
    pattern = wythoff(2, 10, prefix_tokens=1)
    q, k, v, _ = inputs(pattern, batch=4)
    bias = torch.randn(2, 1, 11, 11, dtype=torch.float64)
    bias[:, :, 3] = float("-inf")
    bias[:, :, 0] = float("-inf")
    bias.requires_grad_()
    out = sparse_attention(q, k, v, pattern, bias=bias, backend="triton")
    expected = sparse_attention(q, k, v, pattern, bias=bias, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert (out[:, :, [0, 3]] == 0).all()
    own = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    other = torch.autograd.grad(expected.square().sum(), (q, k, v, bias))
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_autocast_rounds_the_inputs_and_nothing_else():
    pattern = wythoff(2, 12, prefix_tokens=2)
    q, k, v, grad = inputs(pattern, torch.float32)
    half = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    expected = sparse_attention(*half, pattern, backend="triton")
    expected_grads = torch.autograd.grad((expected.float() * grad.float()).sum(), half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sparse_attention(q, k, v, pattern, backend="triton")
        grads = torch.autograd.grad((out.float() * grad.float()).sum(), (q, k, v))
    assert torch.equal(out, expected)
    for own, other in zip(grads, expected_grads, strict=True):
        assert torch.equal(own, other.float())


def test_a_complete_row_of_small_scores_under_zero_fill():
    pattern = Pattern.from_rows([[[0, 1, 2], [0], [1]]], 3, num_heads=2)
    q, k, v, _ = inputs(pattern, torch.float32)
    bias = torch.full((1, 1, 3, 3), -200.0)
    results = []
    for backend in ("triton", "cpu", "reference"):
        out = sparse_attention(q, k, v, pattern, bias=bias, fill="zero", backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for others in zip(*results, strict=True):
        assert others[0].isfinite().all()
        torch.testing.assert_close(others[0], others[2], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(others[1], others[2], rtol=1e-4, atol=1e-5)


def test_repeated_calls_are_equal_bit_for_bit():
    pattern = patterns.random(2, 40, 0.1, prefix_tokens=1)
    q, k, v, grad = inputs(pattern, torch.float32)

    def run():
        out = sparse_attention(q, k, v, pattern, backend="triton")
        return out, *torch.autograd.grad((out * grad.float()).sum(), (q, k, v))

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pattern", [wythoff(2, 7, prefix_tokens=1), patterns.fixed(2, 6)], ids=["offsets", "rows"])
def test_registration_is_sound(pattern):
    q, k, v, grad = inputs(pattern, batch=2, dim=3)
    groups = pattern.num_heads // pattern.stored_heads
    bias = torch.randn(1, groups, pattern.nnz // groups, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(triton.attention_operator, (q, k, v, bias, pattern.key, 0.5, True))
    with torch.no_grad():
        out, lse = triton.attention_operator(q, k, v, bias, pattern.key, 0.5, True)
    tensors = [t.detach() for t in (grad, q, k, v, bias, out, lse)]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(
        triton.attention_backward_operator, (*tensors, pattern.key, 0.5, True, True), test_utils=checks
    )


def test_compiles_without_graph_breaks():
    pattern = wythoff(2, 20, prefix_tokens=1)
    q, k, v, _ = inputs(pattern, torch.float32)

    def run(q, k, v):
        return sparse_attention(q, k, v, pattern, backend="triton")

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, oracle(q, k, v, pattern.mask()))
    expected = torch.autograd.grad(run(q, k, v).sum(), (q, k, v))
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": Twist()}, "it has no transform"),
        ({"dropout_p": 0.1}, "it has no dropout"),
        ({"return_weights": True}, "it does not return weights"),
    ],
)
def test_what_it_lacks_is_refused(options, message):
    q = torch.zeros(1, 4, 37, 8)
    with pytest.raises(ValueError, match=f"backend 'triton' cannot serve this call: {message}"):
        sparse_attention(q, q, q, PATTERNS["wythoff"], **options, backend="triton")


def test_a_large_head_is_refused():
    q = torch.zeros(1, 4, 37, 300)
    with pytest.raises(ValueError, match="head_dim must be at most 256, got 300"):
        sparse_attention(q, q, q, PATTERNS["wythoff"], backend="triton")


def test_without_a_gpu_it_is_refused_and_auto_leaves_it_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.zeros(1, 4, 37, 8)
    with pytest.raises(ValueError, match="backend 'triton' cannot serve this call: the tensors are on cpu"):
        sparse_attention(q, q, q, PATTERNS["wythoff"], backend="triton")
    assert explain_backend(q, PATTERNS["wythoff"]).backend == "cpu"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fibottention.ops import triton_kernels as kernels

HALVES = ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
SUMS = ("lse", "delta", "bias", "value_sums", "grad_sums", "grad_scores")
TYPES = {name: "*bf16" for name in HALVES} | {name: "*fp32" for name in SUMS}
TYPES |= {name: "*i32" for name in ("offsets", "row_keys", "column_queries")}
TYPES |= {name: "*i64" for name in ("offset_starts", "row_base", "row_starts", "column_starts", "column_pairs")}
for kernel in (kernels.attention_forward, kernels.attention_backward_rows, kernels.attention_backward_columns):
    for offsets in (True, False):
        for ones in ((), ("prefix", "heads", "stored_heads", "bias_images")):
            values = dict(scale=0.125, head_dim=64, value_dim=64, BLOCK=32, BLOCK_D=64, BLOCK_V=64, OFFSETS=offsets)
            values |= dict(ZERO_FILL=bool(ones), BIAS=bool(ones), ACC=triton.language.float32)
            values |= {name: 1 for name in ones}
            names = kernel.arg_names
            signature = {n: "constexpr" if n in values else TYPES.get(n, "i32") for n in names}
            constants = {(names.index(n),): value for n, value in values.items() if n in names}
            compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
            assert compiled.asm["cubin"]
            print(kernel.__name__, offsets, ones)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path):
    """To machine code of an H100 or H200; needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
