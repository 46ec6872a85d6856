"""The part of an attention layer between the projections: queries, keys and values in, outputs out."""

import torch
from torch import Tensor, nn

from fibottention.ops.arguments import table_by_pair
from fibottention.ops.attention import Backend, sparse_attention
from fibottention.ops.constants import pair_indices
from fibottention.ops.eager import static_size
from fibottention.patterns.pattern import Pattern
from fibottention.specs import AttentionCost, AttentionSpec, GridSize

__all__ = ["PatternAttention"]

# Pairs of the patterns that a layer keeps for numbers of tokens that come again; images of all sizes would fill the
# memory, at about 40 bytes a pair.
_KEPT_PAIRS = 2**22


class PatternAttention(nn.Module):
    """Attention as a spec describes it, for queries, keys and values of any token count.

    Builds the pattern of each token count it meets, once. Holds what a spec learns: the table of relative biases,
    ``rpb`` ``(num_heads, bias_size)``; the ``temperature`` ``(num_heads,)``; the ``transform`` of the weights; and the
    ``attention`` of specs without a pattern.

    Args:
        spec: How to attend.
        num_heads: Number of heads.
        prefix_tokens: Number of prefix tokens (CLS, registers) at the start of the sequence.
        layer: Index of the layer in its model, from 0.
        backend: As in `fibottention.sparse_attention`.
        grid_size: Height and width of the grid of patch tokens, for specs that need it; a square if None.
        head_dim: Size of one head, for specs that learn a temperature, which starts at ``head_dim ** -0.5``.
        sequence_length: Number of tokens, prefix tokens included, for specs that learn something of that length.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: If ``head_dim`` or ``sequence_length`` is None and the spec needs it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        num_heads: int,
        *,
        prefix_tokens: int = 0,
        layer: int = 0,
        backend: Backend = "auto",
        grid_size: GridSize | None = None,
        head_dim: int | None = None,
        sequence_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = num_heads
        self.prefix_tokens = prefix_tokens
        self.layer = layer
        self.backend: Backend = backend
        self.grid_size = grid_size
        self.rpb: nn.Parameter | None = None
        if spec.bias_size:
            self.rpb = nn.Parameter(torch.empty(num_heads, spec.bias_size, device=device, dtype=dtype))
        self.temperature: nn.Parameter | None = None
        if spec.learned_temperature:
            if head_dim is None:
                raise ValueError(f"head_dim must be given for {spec}, which learns a temperature, got None")
            self.temperature = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        transform = spec.transform()
        self.transform = None if transform is None else transform.to(device=device, dtype=dtype)
        own = spec.attention(sequence_length)
        self.attention = None if own is None else own.to(device=device, dtype=dtype)
        self._patterns: dict[tuple[int, GridSize | None], Pattern] = {}
        self._initial_temperature = 1.0 if head_dim is None else head_dim**-0.5
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the table of biases and the temperature to their initial values."""
        if self.rpb is not None:
            nn.init.zeros_(self.rpb)
        if self.temperature is not None:
            nn.init.constant_(self.temperature, self._initial_temperature)

    def pattern(self, sequence_length: int) -> Pattern:
        """The pattern for a sequence of this many tokens, prefix tokens included.

        Raises:
            ValueError: If there is no patch token beside the prefix tokens.
        """
        length = static_size(sequence_length)
        self._build_pattern(length)
        return self._patterns[length, self.grid_size if self.spec.needs_grid else None]

    def cost(self, sequence_length: int, head_dim: int) -> AttentionCost:
        """What is computed for one sequence of this many tokens, prefix tokens included."""
        if self.spec.has_pattern:
            return AttentionCost.of(self.pattern(sequence_length), head_dim)
        patches = sequence_length - self.prefix_tokens
        return self.spec.cost(self.num_heads, patches, head_dim, prefix_tokens=self.prefix_tokens)

    # torch.compile cannot trace the making of a pattern, which for its purposes is a constant.
    @torch.compiler.assume_constant_result
    def _build_pattern(self, sequence_length: int) -> None:
        grid_size = self.grid_size if self.spec.needs_grid else None
        size = sequence_length, grid_size
        if size in self._patterns:
            self._patterns[size] = self._patterns.pop(size)  # the last to be dropped
            return
        if sequence_length <= self.prefix_tokens:
            raise ValueError(
                f"the sequence must be longer than its {self.prefix_tokens} prefix tokens, got {sequence_length}"
            )
        num_tokens = sequence_length - self.prefix_tokens
        if grid_size is not None and grid_size[0] * grid_size[1] != num_tokens:
            raise ValueError(
                f"{self.spec.name} needs the grid of the tokens: the sequence has {num_tokens} patch tokens, but the "
                f"grid is {grid_size[0]} x {grid_size[1]}"
            )
        self._patterns[size] = self.spec.pattern(
            self.num_heads,
            num_tokens,
            prefix_tokens=self.prefix_tokens,
            layer=self.layer,
            grid_size=grid_size,
        )
        while len(self._patterns) > 1 and sum(p.stored_pairs for p in self._patterns.values()) > _KEPT_PAIRS:
            del self._patterns[next(iter(self._patterns))]

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
        """Attend; see `fibottention.sparse_attention` for the arguments, all ``(B, H, N, D)``; a bias is dense."""
        q, scale = self.with_temperature(q, scale)
        if self.attention is not None:
            return self.attention(q, k, v, bias=bias, scale=scale, dropout_p=dropout_p)
        pattern = self.pattern(q.shape[2])
        return sparse_attention(
            q,
            k,
            v,
            pattern,
            bias=self.with_table(bias, pattern),
            scale=scale,
            fill=self.spec.fill,
            transform=self.transform,
            dropout_p=dropout_p,
            backend=self.backend,
        )

    def with_temperature(self, q: Tensor, scale: float | None) -> tuple[Tensor, float]:
        """The queries and the factor of the scores, after what the spec does to them."""
        if self.temperature is not None:
            return q * self.temperature.to(q.dtype).view(-1, 1, 1), self.spec.temperature
        return q, self.spec.temperature * (float(q.shape[-1] ** -0.5) if scale is None else scale)

    def with_table(self, bias: Tensor | None, pattern: Pattern) -> Tensor | None:
        """A dense bias together with the spec's own table of relative biases."""
        if self.rpb is None or bias is None:
            return bias if self.rpb is None else self.rpb
        _, query, key = pair_indices(pattern, bias.device)
        return bias[:, :, query, key] + table_by_pair(self.rpb, pattern)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.spec}, prefix_tokens={self.prefix_tokens}, layer={self.layer}, backend={self.backend!r}"
