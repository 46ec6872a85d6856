"""Up to which density sparse attention pays: the CPU kernel and `gather` against fused dense attention.

    python benchmarks/crossover.py

Forward and forward plus backward, medians of interleaved runs in one process. Writes benchmarks/results/crossover.md.
"""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from fibottention import Pattern, patterns, sparse_attention

RUNS = 5
GATHER_UP_TO = 0.06  # beyond this density it takes seconds and has lost
SHAPES = ((16, 12, 196, 64), (128, 4, 196, 16), (1, 12, 1024, 64), (1, 12, 4096, 64))  # B, H, patch tokens, D
RIVALS = ("dense", "sdpa", "gather", "cpu")
DENSITIES = (0.02, 0.04, 0.1, 0.3, 0.6)
LONG, LONG_DENSITIES = 4096, (0.01,)  # dense attention takes seconds here
RESULTS = Path(__file__).parent / "results" / "crossover.md"


def milliseconds(function: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def rivals(pattern: Pattern, batch: int, dim: int, backward: bool) -> dict[str, Callable[[], object]]:
    """The same attention by several means, on fresh inputs."""
    shape = (batch, pattern.num_heads, pattern.sequence_length, dim)
    q, k, v = (torch.randn(shape, requires_grad=backward) for _ in range(3))

    def timed(attend: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return (lambda: attend().sum().backward()) if backward else attend

    functions = {
        "dense": timed(lambda: F.scaled_dot_product_attention(q, k, v)),
        "sdpa": timed(lambda: sparse_attention(q, k, v, pattern, backend="sdpa")),
        "cpu": timed(lambda: sparse_attention(q, k, v, pattern, backend="cpu")),
    }
    if pattern.density() < GATHER_UP_TO:
        functions["gather"] = timed(lambda: sparse_attention(q, k, v, pattern, backend="gather"))
    return functions


def measure(pattern: Pattern, batch: int, dim: int, backward: bool) -> dict[str, float]:
    """Median times in milliseconds, by rival."""
    functions = rivals(pattern, batch, dim, backward)
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.set_grad_enabled(backward):
        for run in range(RUNS + 1):
            for name, function in functions.items():
                elapsed = milliseconds(function)
                if run:  # the first run warms up
                    times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure everything and write the table."""
    lines = [
        "# The CPU kernel and `gather` against fused dense attention, by density",
        "",
        f"`python benchmarks/crossover.py`, {platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, float32, medians of {RUNS} interleaved runs, milliseconds.",
        "dense: `scaled_dot_product_attention` without a mask; sdpa: the same under the pattern's mask.",
        "",
        "| B, H, N, D | pattern | density | pass | dense | sdpa | gather | cpu | gather over sdpa | cpu over sdpa "
        "| cpu over dense |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for batch, heads, tokens, dim in SHAPES:
        chosen = {"wythoff": patterns.wythoff(heads, tokens, prefix_tokens=1)}
        for density in LONG_DENSITIES if tokens >= LONG else DENSITIES:
            window = max(1, round(density * tokens / 2))
            chosen[f"window {window}"] = patterns.sliding_window(heads, tokens, window, prefix_tokens=1)
        for name, pattern in chosen.items():
            for backward in (False, True):
                ms = measure(pattern, batch, dim, backward)
                times = " | ".join(f"{ms[rival]:.1f}" if rival in ms else "" for rival in RIVALS)
                gather = f"{ms['sdpa'] / ms['gather']:.2f}x" if "gather" in ms else ""
                row = (
                    f"| {batch}, {heads}, {tokens + 1}, {dim} | {name} | {pattern.density():.2%} | "
                    f"{'both' if backward else 'forward'} | {times} | "
                    f"{gather} | {ms['sdpa'] / ms['cpu']:.2f}x | {ms['dense'] / ms['cpu']:.2f}x |"
                )
                print(row, flush=True)
                lines.append(row)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
