"""What the attention of one layer costs at growing numbers of tokens: pairs, multiply-accumulates, time and memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from fibottention.analysis.colours import COLOURS
from fibottention.analysis.timing import peak_mib, seconds_of
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.specs import AttentionSpec

__all__ = ["CostAt", "attention_scaling", "draw_scaling", "measure_attention"]

# Explicit rows of more pairs than this are not built, and no attention of more multiply-accumulates is timed.
_MOST_PAIRS = 3e8
_MOST_MACS = 1e11


@dataclass(frozen=True)
class CostAt:
    """The cost of one layer for one sequence.

    Attributes:
        tokens: Patch tokens.
        pairs: Pairs that get a weight, over all heads.
        macs: Multiply-accumulates of QK^T and AV.
        dense_macs: The same over all pairs.
        forward_ms: Milliseconds of a forward pass; None if not measured.
        both_ms: Milliseconds of a forward and a backward pass.
        peak_mib: Peak memory of both passes above inputs and outputs, in MiB.
    """

    tokens: int
    pairs: int
    macs: int
    dense_macs: int
    forward_ms: float | None = None
    both_ms: float | None = None
    peak_mib: float | None = None


def attention_scaling(
    spec: AttentionSpec,
    tokens: Sequence[int],
    *,
    num_heads: int = 12,
    head_dim: int = 64,
    prefix_tokens: int = 1,
    measure: bool = False,
    device: str = "cpu",
    skipped: Callable[[str], object] = lambda _: None,
) -> list[CostAt]:
    """The cost of a layer with a spec, by number of tokens.

    Args:
        spec: The spec.
        tokens: Numbers of patch tokens, growing.
        num_heads: Number of heads.
        head_dim: Size of one head.
        prefix_tokens: Number of prefix tokens.
        measure: Also measure time and memory, in float32, one sequence: the least of three runs.
        device: ``"cpu"`` or ``"cuda"``.
        skipped: Called with a sentence about what is left out and why.

    Raises:
        ValueError: If the spec cannot be had for such tokens.
    """
    costs: list[CostAt] = []
    for count in tokens:
        if costs and spec.has_pattern and costs[-1].pairs * (count / costs[-1].tokens) ** 2 > _MOST_PAIRS:
            small = spec.pattern(num_heads, costs[-1].tokens, prefix_tokens=prefix_tokens)
            if small.offsets is None:
                skipped(f"{spec.name} at {count:,} tokens is left out: its list of pairs could be too large")
                continue
        cost = spec.cost(num_heads, count, head_dim, prefix_tokens=prefix_tokens)
        times: tuple[float | None, ...] = (None, None, None)
        if measure and cost.macs <= _MOST_MACS:
            times = measure_attention(spec, count, num_heads, head_dim, prefix_tokens, device)
        elif measure:
            skipped(f"{spec.name} at {count:,} tokens is not timed: {cost.macs:.1e} multiply-accumulates")
        costs.append(CostAt(count, cost.pairs, cost.macs, cost.dense_macs, *times))
    return costs


def measure_attention(
    spec: AttentionSpec,
    count: int,
    num_heads: int,
    head_dim: int,
    prefix_tokens: int,
    device: str,
    sequences: int = 1,
) -> tuple[float, float, float | None]:
    """Milliseconds of a layer's forward pass and of both passes, and the peak memory of both in MiB, in float32.

    Args:
        spec: The spec.
        count: Patch tokens of a sequence.
        num_heads: Number of heads.
        head_dim: Size of one head.
        prefix_tokens: Number of prefix tokens.
        device: ``"cpu"`` or ``"cuda"``.
        sequences: Sequences at a time.

    Returns:
        The least of three runs each, after one that is not counted.
    """
    length = prefix_tokens + count
    layer = PatternAttention(
        spec, num_heads, prefix_tokens=prefix_tokens, head_dim=head_dim, sequence_length=length, device=device
    )
    generator = torch.Generator(device).manual_seed(0)
    shape = (sequences, num_heads, length, head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator, device=device) for _ in range(4))

    def forward() -> object:
        with torch.no_grad():
            return layer(q, k, v)

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def both() -> object:
        return torch.autograd.grad(layer(*leaves), leaves, grad)

    forward()  # builds patterns and kernels
    both()
    forward_seconds = min(seconds_of(forward, device) for _ in range(3))
    both_seconds = min(seconds_of(both, device) for _ in range(3))
    return 1000 * forward_seconds, 1000 * both_seconds, peak_mib(both, device)


def draw_scaling(costs: Mapping[str, Sequence[CostAt]]) -> Figure:
    """Multiply-accumulates, and time and memory where they were measured, against the number of tokens."""
    panels: list[tuple[str, Callable[[CostAt], float | None]]] = [
        ("multiply-accumulates of a layer", lambda cost: cost.macs),
        ("forward and backward (ms)", lambda cost: cost.both_ms),
        ("peak memory (MiB)", lambda cost: cost.peak_mib),
    ]
    panels = [panel for panel in panels if any(panel[1](cost) is not None for all_ in costs.values() for cost in all_)]
    figure = Figure(figsize=(4.2 * len(panels), 3.6 + 0.2 * -(-len(costs) // 4)), layout="constrained")
    for axis, (label, value) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for index, (name, of_spec) in enumerate(costs.items()):
            points = [(cost.tokens, value(cost)) for cost in of_spec if value(cost) is not None]
            line = "o-" if index < len(COLOURS) else "s--"
            axis.plot(*zip(*points, strict=True), line, markersize=4, color=COLOURS[index % len(COLOURS)], label=name)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("patch tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure
