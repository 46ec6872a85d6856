"""Attention specs: small frozen dataclasses that say how a layer attends, by name, from YAML or in code.

A spec builds the pattern of a layer from its number of heads and tokens. Specs are all that most users need:
``sparsify(model, Fibottention())``.
"""

import difflib
import math
import random as python_random
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from fibottention import patterns
from fibottention.ops.attention import Fill
from fibottention.patterns.fibonacci import OnEmpty, Variant
from fibottention.patterns.pattern import Pattern

__all__ = [
    "AttentionSpec",
    "BigBird",
    "Dense",
    "DilatedWindow",
    "Exponential",
    "Fibottention",
    "Longformer",
    "Neighborhood",
    "RandomPairs",
    "SlidingWindow",
    "SparseTransformer",
    "make_spec",
    "nearest",
    "spec_names",
    "square_grid",
]

GridSize = tuple[int, int]

_registry: dict[str, type["AttentionSpec"]] = {}


@dataclass(frozen=True)
class AttentionSpec:
    """Base of all specs. A subclass sets ``name`` and builds its pattern.

    Attributes:
        name: Name in YAML and on the command line.
        fill: What a pair outside the pattern gets; see `fibottention.sparse_attention`.
        bias_size: Size of the table of relative biases that each head learns; 0 for none.
        needs_grid: Whether the pattern depends on the grid of the tokens.
    """

    name: ClassVar[str]
    fill: ClassVar[Fill] = "-inf"
    bias_size: ClassVar[int] = 0
    needs_grid: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        _registry[cls.name] = cls

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if not _matches(value, hints[field.name]):
                raise ValueError(
                    f"{type(self).__name__}: {field.name} must be {_describe(hints[field.name])}, got {value!r}"
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
        """The pattern of one layer.

        Args:
            num_heads: Number of heads of the layer.
            num_tokens: Number of patch tokens.
            prefix_tokens: Number of prefix tokens (CLS, registers), which see and are seen by all tokens.
            layer: Index of the layer in the model, from 0.
            grid_size: Height and width of the grid of patch tokens, for specs that need it; a square if None.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain data, ``{"name": ..., fields ...}``, from which `make_spec` makes it again."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {"name": self.name, **plain}


@dataclass(frozen=True)
class Dense(AttentionSpec):
    """All pairs: ordinary attention."""

    name: ClassVar[str] = "dense"

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
class SparseTransformer(AttentionSpec):
    """Sparse Transformer, strided or fixed; see `fibottention.patterns.strided` and `fixed`.

    Attributes:
        mode: ``"strided"`` or ``"fixed"``.
        stride: Stride or block length; the rounded square root of the number of tokens if None.
        window: Tokens on each side of the strided form's local part; ``stride - 1`` if None.
        summary: Tokens at the end of each block of the fixed form that all queries see.
    """

    name: ClassVar[str] = "sparse_transformer"
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


def square_grid(num_tokens: int) -> GridSize:
    """Height and width of a square grid of tokens.

    Raises:
        ValueError: If the number of tokens is no square.
    """
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens:
        raise ValueError(f"grid_size must be given for {num_tokens} tokens, which are no square")
    return side, side


def spec_names() -> list[str]:
    """Names of all specs, sorted."""
    return sorted(_registry)


def make_spec(name: str | Mapping[str, Any], **options: Any) -> AttentionSpec:
    """The spec of a name, with its fields as keyword arguments.

    Args:
        name: Name of a spec, such as ``"fibottention"`` (case, ``-`` and ``_`` do not matter), or a mapping with
            ``name`` and the fields, as it comes from YAML.
        **options: Fields of the spec.

    Raises:
        ValueError: If the name, a field or a value is not valid; the message gives the nearest valid name.
    """
    if not isinstance(name, str):
        options = {**name, **options}
        name = str(options.pop("name", ""))
    known = {key.replace("_", ""): spec for key, spec in _registry.items()}
    spec = known.get(name.lower().replace("-", "").replace("_", ""))
    if spec is None:
        raise ValueError(f"no attention spec is named {name!r}{nearest(name, spec_names())}")
    valid = [field.name for field in fields(spec)]
    for option in options:
        if option not in valid:
            has = f"it has {', '.join(valid)}" if valid else "it has no options"
            raise ValueError(f"attention spec {spec.name!r} has no option {option!r}{nearest(option, valid, has)}")
    return spec(**options)


def nearest(word: str, valid: list[str], otherwise: str | None = None) -> str:
    """``; did you mean 'x'?`` for a mistyped word, or ``; `` and the valid words (or ``otherwise``)."""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; {otherwise}" if otherwise else f"; valid are {', '.join(valid)}"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _matches(value: Any, hint: Any) -> bool:
    for option in _alternatives(hint):
        if get_origin(option) is Literal:
            if value in get_args(option):
                return True
        elif option is float and isinstance(value, int) and not isinstance(value, bool):
            return True
        elif option is int and isinstance(value, bool):
            continue
        elif get_origin(option) is tuple:
            if isinstance(value, tuple) and all(_matches(item, get_args(option)[0]) for item in value):
                return True
        elif isinstance(value, option):
            return True
    return False


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "none"}
    parts: list[str] = []
    for option in _alternatives(hint):
        if get_origin(option) is Literal:
            parts += [repr(choice) for choice in get_args(option)]
        elif get_origin(option) is tuple:
            parts.append("a list of whole numbers")
        else:
            parts.append(names.get(option, getattr(option, "__name__", str(option))))
    return " or ".join(parts)
