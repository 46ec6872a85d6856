"""What putting a spec into a model did, layer by layer."""

from dataclasses import dataclass
from typing import Any

from fibottention.patterns.pattern import Pattern
from fibottention.specs import AttentionSpec

__all__ = ["LayerReport", "SparsifyReport"]


@dataclass(frozen=True)
class LayerReport:
    """What one attention layer computes per image, before and after.

    Attributes:
        path: Path of the module in the model.
        attention_class: Class of the replaced module.
        num_heads: Number of heads.
        head_dim: Size of one head.
        num_tokens: Patch tokens of one sequence (of one window in Swin).
        prefix_tokens: Prefix tokens of one sequence.
        sequences: Sequences per image (the number of windows in Swin).
        density: Share of pairs that are computed, prefix tokens included.
        dense_macs: Multiply-accumulates of QK^T and AV over all pairs.
        macs: Multiply-accumulates of QK^T and AV over the computed pairs.
    """

    path: str
    attention_class: str
    num_heads: int
    head_dim: int
    num_tokens: int
    prefix_tokens: int
    sequences: int
    density: float
    dense_macs: int
    macs: int

    @classmethod
    def of(cls, pattern: Pattern, *, head_dim: int, sequences: int, **names: Any) -> "LayerReport":
        """The report of a layer that computes the pairs of a pattern; ``names`` are the other attributes."""
        return cls(
            head_dim=head_dim,
            sequences=sequences,
            density=pattern.density(),
            dense_macs=pattern.dense_macs(head_dim) * sequences,
            macs=pattern.macs(head_dim) * sequences,
            **names,
        )


@dataclass(frozen=True)
class SparsifyReport:
    """What `sparsify` did; prints as a table.

    Attributes:
        model: Class of the model.
        spec: The spec that was put in.
        layers: One entry per replaced layer.
        left_dense: Paths of attention layers that stay as they were, because a spec for sequences of patches makes no
            sense there, such as those that pool.
    """

    model: str
    spec: AttentionSpec
    layers: tuple[LayerReport, ...]
    left_dense: tuple[str, ...] = ()

    @property
    def dense_macs(self) -> int:
        """Attention multiply-accumulates per image over all pairs."""
        return sum(layer.dense_macs for layer in self.layers)

    @property
    def macs(self) -> int:
        """Attention multiply-accumulates per image over the computed pairs."""
        return sum(layer.macs for layer in self.layers)

    @property
    def density(self) -> float:
        """Computed multiply-accumulates as a share of those over all pairs."""
        return self.macs / self.dense_macs

    def __str__(self) -> str:
        header = ("layer", "class", "heads", "head dim", "tokens", "density", "MACs before", "MACs after")
        rows = [
            (
                layer.path,
                layer.attention_class,
                str(layer.num_heads),
                str(layer.head_dim),
                f"{layer.prefix_tokens}+{layer.num_tokens}" + (f" x {layer.sequences}" if layer.sequences > 1 else ""),
                f"{layer.density:.2%}",
                f"{layer.dense_macs / 1e6:.2f} M",
                f"{layer.macs / 1e6:.2f} M",
            )
            for layer in self.layers
        ]
        total = (
            "total",
            "",
            "",
            "",
            "",
            f"{self.density:.2%}",
            f"{self.dense_macs / 1e6:.2f} M",
            f"{self.macs / 1e6:.2f} M",
        )
        widths = [max(len(row[i]) for row in (header, *rows, total)) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in (header, *rows, total)
        ]
        if self.left_dense:
            lines.append(f"left dense: {', '.join(self.left_dense)}")
        return "\n".join([f"{self.model} with {self.spec}", *(line.rstrip() for line in lines)])
