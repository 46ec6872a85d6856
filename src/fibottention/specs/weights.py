"""Specs that change scores or weights, on top of others: SATA and LSA."""

# The fields and properties here stand in for class variables of the base.
# pyright: reportIncompatibleVariableOverride=false

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fibottention.ops.attention import Fill
from fibottention.ops.twist import Twist, TwistMode
from fibottention.patterns.pattern import Pattern
from fibottention.specs.base import AttentionSpec, GridSize, as_spec
from fibottention.specs.keep import Dense

__all__ = ["LSA", "SATA"]


@dataclass(frozen=True)
class LSA(AttentionSpec):
    """Locality self-attention: each head learns its temperature, and no token sees itself, CLS included.

    Source: "Vision Transformer for Small-Size Datasets", 2021, section 3.3.
    """

    name: ClassVar[str] = "lsa"
    learned_temperature: ClassVar[bool] = True

    def pattern(
        self,
        num_heads: int,
        num_tokens: int,
        *,
        prefix_tokens: int = 0,
        layer: int = 0,
        grid_size: GridSize | None = None,
    ) -> Pattern:
        """See `AttentionSpec.pattern`; prefix tokens are tokens like the others here."""
        length = prefix_tokens + num_tokens
        return Pattern.from_offsets([[o for o in range(1 - length, length) if o]], length, num_heads=num_heads)


@dataclass(frozen=True)
class SATA(AttentionSpec):
    """Suppression of accumulated trivial attention: `Twist` in every layer, on top of any spec.

    Source: arXiv 2210.12333, section 3.2.

    Attributes:
        threshold: Weights of at most this share of the largest one of their row are trivial.
        scale: Initial factor s of the trivial weights; each layer has its own.
        learnable: Whether s is learned.
        mode: ``"relative"``, or ``"absolute"``: weights of at most ``threshold`` are trivial.
        over: What it is put on: a spec, its name, or its plain data; all pairs if None.
    """

    name: ClassVar[str] = "sata"
    threshold: float = 0.1
    scale: float = 0.5
    learnable: bool = True
    mode: TwistMode = "relative"
    over: AttentionSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "over", as_spec(self.over))
        super().__post_init__()
        if isinstance(self.over, SATA):
            raise ValueError("SATA: over must be another spec, got SATA itself")
        if not self.base.has_pattern:
            raise ValueError(f"SATA: over must be a spec with weights of pairs known beforehand, got {self.base.name}")
        if self.fill == "zero":
            raise ValueError("SATA: over must not have fill='zero', which gives weight to pairs that are not kept")
        self.transform()  # raises for a threshold out of range

    @property
    def base(self) -> AttentionSpec:
        """The spec that it is put on."""
        return self.over or Dense()

    @property
    def fill(self) -> Fill:
        """See `AttentionSpec`."""
        return self.base.fill

    @property
    def bias_size(self) -> int:
        """See `AttentionSpec`."""
        return self.base.bias_size

    @property
    def needs_grid(self) -> bool:
        """See `AttentionSpec`."""
        return self.base.needs_grid

    @property
    def temperature(self) -> float:
        """See `AttentionSpec`."""
        return self.base.temperature

    @property
    def learned_temperature(self) -> bool:
        """See `AttentionSpec`."""
        return self.base.learned_temperature

    def transform(self) -> nn.Module:
        """See `AttentionSpec.transform`."""
        return Twist(self.threshold, self.scale, self.learnable, self.mode)

    def pattern(
        self,
        num_heads: int,
        num_tokens: int,
        *,
        prefix_tokens: int = 0,
        layer: int = 0,
        grid_size: GridSize | None = None,
    ) -> Pattern:
        """See `AttentionSpec.pattern`."""
        return self.base.pattern(num_heads, num_tokens, prefix_tokens=prefix_tokens, layer=layer, grid_size=grid_size)
