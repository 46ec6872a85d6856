"""Specs that keep some of the pairs, one per family of patterns."""

import random as python_random
from dataclasses import dataclass
from typing import ClassVar, Literal

from fibottention import patterns
from fibottention.ops.attention import Fill
from fibottention.patterns.fibonacci import OnEmpty, Variant
from fibottention.patterns.pattern import Pattern
from fibottention.specs.base import AttentionSpec, GridSize, square_grid

__all__ = [
    "BigBird",
    "CrissCross",
    "Dense",
    "DilatedWindow",
    "Exponential",
    "Fibonacci",
    "Fibottention",
    "GridAttention",
    "Longformer",
    "Neighborhood",
    "RandomPairs",
    "SlidingWindow",
    "SparseTransformer",
]


@dataclass(frozen=True)
class Dense(AttentionSpec):
    """All pairs: ordinary attention.

    Attributes:
        temperature: Factor of the scaled scores; above 1 the attention is sharper.
    """

    name: ClassVar[str] = "dense"
    temperature: float = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"Dense: temperature must be above 0, got {self.temperature}")

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
        return patterns.dense(num_heads, num_tokens, prefix_tokens=prefix_tokens)


@dataclass(frozen=True)
class Fibottention(AttentionSpec):
    """Fibottention: each head keeps the diagonals of its row of the Wythoff array (arXiv 2406.19391).

    Attributes:
        w_min: Window of the first head, in tokens.
        w_max: Window of the last head; floor(N / 3) if None, as published.
        variant: ``"wythoff"``, or ``"modified"`` with two more diagonals per head.
        fill: ``"-inf"`` (the paper's intent) or ``"zero"`` (the released code).
        shuffle: Permute the heads by layer, the same way in training and evaluation.
        seed: Seed of the permutations; layer ``l`` with seed 0 has the order of the released code's layer ``l``.
        on_empty: What a head without a term in its window gets; see `fibottention.patterns.wythoff`.
    """

    name: ClassVar[str] = "fibottention"
    size_option: ClassVar[str | None] = "w_max"
    w_min: int = 5
    w_max: int | None = None
    variant: Variant = "wythoff"
    fill: Fill = "-inf"  # pyright: ignore[reportIncompatibleVariableOverride]
    shuffle: bool = True
    seed: int = 0
    on_empty: OnEmpty = "cycle"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.w_min < 0 or (self.w_max is not None and self.w_max < self.w_min):
            raise ValueError(
                f"Fibottention: w_min and w_max must satisfy 0 <= w_min <= w_max, got {self.w_min} and {self.w_max}"
            )

    def head_order(self, num_heads: int, layer: int) -> tuple[int, ...]:
        """Wythoff row of each head slot of a layer, counted from 1.

        Args:
            num_heads: Number of heads.
            layer: Index of the layer, from 0.
        """
        order = list(range(1, num_heads + 1))
        if self.shuffle:
            python_random.Random(layer + 1_000_003 * self.seed).shuffle(order)
        return tuple(order)

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
        return patterns.wythoff(
            num_heads,
            num_tokens,
            self.w_min,
            self.w_max,
            self.variant,
            self.on_empty,
            prefix_tokens,
            self.head_order(num_heads, layer),
        )


@dataclass(frozen=True)
class SlidingWindow(AttentionSpec):
    """The ``window`` tokens on each side; see `fibottention.patterns.sliding_window`."""

    name: ClassVar[str] = "sliding_window"
    size_option: ClassVar[str | None] = "window"
    window: int = 3
    include_self: bool = True

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
        return patterns.sliding_window(
            num_heads, num_tokens, self.window, include_self=self.include_self, prefix_tokens=prefix_tokens
        )


