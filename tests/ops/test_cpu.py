"""What is particular to the compiled CPU kernel: instruction sets, threads, layouts, registration, processes."""

import gc
import multiprocessing
import re
import resource
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fibottention import Twist, explain_backend, patterns, sparse_attention
from fibottention.ops import attention as attention_module
from fibottention.ops import cpu, kernel
from fibottention.patterns import Pattern, wythoff
from tests.ops.test_sparse_attention import PATTERNS, TOLERANCE, compare, inputs, oracle, sliding_with_relation


def run(pattern, seed=0, fill="-inf", transform=None, dropout_p=0.0, dtype=torch.float32, dim=64, **kwargs):
    q, k, v, grad = inputs(pattern, dtype, dim=dim, **kwargs)
    torch.manual_seed(seed)
    options = {"fill": fill, "transform": transform, "dropout_p": dropout_p}
    out = sparse_attention(q, k, v, pattern, **options, backend="cpu")
    return out, *torch.autograd.grad((out * grad.to(dtype)).sum(), (q, k, v))


@pytest.mark.parametrize("isa", range(kernel.kernel().isa + 1))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_instruction_set_of_this_machine(isa, dtype, monkeypatch):
    monkeypatch.setattr(kernel.kernel(), "isa", isa)
    for name in ("wythoff_cls", "shared_rows", "empty_rows"):
        for fill in ("-inf", "zero"):
            compare(PATTERNS[name], "cpu", fill, dtype, with_bias=True, dim=16)


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(kernel.kernel(), "isa", 3)
    with pytest.raises(RuntimeError, match="instruction set is not supported"):
        run(PATTERNS["wythoff"])


@pytest.mark.parametrize("dim", [1, 2, 7, 8, 24, 31, 40, 48, 56, 64, 65, 72, 128, 136, 200])
def test_head_dims_over_several_pieces(dim):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        compare(PATTERNS["wythoff_cls"], "cpu", "-inf", dtype, dim=dim, batch=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fill": "zero"},
        {"transform": Twist(0.3)},
        {"dropout_p": 0.3},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64, "dim": 33},
    ],
)
@pytest.mark.parametrize("pattern", [wythoff(6, 600, prefix_tokens=2), patterns.random(6, 600, 0.03)], ids=["o", "r"])
def test_results_do_not_depend_on_the_number_of_threads(pattern, options):
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(run(pattern, **options))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_any_strides():
    pattern = PATTERNS["modified_2_prefix"]
    batch, heads, length, dim = 3, 4, pattern.sequence_length, 8
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    views = {
        "last axis not contiguous": draw(batch, heads, dim, length).mT,
        "every other channel": draw(batch, heads, length, 2 * dim)[..., ::2],
        "part of the channels": draw(batch, heads, length, 3 * dim)[..., dim : 2 * dim],
        "heads of one": draw(batch, 1, length, dim).expand(-1, heads, -1, -1),
        "images of one": draw(1, heads, length, dim).expand(batch, -1, -1, -1),
        "tokens in reverse": draw(batch, heads, length, dim).flip(2),
        "tokens first": draw(length, batch, heads, dim).permute(1, 2, 0, 3),
    }
    for name, view in views.items():
        q, k, v = (t.detach().requires_grad_() for t in (view, view.roll(1, 0), view.roll(2, 0)))
        grad = views["tokens first"]
        out = sparse_attention(q, k, v, pattern, backend="cpu")
        expected = oracle(q, k, v, pattern.mask())
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10, msg=name)
        own = torch.autograd.grad((out * grad).sum(), (q, k, v))
        for a, b in zip(own, torch.autograd.grad((expected * grad).sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=name)
        # The gradient of a sum has no strides at all.
        assert torch.autograd.grad(sparse_attention(q, k, v, pattern, backend="cpu").sum(), v)[0].isfinite().all()


def test_only_the_gradients_that_are_needed():
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, grad = inputs(pattern)
    expected = torch.autograd.grad((oracle(q, k, v, pattern.mask()) * grad).sum(), (q, k, v))
    for wanted in ([0], [1], [2], [0, 1], [1, 2]):
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate((q, k, v))]
        (sparse_attention(*leaves, pattern, backend="cpu") * grad).sum().backward()
        for i, leaf in enumerate(leaves):
            if i in wanted:
                torch.testing.assert_close(leaf.grad, expected[i], rtol=1e-10, atol=1e-10)
            else:
                assert leaf.grad is None


