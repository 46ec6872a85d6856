"""Specs of attention that no fixed pattern describes: top-k, Linformer and efficient attention."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fibottention.ops.rivals import EfficientAttentionOp, LinformerOp, TopKOp
from fibottention.patterns.pattern import Pattern, check_sizes
from fibottention.specs.base import AttentionCost, AttentionSpec, GridSize

__all__ = ["EfficientAttention", "Linformer", "TopK"]


@dataclass(frozen=True)
class _Rival(AttentionSpec, abstract=True):
    """Attention without a pattern; prefix tokens are tokens like the others."""

    has_pattern: ClassVar[bool] = False

    def pattern(
        self,
        num_heads: int,
        num_tokens: int,
        *,
        prefix_tokens: int = 0,
        layer: int = 0,
        grid_size: GridSize | None = None,
    ) -> Pattern:
        """See `AttentionSpec.pattern`.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{self.name} has no fixed pattern: {(type(self).__doc__ or '').splitlines()[0]}")

    def cost(
        self,
        num_heads: int,
        num_tokens: int,
        head_dim: int,
        *,
        prefix_tokens: int = 0,
        layer: int = 0,
        grid_size: GridSize | None = None,
    ) -> AttentionCost:
        """See `AttentionSpec.cost`."""
        check_sizes(num_heads, num_tokens, prefix_tokens)
        length = prefix_tokens + num_tokens
        pairs, macs = self.head_cost(length, head_dim)
        return AttentionCost(num_heads * pairs, num_heads * macs, 2 * num_heads * length**2 * head_dim)

    def head_cost(self, length: int, head_dim: int) -> tuple[int, int]:
        """Pairs of query and key (or summary), and multiply-accumulates, of one head."""
        raise NotImplementedError


@dataclass(frozen=True)
class TopK(_Rival):
    """The keys with the k largest scores of each query, exactly; it costs as much as dense attention.

    Attributes:
        k: Keys per query; 3 prunes 98.48 % of the pairs of 196 patches and CLS, as in the published comparison.
    """

    name: ClassVar[str] = "topk"
    size_option: ClassVar[str | None] = "k"
    k: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"TopK: k must be at least 1, got {self.k}")

    def attention(self, sequence_length: int | None) -> nn.Module:
        """See `AttentionSpec.attention`."""
        return TopKOp(self.k)

    def head_cost(self, length: int, head_dim: int) -> tuple[int, int]:
        """See `_Rival.head_cost`."""
        return length * min(self.k, length), 2 * length**2 * head_dim


@dataclass(frozen=True)
class Linformer(_Rival):
    """Keys and values projected along the tokens to a few summaries; arXiv 2006.04768.

    Attributes:
        projection: Number of summaries; 4 is 2 % of 196 tokens, as in the published comparison.
    """

    name: ClassVar[str] = "linformer"
    takes_bias: ClassVar[bool] = False
    size_option: ClassVar[str | None] = "projection"
    projection: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projection < 1:
            raise ValueError(f"Linformer: projection must be at least 1, got {self.projection}")

    def attention(self, sequence_length: int | None) -> nn.Module:
        """See `AttentionSpec.attention`."""
        if sequence_length is None:
            raise ValueError(
                "sequence_length must be given for linformer, whose projections have that length, got None"
            )
        return LinformerOp(self.projection, sequence_length)

    def head_cost(self, length: int, head_dim: int) -> tuple[int, int]:
        """See `_Rival.head_cost`."""
        pairs = length * self.projection
        return pairs, 4 * pairs * head_dim


@dataclass(frozen=True)
class EfficientAttention(_Rival):
    """Softmax of queries over channels and of keys over tokens, linear in the tokens; arXiv 1812.01243."""

    name: ClassVar[str] = "efficient_attention"
    takes_bias: ClassVar[bool] = False
    has_weights: ClassVar[bool] = False

    def attention(self, sequence_length: int | None) -> nn.Module:
        """See `AttentionSpec.attention`."""
        return EfficientAttentionOp()

    def head_cost(self, length: int, head_dim: int) -> tuple[int, int]:
        """See `_Rival.head_cost`."""
        return 0, 2 * length * head_dim**2