@dataclass(frozen=True)
class DilatedWindow(AttentionSpec):
    """Distances ``dilation * n``, the constant sequence; see `fibottention.patterns.dilated_window`."""

    name: ClassVar[str] = "dilated_window"
    size_option: ClassVar[str | None] = "window"
    window: int = 3
    dilation: int = 2
    include_self: bool = True

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
        return patterns.dilated_window(
            num_heads,
            num_tokens,
            self.window,
            self.dilation,
            include_self=self.include_self,
            prefix_tokens=prefix_tokens,
        )


@dataclass(frozen=True)
class Exponential(AttentionSpec):
    """Distances 1, base, base^2, ...; see `fibottention.patterns.exponential`."""

    name: ClassVar[str] = "exponential"
    size_option: ClassVar[str | None] = "window"
    base: int = 2
    window: int | None = None
    include_self: bool = True

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
        return patterns.exponential(
            num_heads,
            num_tokens,
            self.base,
            self.window,
            include_self=self.include_self,
            prefix_tokens=prefix_tokens,
        )


@dataclass(frozen=True)
class Fibonacci(AttentionSpec):
    """Distances 1, 2, 3, 5, ..., the same in all heads; see `fibottention.patterns.fibonacci`."""

    name: ClassVar[str] = "fibonacci"
    size_option: ClassVar[str | None] = "window"
    window: int | None = None
    include_self: bool = True

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
        return patterns.fibonacci(
            num_heads, num_tokens, self.window, include_self=self.include_self, prefix_tokens=prefix_tokens
        )


@dataclass(frozen=True)
class SparseTransformer(AttentionSpec):
    """Sparse Transformer, strided or fixed; see `fibottention.patterns.strided` and `fixed`.

    Attributes:
        mode: ``"strided"`` or ``"fixed"``.
        stride: Stride or block length; the rounded square root of the number of tokens if None.
        window: Tokens on each side of the strided form's local part; ``stride - 1`` if None.
        summary: Tokens at the end of each block of the fixed form that all queries see.
    """

    name: ClassVar[str] = "sparse_transformer"
    size_option: ClassVar[str | None] = "stride"
    mode: Literal["strided", "fixed"] = "strided"
    stride: int | None = None
    window: int | None = None
    summary: int = 1

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
        if self.mode == "fixed":
            return patterns.fixed(num_heads, num_tokens, self.stride, self.summary, prefix_tokens=prefix_tokens)
        return patterns.strided(num_heads, num_tokens, self.stride, self.window, prefix_tokens=prefix_tokens)


@dataclass(frozen=True)
class Longformer(AttentionSpec):
    """Sliding window and global tokens; see `fibottention.patterns.longformer`."""

    name: ClassVar[str] = "longformer"
    size_option: ClassVar[str | None] = "window"
    window: int = 1
    global_tokens: int = 0

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
        return patterns.longformer(num_heads, num_tokens, self.window, self.global_tokens, prefix_tokens=prefix_tokens)


@dataclass(frozen=True)
class BigBird(AttentionSpec):
    """Sliding window, random keys and global tokens; see `fibottention.patterns.bigbird`.

    The random keys differ from layer to layer.
    """

    name: ClassVar[str] = "bigbird"
    size_option: ClassVar[str | None] = "window"
    window: int = 1
    random_keys: int = 1
    global_tokens: int = 0
    seed: int = 0

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
        return patterns.bigbird(
            num_heads,
            num_tokens,
            self.window,
            self.random_keys,
            self.global_tokens,
            layer + 1_000_003 * self.seed,
            prefix_tokens=prefix_tokens,
        )


@dataclass(frozen=True)
class RandomPairs(AttentionSpec):
    """Random keys, other ones in each head and layer; see `fibottention.patterns.random`."""

    name: ClassVar[str] = "random_pairs"
    size_option: ClassVar[str | None] = "density"
    density: float = 0.0195
    seed: int = 0

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
        return patterns.random(
            num_heads, num_tokens, self.density, layer + 1_000_003 * self.seed, prefix_tokens=prefix_tokens
        )