def test_empty_batch():
    q = torch.zeros(0, 4, 37, 8, requires_grad=True)
    out = sparse_attention(q, q, q, PATTERNS["wythoff"], backend="cpu")
    assert out.shape == (0, 4, 37, 8)
    out.sum().backward()
    assert q.grad is not None


def test_nan_in_a_query_stays_in_its_row():
    pattern = PATTERNS["wythoff"]
    q, k, v, _ = (t.detach() for t in inputs(pattern, torch.float32))
    q = q.clone()
    q[0, 1, 5, 2] = float("nan")
    out = sparse_attention(q, k, v, pattern, backend="cpu")
    assert out[0, 1, 5].isnan().all()
    out[0, 1, 5] = 0
    assert out.isfinite().all()


def test_no_gradient_was_asked_for():
    pattern = PATTERNS["wythoff"]
    q, k, v, _ = inputs(pattern)
    with torch.no_grad():
        assert not sparse_attention(q, k, v, pattern, backend="cpu").requires_grad
    assert sparse_attention(q, k.detach(), v.detach(), pattern, backend="cpu").requires_grad
    with torch.inference_mode():
        expected = oracle(q, k, v, pattern.mask())
        torch.testing.assert_close(sparse_attention(q, k, v, pattern, backend="cpu"), expected)


