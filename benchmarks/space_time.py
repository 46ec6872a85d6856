"""Attention over clips, dense against Fibottention, in both passes; writes benchmarks/results/space_time.md.

python benchmarks/space_time.py [--device cuda]
"""

import argparse
import platform
from pathlib import Path

import torch

from fibottention.analysis.space_time import SpaceTimeCost, space_time_costs
from fibottention.specs import Dense, Fibottention


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description="Attention over clips, dense against Fibottention")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    costs = space_time_costs({"dense": Dense(), "fibottention": Fibottention()}, (8, 16), measure=True, device=device)
    dense = {(cost.frames, cost.kind): cost for cost in costs if cost.spec == "dense"}
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    lines = [
        "# Attention over clips",
        "",
        f"`python benchmarks/space_time.py --device {device}`; {where}, torch {torch.__version__}, Python "
        f"{platform.python_version()}.",
        "",
        "One layer, 12 heads of 64, frames of 196 patches, CLS, one clip, float32, least of three runs. Divided: each",
        "patch over the frames (dense), then each frame over its patches; joint: all patches of all frames.",
        "",
        "| frames | attention | spec | tokens of a sequence | pairs | forward, ms | both, ms | over dense, both |",
        "|---|---|---|---|---|---|---|---|",
        *[_row(cost, dense[cost.frames, cost.kind]) for cost in costs],
    ]
    path = Path(__file__).parent / "results" / "space_time.md"
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


def _row(cost: SpaceTimeCost, dense: SpaceTimeCost) -> str:
    tokens = 197 if cost.kind == "divided" else 196 * cost.frames + 1
    assert cost.both_ms is not None
    assert dense.both_ms is not None
    return (
        f"| {cost.frames} | {cost.kind} | {cost.spec} | {tokens:,} | {cost.pairs / 1e6:.2f} M | "
        f"{cost.forward_ms:.1f} | {cost.both_ms:.1f} | {dense.both_ms / cost.both_ms:.1f}x |"
    )


if __name__ == "__main__":
    main()
