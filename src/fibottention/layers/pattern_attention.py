"""The part of an attention layer between the projections: queries, keys and values in, outputs out."""

import torch
from torch import Tensor, nn

from fibottention.ops.attention import Backend, sparse_attention
from fibottention.patterns.pattern import Pattern
from fibottention.specs import AttentionSpec

__all__ = ["PatternAttention"]


class PatternAttention(nn.Module):
    """Attention as a spec describes it, for queries, keys and values of any token count.

    Has no parameters. Builds the pattern of each token count it meets, once.

    Args:
        spec: How to attend.
        num_heads: Number of heads.
        prefix_tokens: Number of prefix tokens (CLS, registers) at the start of the sequence.
        layer: Index of the layer in its model, from 0.
        backend: As in `fibottention.sparse_attention`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        num_heads: int,
        *,
        prefix_tokens: int = 0,
        layer: int = 0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = num_heads
        self.prefix_tokens = prefix_tokens
        self.layer = layer
        self.backend: Backend = backend
        self._patterns: dict[int, Pattern] = {}

    def pattern(self, sequence_length: int) -> Pattern:
        """The pattern for a sequence of this many tokens, prefix tokens included.

        Raises:
            ValueError: If there is no patch token beside the prefix tokens.
        """
        self._build_pattern(sequence_length)
        return self._patterns[sequence_length]

    # torch.compile cannot trace the making of a pattern, which for its purposes is a constant.
    @torch.compiler.assume_constant_result
    def _build_pattern(self, sequence_length: int) -> None:
        if sequence_length in self._patterns:
            return
        if sequence_length <= self.prefix_tokens:
            raise ValueError(
                f"the sequence must be longer than its {self.prefix_tokens} prefix tokens, got {sequence_length}"
            )
        self._patterns[sequence_length] = self.spec.pattern(
            self.num_heads,
            sequence_length - self.prefix_tokens,
            prefix_tokens=self.prefix_tokens,
            layer=self.layer,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attend; see `fibottention.sparse_attention` for the arguments, all ``(B, H, N, D)``."""
        return sparse_attention(
            q,
            k,
            v,
            self.pattern(q.shape[2]),
            bias=bias,
            scale=scale,
            fill=self.spec.fill,
            dropout_p=dropout_p,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.spec}, prefix_tokens={self.prefix_tokens}, layer={self.layer}, backend={self.backend!r}"
