"""What attention over clips costs: in space and time one after the other, or over both at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fibottention.analysis.scaling import measure_attention
from fibottention.specs import AttentionSpec, Dense

__all__ = ["SpaceTimeCost", "space_time_costs"]


@dataclass(frozen=True)
class SpaceTimeCost:
    """The attention of one layer for one clip.

    Attributes:
        frames: Frames.
        kind: ``"divided"``: each patch attends over the frames (dense), then each frame over its patches; ``"joint"``:
            all patches of all frames attend to each other.
        spec: Name of the spec in space, or in space and time.
        pairs: Pairs that get a weight, over all heads and sequences.
        macs: Multiply-accumulates of QK^T and AV.
        forward_ms: Milliseconds of a forward pass; None if not measured.
        both_ms: Milliseconds of a forward and a backward pass.
    """

    frames: int
    kind: str
    spec: str
    pairs: int
    macs: int
    forward_ms: float | None
    both_ms: float | None


def space_time_costs(
    specs: Mapping[str, AttentionSpec],
    frames: Sequence[int],
    *,
    patches: int = 196,
    num_heads: int = 12,
    head_dim: int = 64,
    measure: bool = False,
    device: str = "cpu",
) -> list[SpaceTimeCost]:
    """The cost of divided and of joint space-time attention with specs.

    Args:
        specs: Specs by the name that they shall have.
        frames: Numbers of frames (of tubelets, if a token covers more than one).
        patches: Patches per frame. Every sequence but those in time has CLS too.
        num_heads: Number of heads.
        head_dim: Size of one head.
        measure: Also measure the time, in float32: the least of three runs.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: If a spec cannot be had for such tokens.
    """
    costs = []
    for count in frames:
        for kind in ("divided", "joint"):
            for name, spec in specs.items():
                if kind == "joint":
                    parts = [(spec, count * patches, 1, 1)]
                else:
                    parts = [(spec, patches, 1, count), (Dense(), count, 0, patches)]
                pairs = macs = 0
                times = [0.0, 0.0]
                for part, tokens, prefix, sequences in parts:
                    cost = part.cost(num_heads, tokens, head_dim, prefix_tokens=prefix)
                    pairs, macs = pairs + sequences * cost.pairs, macs + sequences * cost.macs
                    if measure:
                        own = measure_attention(part, tokens, num_heads, head_dim, prefix, device, sequences)
                        times = [times[0] + own[0], times[1] + own[1]]
                measured = (times[0], times[1]) if measure else (None, None)
                costs.append(SpaceTimeCost(count, kind, name, pairs, macs, *measured))
    return costs
