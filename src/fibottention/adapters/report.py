"""What putting a spec into a model did, layer by layer."""

from dataclasses import dataclass
from typing import Any

from fibottention.specs import AttentionCost, AttentionSpec

__all__ = ["LayerReport", "SparsifyReport", "check_layer"]


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
    def of(cls, cost: AttentionCost, *, num_heads: int, sequences: int, **names: Any) -> "LayerReport":
        """The report of a layer with some cost per sequence; ``names`` are the other attributes."""
        length = names["num_tokens"] + names["prefix_tokens"]
        return cls(
            num_heads=num_heads,
            sequences=sequences,
            density=cost.pairs / (num_heads * length**2),
            dense_macs=cost.dense_macs * sequences,
            macs=cost.macs * sequences,
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

    @property
    def pairs(self) -> float:
        """Pairs that get a weight, as a share of all pairs."""
        every = [
            layer.sequences * layer.num_heads * (layer.prefix_tokens + layer.num_tokens) ** 2 for layer in self.layers
        ]
        return sum(n * layer.density for n, layer in zip(every, self.layers, strict=True)) / sum(every)

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


def check_layer(spec: AttentionSpec, where: str, *, has_bias: bool, dropout: float) -> None:
    """Check that a spec can serve an attention layer.

    Args:
        spec: The spec.
        where: Class and path of the layer, for the message.
        has_bias: Whether the layer adds a bias of its own to the scores.
        dropout: Its dropout probability of the attention weights.

    Raises:
        ValueError: If it cannot.
    """
    if has_bias and spec.bias_size:
        raise ValueError(f"rel_pos_bias=True is not supported by {where}, which has its own bias")
    if has_bias and not spec.takes_bias:
        raise ValueError(
            f"{spec.name} is not supported by {where}: it has no scores to which that layer's bias could go"
        )
    if dropout and spec.fill == "zero":
        raise ValueError(
            "fill='zero' gives weight to pairs that are not stored, so it needs an attention dropout of 0, got "
            f"{dropout} in {where}"
        )
    if dropout and not spec.has_weights:
        raise ValueError(
            f"{spec.name} has no weights to drop, so it needs an attention dropout of 0, got {dropout} in {where}"
        )
