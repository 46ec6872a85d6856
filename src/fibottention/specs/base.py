"""What an attention spec is, and specs by name."""

import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from fibottention.ops.attention import Fill
from fibottention.patterns.pattern import Pattern

__all__ = ["AttentionCost", "AttentionSpec", "GridSize", "as_spec", "make_spec", "nearest", "spec_names", "square_grid"]

GridSize = tuple[int, int]

_registry: dict[str, type["AttentionSpec"]] = {}


@dataclass(frozen=True)
class AttentionCost:
    """What the attention of a layer computes for one sequence.

    Attributes:
        pairs: Pairs of query and key that get a weight, over all heads.
        macs: Multiply-accumulates between queries, keys and values (QK^T and AV).
        dense_macs: The same over all pairs.
    """

    pairs: int
    macs: int
    dense_macs: int

    @classmethod
    def of(cls, pattern: Pattern, head_dim: int) -> "AttentionCost":
        """The cost of computing just the pairs of a pattern."""
        return cls(pattern.nnz, pattern.macs(head_dim), pattern.dense_macs(head_dim))


@dataclass(frozen=True)
class AttentionSpec:
    """Base of all specs. A subclass sets ``name`` and builds its pattern.

    Attributes:
        name: Name in YAML and on the command line.
        fill: What a pair outside the pattern gets; see `fibottention.sparse_attention`.
        bias_size: Size of the table of relative biases that each head learns; 0 for none.
        needs_grid: Whether the pattern depends on the grid of the tokens.
        temperature: Factor of the scaled scores.
        learned_temperature: Whether each head learns a factor of the scores in the place of all others.
        has_pattern: Whether which pairs are kept is known beforehand; else the spec has an `attention` of its own.
        takes_bias: Whether a bias or mask can be added to the scores.
        has_weights: Whether there are weights of pairs, which dropout can act on.
        size_option: The option that sets how many pairs are kept, for `fit_macs`; None if there is none.
    """

    name: ClassVar[str]
    fill: ClassVar[Fill] = "-inf"
    bias_size: ClassVar[int] = 0
    needs_grid: ClassVar[bool] = False
    temperature: ClassVar[float] = 1.0
    learned_temperature: ClassVar[bool] = False
    has_pattern: ClassVar[bool] = True
    takes_bias: ClassVar[bool] = True
    has_weights: ClassVar[bool] = True
    size_option: ClassVar[str | None] = None

    def __init_subclass__(cls, abstract: bool = False) -> None:
        if not abstract:
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

    def transform(self) -> nn.Module | None:
        """A new transform of the attention weights for one layer, or None."""
        return None

    def attention(self, sequence_length: int | None) -> nn.Module | None:
        """A new module that attends for one layer, for specs without a pattern; else None.

        Args:
            sequence_length: Number of tokens, prefix tokens included; None if it is not known beforehand.
        """
        return None

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
        """What one layer computes for one sequence; see `pattern` for the arguments.

        Args:
            num_heads: Number of heads of the layer.
            num_tokens: Number of patch tokens.
            head_dim: Size of one head.
            prefix_tokens: Number of prefix tokens.
            layer: Index of the layer in the model, from 0.
            grid_size: Height and width of the grid of patch tokens.
        """
        pattern = self.pattern(num_heads, num_tokens, prefix_tokens=prefix_tokens, layer=layer, grid_size=grid_size)
        return AttentionCost.of(pattern, head_dim)

    @property
    def only_pairs(self) -> bool:
        """Whether the spec says no more than which pairs are kept."""
        return (
            self.has_pattern
            and self.temperature == 1
            and not (self.bias_size or self.learned_temperature or self.transform())
        )

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain data, ``{"name": ..., fields ...}``, from which `make_spec` makes it again."""
        return {"name": self.name, **{field.name: _plain(getattr(self, field.name)) for field in fields(self)}}


def _plain(value: Any) -> Any:
    if isinstance(value, AttentionSpec):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


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
    for option in map(str, options):  # YAML keys may be numbers or true
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


def as_spec(value: Any) -> Any:
    """A spec from its name or its plain data; anything else as it is."""
    return make_spec(value) if isinstance(value, str | Mapping) else value


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