def test_a_second_derivative_is_refused():
    q, k, v, _ = inputs(PATTERNS["wythoff"])
    out = sparse_attention(q, k, v, PATTERNS["wythoff"], backend="cpu")
    with pytest.raises(RuntimeError, match="'cpu' of sparse_attention can be differentiated once only"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_a_transform_derived_from_twist_is_not_taken_for_it():
    class Other(Twist):
        def forward(self, weights):
            return weights * 0

    q, k, v, _ = inputs(PATTERNS["wythoff"])
    assert (sparse_attention(q, k, v, PATTERNS["wythoff"], transform=Other()) == 0).all()
    with pytest.raises(ValueError, match="of all transforms it knows only Twist"):
        sparse_attention(q, k, v, PATTERNS["wythoff"], transform=Other(), backend="cpu")


def test_the_gradient_of_the_twist_scale_does_not_depend_on_the_threads():
    before = torch.get_num_threads()
    grads = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            twist = Twist(0.3)
            q, k, v, _ = inputs(wythoff(6, 3000), torch.float32, dim=8)
            sparse_attention(q, k, v, wythoff(6, 3000), transform=twist, backend="cpu").square().sum().backward()
            grads.append(twist.scale.grad)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_compiled_by_inductor_with_a_last_axis_that_is_not_contiguous():
    pattern = wythoff(2, 12, prefix_tokens=1)
    q, k, v = (torch.randn(1, 2, 4, 13).mT.requires_grad_() for _ in range(3))

    def attend(q, k, v):
        return sparse_attention(q * 1, k, v, pattern, backend="cpu").square()

    expected = attend(q, k, v)
    out = torch.compile(attend, fullgraph=True)(q, k, v)
    torch.testing.assert_close(out, expected)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("transform", [None, Twist(0.4, 0.7)])
def test_dropout_is_the_one_of_the_returned_weights(transform):
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, grad = inputs(pattern)

    def attend(**kwargs):
        torch.manual_seed(3)
        return sparse_attention(
            q, k, v, pattern, transform=transform, dropout_p=0.4, return_weights=True, backend="cpu", **kwargs
        )

    out, weights = attend()
    _, whole = sparse_attention(q, k, v, pattern, transform=transform, return_weights=True, backend="gather")
    kept = weights.detach() != 0
    assert 0.5 < kept.double().mean() < 0.7
    expected_weights = whole * kept / 0.6
    torch.testing.assert_close(weights, expected_weights, rtol=1e-9, atol=1e-12)
    head, query, key = pattern.pairs()
    dense = torch.zeros(2, 4, 38, 38, dtype=torch.float64).index_put(
        (torch.arange(2)[:, None], head, query, key), expected_weights[:, 0]
    )
    expected = dense @ v
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)
    own = torch.autograd.grad((out * grad).sum() + weights.square().sum(), (q, k, v))
    other = torch.autograd.grad((expected * grad).sum() + expected_weights.square().sum(), (q, k, v))
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    for a, b in zip(attend(), (out, weights), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share(probability):
    pattern = patterns.sliding_window(2, 3000, 8)
    q = torch.zeros(1, 2, 3000, 4)
    _, weights = sparse_attention(q, q, q, pattern, dropout_p=probability, return_weights=True, backend="cpu")
    dropped = (weights == 0).double().mean().item()
    # 102,000 draws: six standard deviations.
    assert abs(dropped - probability) < 6 * (probability * (1 - probability) / weights.numel()) ** 0.5


@pytest.mark.parametrize("pattern", [wythoff(3, 11, prefix_tokens=1), patterns.fixed(3, 12)], ids=["offsets", "rows"])
def test_registration_is_sound(pattern):
    q, k, v, grad = inputs(pattern, batch=2, dim=3)
    groups = pattern.num_heads // pattern.stored_heads
    pairs = (2, groups, pattern.nnz // groups)
    bias = torch.randn(1, *pairs[1:], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(7)
    for options in ((0.5, False, "", 0.0, 0.0), (0.5, True, "", 0.0, 0.0), (0.5, False, "relative", 0.1, 0.3)):
        twisted = bool(options[2])
        arguments = (q, k, v, bias, scale if twisted else None, seed if options[4] else None, pattern.key, *options)
        torch.library.opcheck(cpu.attention_operator, (*arguments, True, True))
        with torch.no_grad():
            _, probabilities, _, rest = cpu.attention_operator(*arguments, True, False)
        backward = (grad, torch.rand(pairs, dtype=torch.float64), q, k, v, *arguments[4:6], probabilities, rest)
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        tensors = [t.detach() if isinstance(t, torch.Tensor) else t for t in backward]
        needed = (True, True, False)
        torch.library.opcheck(
            cpu.attention_backward_operator, (*tensors, *needed, pattern.key, *options, True, False), test_utils=checks
        )
    with_relation = sliding_with_relation(3, 9, prefix=1)
    values = torch.randn(2, 3, with_relation.nnz // 3)
    torch.library.opcheck(cpu._bucket_sums, (values, with_relation.key), test_utils=checks)


def test_flops_are_those_of_the_kept_pairs():
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, grad = inputs(pattern, batch=2, dim=8)
    with FlopCounterMode(display=False) as counter:
        out = sparse_attention(q, k, v, pattern, backend="cpu")
        assert counter.get_total_flops() == 2 * 2 * pattern.macs(8)
        (out * grad).sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 2 * pattern.macs(8)


def test_export():
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, _ = (t.detach() for t in inputs(pattern, torch.float32))

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return sparse_attention(q, k, v, pattern, backend="cpu")

    exported = torch.export.export(Attend(), (q, k, v))
    torch.testing.assert_close(exported.module()(q, k, v), Attend()(q, k, v))


def test_compiled_twist_and_dropout():
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, _ = inputs(pattern, torch.float32)
    twist = Twist(0.3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v, p):
        return sparse_attention(q, k, v, pattern, transform=twist, dropout_p=p, backend="cpu")

    expected = sparse_attention(q, k, v, pattern, transform=twist, backend="cpu")
    out = compiled(q, k, v, 0.0)
    torch.testing.assert_close(out, expected)
    leaves = (q, k, v, twist.scale)
    for a, b in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(compiled(q, k, v, 0.5), compiled(q, k, v, 0.5))


def test_vmap_folds_into_the_batch():
    pattern = PATTERNS["wythoff_cls"]
    q, k, v, _ = (t.detach() for t in inputs(pattern, batch=6))
    expected = sparse_attention(q, k, v, pattern, backend="cpu")

    def attend(q, k, v):
        return sparse_attention(q, k, v, pattern, backend="cpu")

    out = torch.func.vmap(attend)(*(t.unflatten(0, (3, 2)) for t in (q, k, v)))
    torch.testing.assert_close(out.flatten(0, 1), expected)
    leaf, same = (q.clone().requires_grad_() for _ in range(2))
    mapped = torch.func.vmap(attend, in_dims=(0, 1, None))
    mapped(leaf.unflatten(0, (3, 2)), k.unflatten(0, (3, 2)).transpose(0, 1), v[:2]).square().sum().backward()
    attend(same, k, v[:2].repeat(3, 1, 1, 1)).square().sum().backward()
    torch.testing.assert_close(leaf.grad, same.grad)
    with pytest.raises(NotImplementedError, match="vmap over sparse_attention maps q, k and v"):
        torch.func.vmap(lambda b: sparse_attention(q, k, v, pattern, bias=b, backend="cpu"))(
            torch.zeros(2, 1, 1, 38, 38, dtype=torch.float64)
        )


@st.composite
def calls(draw):
    """A pattern in either form, and tensors in some layout and dtype."""
    heads, tokens, prefix = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(0, 3))
    if draw(st.booleans()):
        offset = st.integers(-2 * tokens, 2 * tokens)  # also outside the sequence
        stored = draw(st.sampled_from([1, heads]))
        offsets = [draw(st.lists(offset, max_size=12)) for _ in range(stored)]
        pattern = Pattern.from_offsets(offsets, tokens, num_heads=heads, prefix_tokens=prefix, allow_empty=True)
    else:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        stored = draw(st.sampled_from([1, heads]))
        mask = torch.rand(stored, tokens, tokens, generator=generator) < draw(st.floats(0, 1))
        pattern = Pattern.from_mask(mask, num_heads=heads, prefix_tokens=prefix, allow_empty=True)
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    layout = draw(st.sampled_from(["timm", "contiguous"]))
    return {
        "pattern": pattern,
        "fill": draw(st.sampled_from(["-inf", "zero"])),
        "dtype": dtype,
        "with_bias": draw(st.booleans()),
        "dim": draw(st.integers(1, 70)),
        "value_dim": None if layout == "timm" else draw(st.integers(1, 70)),
        "batch": draw(st.integers(1, 3)),
        "layout": layout,
        "seed": draw(st.integers(0, 10**6)),
    }


@given(calls())
@settings(max_examples=150, deadline=None)
def test_fuzz(call):
    compare(call.pop("pattern"), "cpu", call.pop("fill"), call.pop("dtype"), **call)


def test_first_use_in_inference_mode_does_not_spoil_training():
    for backend in ("reference", "gather", "sdpa", "cpu"):
        pattern = wythoff(2, 50 + len(backend), prefix_tokens=3)
        q, k, v, _ = inputs(pattern)
        bias = torch.zeros(1, 1, *[pattern.sequence_length] * 2, dtype=torch.float64, requires_grad=True)
        with torch.inference_mode():
            sparse_attention(q, k, v, pattern, bias=bias, backend=backend)
        sparse_attention(q, k, v, pattern, bias=bias, backend=backend).sum().backward()
        assert bias.grad is not None


def test_soak_keeps_its_memory():
    pattern = wythoff(3, 48, prefix_tokens=1)
    q, k, v, grad = inputs(pattern, torch.float32, dim=16)
    grad = grad.float()

    def call():
        out = sparse_attention(q, k, v, pattern, backend="cpu")
        return torch.autograd.grad(out, (q, k, v), grad)

    first = call()
    for _ in range(1000):
        call()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        last = call()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 4096, f"the peak grew by {grown} KiB"
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))


def test_two_python_threads_at_once():
    pattern = wythoff(6, 300, prefix_tokens=1)
    expected = run(pattern, dim=16)
    wrong = []

    def work():
        for _ in range(30):
            q, k, v, grad = inputs(pattern, torch.float32, dim=16)
            out = sparse_attention(q, k, v, pattern, backend="cpu")
            results = out, *torch.autograd.grad((out * grad.float()).sum(), (q, k, v))
            wrong.extend(a for a, b in zip(results, expected, strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Attended(torch.utils.data.Dataset):
    def __init__(self, pattern):
        self.pattern = pattern

    def __len__(self):
        return 8

    def __getitem__(self, index):
        q, k, v, _ = (t.detach() for t in inputs(self.pattern, torch.float32, dim=16, batch=1, seed=index))
        return sparse_attention(q, k, v, self.pattern, backend="cpu")[0]


def test_forked_workers_of_a_data_loader():
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.fail("this system cannot fork; run the test elsewhere")
    pattern = wythoff(6, 300, prefix_tokens=1)
    data = Attended(pattern)
    expected = torch.stack([data[i] for i in range(8)])  # the thread pool is up before the fork
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    for _ in range(2):
        got = []
        for batch in loader:
            got.append(batch)
            data[0]  # the parent attends as well
        assert torch.equal(torch.cat(got), expected)


def test_distributed_data_parallel(tmp_path):
    from fibottention import Fibottention, SparseAttention

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = SparseAttention(32, 4, spec=Fibottention(), backend="cpu")
        parallel = torch.nn.parallel.DistributedDataParallel(layer)
        x = torch.randn(2, 50, 32)
        parallel(x).square().sum().backward()
        own = {name: p.grad.clone() for name, p in layer.named_parameters()}
        layer.zero_grad()
        layer(x).square().sum().backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(own[name], parameter.grad)
    finally:
        torch.distributed.destroy_process_group()


def test_without_the_kernel_auto_says_so_once(monkeypatch):
    reason = "the package was installed without a C++ compiler, so it has no CPU kernel"
    monkeypatch.setattr(kernel, "_load", lambda: reason)
    attention_module._warn_once.cache_clear()
    q = torch.randn(1, 4, 37, 8)
    pattern = wythoff(4, 37)
    with pytest.warns(UserWarning, match="has no CPU kernel; sparse_attention uses the slower backend 'gather'"):
        out = sparse_attention(q, q, q, pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_attention(q, q, q, pattern)
    torch.testing.assert_close(out, oracle(q, q, q, pattern.mask()))
    with pytest.raises(ValueError, match=re.escape(f"backend 'cpu' cannot serve this call: {reason}")):
        sparse_attention(q, q, q, pattern, backend="cpu")
    attention_module._warn_once.cache_clear()


def test_a_library_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "kernel.so"
    broken.write_text("not a library")
    monkeypatch.setenv("FIBOTTENTION_KERNEL", str(broken))
    kernel._load.cache_clear()
    try:
        assert kernel.missing().startswith("the CPU kernel cannot be loaded: ")
        with pytest.raises(RuntimeError, match="cannot be loaded"):
            kernel.kernel()
    finally:
        monkeypatch.delenv("FIBOTTENTION_KERNEL")
        kernel._load.cache_clear()


def test_a_library_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(kernel, "_INTERFACE", 0)
    kernel._load.cache_clear()
    try:
        assert "was built from another version of the sources" in kernel.missing()
    finally:
        kernel._load.cache_clear()


def test_meta_tensors_get_their_shape():
    q = torch.empty(1, 4, 37, 8, device="meta")
    assert explain_backend(q, wythoff(4, 37)).backend == "cpu"
    assert sparse_attention(q, q, q, wythoff(4, 37), backend="cpu").shape == q.shape