@dataclass(frozen=True)
class Neighborhood(AttentionSpec):
    """Neighborhood attention on the grid of patches, dilated with a dilation above 1 (arXiv 2209.15001).

    On a plain ViT these are the paper's isotropic models (section 4.3). Prefix tokens see and are seen by all.

    Attributes:
        kernel_size: Side of the neighborhoods, in patches.
        dilation: Step between the keys; or several, which the layers take in turn: ``(1, 2)`` for DiNAT.
        rel_pos_bias: Learn a table of relative biases in each layer, which starts at zero.
    """

    name: ClassVar[str] = "neighborhood"
    size_option: ClassVar[str | None] = "kernel_size"
    needs_grid: ClassVar[bool] = True
    kernel_size: int = 7
    dilation: int | tuple[int, ...] = 1
    rel_pos_bias: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.dilation, list):
            object.__setattr__(self, "dilation", tuple(self.dilation))
        super().__post_init__()
        dilations = (self.dilation,) if isinstance(self.dilation, int) else self.dilation
        if self.kernel_size < 1 or not dilations or min(dilations) < 1:
            raise ValueError(
                f"Neighborhood: kernel_size and dilation must be at least 1, got {self.kernel_size} and {self.dilation}"
            )

    @property
    def bias_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `AttentionSpec`."""
        return (2 * self.kernel_size - 1) ** 2 if self.rel_pos_bias else 0

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
        dilations = (self.dilation,) if isinstance(self.dilation, int) else self.dilation
        return patterns.neighborhood(
            num_heads,
            square_grid(num_tokens) if grid_size is None else grid_size,
            self.kernel_size,
            dilation=dilations[layer % len(dilations)],
            relation=self.rel_pos_bias,
            prefix_tokens=prefix_tokens,
        )


@dataclass(frozen=True)
class CrissCross(AttentionSpec):
    """The row and the column of each patch, 13.8 % of a grid of 14 x 14; see `fibottention.patterns.axial`."""

    name: ClassVar[str] = "criss_cross"
    needs_grid: ClassVar[bool] = True

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
        return patterns.axial(num_heads, grid_size or square_grid(num_tokens), prefix_tokens=prefix_tokens)


@dataclass(frozen=True)
class GridAttention(AttentionSpec):
    """MaxViT's sparse grid: patches a fixed step apart in both directions; see `fibottention.patterns.grid`.

    Attributes:
        size: Rows and columns of patches that a patch sees; 7 as published, 25 % of a grid of 14 x 14. 2 keeps 2 %.
    """

    name: ClassVar[str] = "grid_attention"
    needs_grid: ClassVar[bool] = True
    size_option: ClassVar[str | None] = "size"
    size: int = 7

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
        return patterns.grid(num_heads, grid_size or square_grid(num_tokens), self.size, prefix_tokens=prefix_tokens)


@dataclass(frozen=True)
class WindowPartition(AttentionSpec):
    """ViTDet's windows side by side on the grid of patches; see `fibottention.patterns.window_partition`.

    Attributes:
        size: Side of a window, in patches.
        global_every: Every so many layers one sees all patches: 3 for ViTDet's 4 of 12 layers; none if 0.
    """

    name: ClassVar[str] = "window_partition"
    needs_grid: ClassVar[bool] = True
    size_option: ClassVar[str | None] = "size"
    size: int = 14
    global_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1 or self.global_every < 0:
            raise ValueError(
                f"WindowPartition: size must be at least 1 and global_every at least 0, got {self.size} and "
                f"{self.global_every}"
            )

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
        if self.global_every and (layer + 1) % self.global_every == 0:
            return patterns.dense(num_heads, num_tokens, prefix_tokens=prefix_tokens)
        grid = grid_size or square_grid(num_tokens)
        return patterns.window_partition(num_heads, grid, self.size, prefix_tokens=prefix_tokens)
