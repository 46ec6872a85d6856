"""Checks every Triton kernel on a GPU against the float64 oracle, then times it against its rivals.

    python benchmarks/gpu_check.py

Takes under 8 minutes on one H200. Writes benchmarks/results/gpu_check.md (and .json) as it goes; a failure in one row
does not stop the others. With `--tiny` it runs a few rows on the CPU in Triton's interpreter, to test the script.
"""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
parser.add_argument("--tiny", action="store_true", help="a few rows on the CPU, in Triton's interpreter")
ARGUMENTS = parser.parse_args()
if ARGUMENTS.tiny:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch  # noqa: E402

from fibottention import explain_backend, patterns, sparse_attention  # noqa: E402
from fibottention.analysis.benchmark import Case, Measurement, machine, measure_attention  # noqa: E402
from fibottention.patterns import Pattern, wythoff  # noqa: E402

DEVICE = "cpu" if ARGUMENTS.tiny else "cuda"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
TOKENS = (197, 1025, 4097, 16385, 65537)
START = time.time()
LATEST = 420  # seconds after which no further setting is timed
LINES: list[str] = []


def say(line: str = "") -> None:
    """Print a line and write all lines so far."""
    print(line, flush=True)
    LINES.append(line)
    ARGUMENTS.output.mkdir(parents=True, exist_ok=True)
    (ARGUMENTS.output / "gpu_check.md").write_text("\n".join(LINES) + "\n")


def relation_pattern() -> Pattern:
    """A window with a relative bias."""
    window = patterns.sliding_window(3, 150, 3, prefix_tokens=1)
    _, query, key = window.pairs()
    inside = (query > 0) & (key > 0)
    return window.with_relation((key - query + 3)[inside], 7)


def checked_patterns() -> dict[str, Pattern]:
    """Patterns of both forms, per head and shared, with and without prefix tokens and empty rows."""
    tokens = 20 if ARGUMENTS.tiny else 300
    return {
        "offsets": wythoff(3, tokens),
        "offsets, 1 prefix token": wythoff(3, tokens, prefix_tokens=1),
        "offsets, 5 prefix tokens": wythoff(3, tokens, variant="modified", prefix_tokens=5),
        "rows": patterns.random(3, tokens, 0.05, prefix_tokens=1),
        "rows, all heads the same": patterns.fixed(3, tokens, prefix_tokens=2),
        "empty rows": Pattern.from_offsets([[1, 7], [-3], [0]], tokens, allow_empty=True),
        "one token": wythoff(3, 1, prefix_tokens=1),
    }


