"""Neighborhood attention against its rivals, and a training step of DiNAT; writes benchmarks/results/neighborhood.md.

python benchmarks/neighborhood.py

natten is measured where it is installed (on the CPU it has the forward pass only).
"""

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import fibottention
from fibottention.analysis.benchmark import machine
from fibottention.analysis.cost import whole_model_macs
from fibottention.patterns import neighborhood

SETTINGS = ((56, 2, 1), (56, 2, 8), (14, 8, 1), (14, 8, 2))  # side, heads, dilation
KERNEL, DIM = 7, 32
MODELS = ("dinat_mini", "nat_mini", "swin_tiny_patch4_window7_224", "convnext_tiny")
BATCH = 4
RESULTS = Path(__file__).parent / "results" / "neighborhood.md"

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def calls(side: int, heads: int, dilation: int) -> dict[str, Call]:
    """The rivals, from queries, keys and values ``(1, side, side, heads, DIM)`` to outputs."""
    pattern = neighborhood(heads, (side, side), KERNEL, dilation=dilation)
    rpb = torch.randn(heads, 2 * KERNEL - 1, 2 * KERNEL - 1)
    keys = torch.from_numpy(pattern.rows.indices.copy()).view(side * side, KERNEL**2)
    mask = torch.zeros(1, 1, side**2, side**2).masked_fill(~pattern.mask()[0], float("-inf"))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fibottention.na2d(q, k, v, KERNEL, dilation=dilation)

    def with_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fibottention.na2d(q, k, v, KERNEL, dilation=dilation, rpb=rpb)

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(1, 2) for t in (q, k, v))
        scores = torch.einsum("bnhd,bnkhd->bnhk", q, k[:, keys]) * DIM**-0.5
        return torch.einsum("bnhk,bnkhd->bnhd", scores.softmax(-1), v[:, keys]).view(1, side, side, heads, DIM)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(1, 2).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).view(1, side, side, heads, DIM)

    rivals = {
        "fibottention": ours,
        "fibottention, rpb": with_bias,
        "gather and einsum": gathered,
        "masked SDPA": masked,
    }
    if importlib.util.find_spec("natten") is not None:
        from natten import na2d  # pyright: ignore[reportMissingImports]

        rivals["natten"] = lambda q, k, v: na2d(q, k, v, kernel_size=KERNEL, dilation=dilation)
    return rivals


def in_turn(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each task, run in turn so that all meet the same machine, short ones several times."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    repeats = dict.fromkeys(tasks, 1)
    for round_ in range(rounds + 1):
        for name, task in tasks.items():
            task()  # a short task would else be charged for the caches that the one before it emptied
            start = time.perf_counter()
            for _ in range(repeats[name]):
                task()
            elapsed = 1e3 * (time.perf_counter() - start) / repeats[name]
            repeats[name] = max(1, min(20, int(20 / elapsed)))
            if round_:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def forward_task(call: Call, leaves: list[Tensor]) -> Callable[[], object]:
    """The forward pass of a rival."""
    q, k, v = (leaf.detach() for leaf in leaves)
    return lambda: call(q, k, v)


def both_task(call: Call, leaves: list[Tensor]) -> Callable[[], object]:
    """The forward and the backward pass of a rival."""
    return lambda: torch.autograd.grad(call(*leaves).sum(), leaves)


def operator_table() -> list[str]:
    """Rows of the comparison of operators."""
    names = list(calls(14, 8, 1))
    lines = [
        "| grid | heads | dilation | pass | " + " | ".join(names) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    for side, heads, dilation in SETTINGS:
        rivals = calls(side, heads, dilation)
        leaves = [torch.randn(1, side, side, heads, DIM, requires_grad=True) for _ in range(3)]
        outputs = {name: forward_task(call, leaves)() for name, call in rivals.items() if "rpb" not in name}
        for output in outputs.values():
            torch.testing.assert_close(output, outputs["masked SDPA"], rtol=1e-4, atol=1e-4)
        passes = {
            "forward": {name: forward_task(call, leaves) for name, call in rivals.items()},
            "both": {name: both_task(call, leaves) for name, call in rivals.items() if name != "natten"},
        }
        for label, tasks in passes.items():
            measured = in_turn(tasks, 9)
            base = measured["fibottention"]
            cells = [
                f"{measured[n]:,.2f} ({measured[n] / base:,.1f}x)" if n in measured else "no gradient" for n in rivals
            ]
            lines.append(f"| {side} x {side} | {heads} | {dilation} | {label} | " + " | ".join(cells) + " |")
    return lines


def training_table() -> list[str]:
    """Rows of the comparison of whole training steps."""
    x, y = torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))
    steps, macs = {}, {}
    for name in MODELS:
        model = timm.create_model(name)
        macs[name] = whole_model_macs(model, 224)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        steps[name] = step
    measured = in_turn(steps, 5)
    lines = ["| model | GMACs per image | ms per image | ms per GMAC |", "|---|---|---|---|"]
    for name, milliseconds in measured.items():
        gmacs = macs[name] / 1e9
        lines.append(f"| {name} | {gmacs:.2f} | {milliseconds / BATCH:,.0f} | {milliseconds / BATCH / gmacs:,.0f} |")
    return lines


def main() -> None:
    """Measure and write the tables."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    natten = importlib.util.find_spec("natten") is not None
    text = [
        "# Neighborhood attention",
        "",
        f"`python benchmarks/neighborhood.py`; {machine()}; float32.",
        "",
        f"## The operator: batch 1, heads of {DIM}, neighborhoods of {KERNEL} x {KERNEL}",
        "",
        "Median milliseconds, and how many times those of fibottention without a bias; both: with the gradients of "
        "queries, keys and values. "
        + ("natten is 0.21.7, built from source without CUDA." if natten else "natten is not installed."),
        "",
        *operator_table(),
        "",
        f"## A training step: forward, backward and AdamW, batch {BATCH}, 224 pixels",
        "",
        *training_table(),
    ]
    RESULTS.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
