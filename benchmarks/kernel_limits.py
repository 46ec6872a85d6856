"""What limits the CPU kernel: time per kept pair, on one thread, with parts of the work taken away.

    python benchmarks/kernel_limits.py

Writes benchmarks/results/kernel_limits.md. Each setting is the smallest of many interleaved runs, since this asks what
the processor can do and not what a busy machine does.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from fibottention import sparse_attention
from fibottention.analysis.benchmark import machine
from fibottention.patterns import Pattern, sliding_window, wythoff

HEADS, TOKENS, RUNS = 12, 1025, 60
RESULTS = Path(__file__).parent / "results" / "kernel_limits.md"


def call(pattern: Pattern, dim: int, one_row: bool = False) -> Callable[[], object]:
    """The forward pass; with `one_row`, every query, key and value is the same row, which stays in the L1 cache."""
    if one_row:
        q, k, v = (torch.randn(1, 1, 1, dim).expand(1, HEADS, TOKENS, dim) for _ in range(3))
    else:
        q, k, v = (torch.randn(1, HEADS, TOKENS, dim) for _ in range(3))
    return lambda: sparse_attention(q, k, v, pattern, backend="cpu")


def main() -> None:
    """Measure and write the table."""
    torch.set_num_threads(1)
    fibonacci = wythoff(HEADS, TOKENS - 1, prefix_tokens=1)
    window = sliding_window(HEADS, TOKENS - 1, 6, prefix_tokens=1)
    stream = [torch.rand(1, HEADS, TOKENS, 64) for _ in range(4)]
    square = torch.rand(1024, 1024)
    settings: dict[str, tuple[Callable[[], object], Pattern | None]] = {
        f"Wythoff, head_dim {dim}": (call(fibonacci, dim), fibonacci) for dim in (8, 16, 32, 64, 128)
    }
    settings |= {
        "Wythoff, head_dim 64, one row for all": (call(fibonacci, 64, one_row=True), fibonacci),
        "window of 13, head_dim 64": (call(window, 64), window),
        "window of 13, head_dim 64, one row for all": (call(window, 64, one_row=True), window),
        "torch.addcmul(q, k, v, out=o), head_dim 64": (
            lambda: torch.addcmul(stream[0], stream[1], stream[2], out=stream[3]),
            None,
        ),
        "matrix product of 1024 x 1024": (lambda: square @ square, None),
    }
    best = dict.fromkeys(settings, float("inf"))
    with torch.no_grad():
        for _ in range(RUNS):
            for name, (function, _pattern) in settings.items():
                function()
                start = time.perf_counter()
                function()
                best[name] = min(best[name], time.perf_counter() - start)
    peak = 2 * 1024**3 / best["matrix product of 1024 x 1024"]
    lines = [
        "# What limits the CPU kernel",
        "",
        f"`python benchmarks/kernel_limits.py`; {machine()}; 12 heads, 1,025 tokens, one sequence, forward, float32.",
        f"Smallest of {RUNS} interleaved runs. The matrix product reaches {peak / 1e9:.0f} GF/s on this one thread.",
        "",
        "| | ms | ns per kept pair | GF/s | of the matrix product's rate |",
        "|---|---|---|---|---|",
    ]
    for name, (_function, pattern) in settings.items():
        row = f"| {name} | {1000 * best[name]:.3f} |"
        if pattern is None:
            lines.append(f"{row} | | |")
            continue
        dim = int(name.split("head_dim ")[1].split(",")[0])
        rate = 4 * pattern.nnz * dim / best[name]
        lines.append(f"{row} {1e9 * best[name] / pattern.nnz:.2f} | {rate / 1e9:.1f} | {rate / peak:.0%} |")
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