def errors(pattern: Pattern, dtype: torch.dtype, fill: str, with_bias: bool, dim: int) -> list[float]:
    """Largest errors of the output and each gradient, relative to the largest exact value (at least 1)."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    length, heads = pattern.sequence_length, pattern.num_heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float64).to(dtype)

    qkv = draw(2, length, 3, heads, dim).permute(2, 0, 3, 1, 4)
    leaves = [t.detach().requires_grad_() for t in qkv.unbind(0)]
    if with_bias:
        shape = (heads, pattern.num_buckets) if pattern.relation is not None else (1, heads, length, length)
        leaves.append(draw(*shape).requires_grad_())
    grad = draw(2, heads, length, dim)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    results = []
    for tensors, backend in ((leaves, "triton"), (exact, "reference")):
        out = sparse_attention(*tensors[:3], pattern, bias=(tensors[3:] or [None])[0], fill=fill, backend=backend)
        results.append((out, *torch.autograd.grad((out * grad.to(out.dtype)).sum(), tensors)))
    return [
        float((own.double() - true).detach().abs().max() / max(1.0, float(true.detach().abs().max())))
        for own, true in zip(*results, strict=True)
    ]


def check() -> int:
    """Check all kernels; returns the number of failures."""
    say("## Checks against the dense float64 oracle")
    say()
    say("| pattern | dtype | fill | bias | head_dim | largest relative error (out and gradients) | |")
    say("|---|---|---|---|---|---|---|")
    failures = 0
    every_dtype = () if ARGUMENTS.tiny else ("offsets, 1 prefix token", "rows")
    cases = [
        (name, pattern, dtype, fill, bias, dim)
        for name, pattern in checked_patterns().items()
        for dtype in (TOLERANCE if name in every_dtype else [torch.float32])
        for fill, bias, dim in (("-inf", False, 64), ("zero", True, 20))
    ]
    if not ARGUMENTS.tiny:
        relation = relation_pattern()
        cases += [("window with a relation", relation, d, "-inf", True, 32) for d in (torch.float32, torch.bfloat16)]
        around = patterns.neighborhood(3, (20, 24), 7, dilation=2, relation=True, prefix_tokens=1)
        cases += [("dilated neighborhood with a relation", around, d, "-inf", True, 32) for d in TOLERANCE]
        cases += [("offsets", wythoff(3, 300), torch.float32, "-inf", False, dim) for dim in (1, 7, 128, 200, 256)]
    for name, pattern, dtype, fill, bias, dim in cases:
        try:
            worst = float(torch.tensor(errors(pattern, dtype, fill, bias, dim)).max())  # NaN stays NaN
            passed = worst <= 4 * TOLERANCE[dtype]
            verdict = "ok" if passed else f"FAILED (allowed {4 * TOLERANCE[dtype]:.0e})"
            found = f"{worst:.1e}"
        except Exception as error:
            traceback.print_exc()
            passed, verdict, found = False, f"FAILED: {str(error).splitlines()[0][:100]}", "-"
        failures += not passed
        say(f"| {name} | {str(dtype)[6:]} | {fill} | {'yes' if bias else 'no'} | {dim} | {found} | {verdict} |")
    pattern = wythoff(3, 20 if ARGUMENTS.tiny else 1000, prefix_tokens=1)
    q = torch.randn(2, 3, pattern.sequence_length, 32, device=DEVICE, requires_grad=True)
    twice = []
    for _ in range(2):
        out = sparse_attention(q, q, q, pattern, backend="triton")
        twice.append((out, *torch.autograd.grad(out.square().sum(), q)))
    same = all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
    say()
    say(f"Repeated calls bit for bit equal: {'yes' if same else 'NO'}")
    return failures + (not same)


def benchmark() -> None:
    """Time the kernels against their rivals; one table."""
    say()
    say("## Times, bfloat16, Wythoff pattern with one CLS token, 12 heads of 64")
    say()
    say("Medians, milliseconds; dense SDPA is PyTorch's choice (flash attention). `auto` is what that backend takes.")
    say()
    say("| tokens | batch | pass | rival | ms | over dense SDPA | over FlexAttention | over stream | peak MiB |")
    say("|---|---|---|---|---|---|---|---|---|")
    records = []
    for tokens in (33,) if ARGUMENTS.tiny else TOKENS:
        batch = max(1, 16 * 1025 // tokens) if not ARGUMENTS.tiny else 1
        for backward in (False, True):
            case = Case(tokens, batch, torch.bfloat16, 1, backward, DEVICE)
            if time.time() - START > LATEST:
                say(f"| {tokens:,} | {batch} | {_pass(case)} | left out: no time | | | | | |")
                continue
            try:
                results = measure_attention(case, seconds=0.05 if ARGUMENTS.tiny else 0.8)
            except Exception as error:
                traceback.print_exc()
                say(f"| {tokens:,} | {batch} | {_pass(case)} | FAILED: {str(error).splitlines()[0][:100]} | | | | | |")
                continue
            for m in results:
                say(_row(case, m, results))
                records.append([tokens, batch, backward, m.rival, m.milliseconds, m.peak_mib, m.note])
        q = torch.empty(1, 12, tokens, 64, device=DEVICE)
        say(f"| {tokens:,} | | | auto: {explain_backend(q, case.pattern).backend} | | | | | |")
        (ARGUMENTS.output / "gpu_check.json").write_text(json.dumps({"machine": machine(DEVICE), "rows": records}))


def _pass(case: Case) -> str:
    return "both" if case.backward else "forward"


def _row(case: Case, m: Measurement, results: list[Measurement]) -> str:
    times = {other.rival: other.milliseconds for other in results}
    place = f"| {case.tokens:,} | {case.batch} | {_pass(case)} | {m.rival} | "
    if m.milliseconds is None:
        return f"{place}{m.note} | | | | |"
    ratios = [times.get(rival) for rival in ("dense SDPA", "FlexAttention")]
    over = [f"{t / m.milliseconds:.2f}x" if t else "" for t in ratios]
    stream = times["stream"]
    assert stream is not None
    peak = "" if m.peak_mib is None else f"{m.peak_mib:,.0f}"
    return f"{place}{m.milliseconds:.3f} | {over[0]} | {over[1]} | {m.milliseconds / stream:.1f} | {peak} |"


def main() -> int:
    """Check, then time."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("PyTorch sees no GPU on this machine; --tiny tests the script on the CPU", file=sys.stderr)
        return 2
    say("# The Triton kernels on a GPU")
    say()
    say(f"`python benchmarks/gpu_check.py{' --tiny' if ARGUMENTS.tiny else ''}`; {machine(DEVICE)}.")
    say()
    failures = check()
    benchmark()
    say()
    say(f"{failures} failed checks; {time.time() - START:.0f} seconds in all.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
