"""The Pattern: which query-key pairs each head may look at."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Pattern", "SparseRows"]

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

_interned: WeakValueDictionary[str, "Pattern"] = WeakValueDictionary()


@dataclass(frozen=True)
class SparseRows:
    """Compressed rows: the entries of row ``r`` are ``indices[starts[r]:starts[r + 1]]``.

    Attributes:
        starts: ``(rows + 1,)`` first entry of each row.
        indices: ``(pairs,)`` the other token of each pair, ascending within a row.
        pairs: ``(pairs,)`` position of each entry in the row-major pair order, or None where it is that order.
    """

    starts: Int64Array
    indices: Int64Array
    pairs: Int64Array | None = None

    def transposed(self, length: int) -> "SparseRows":
        """The columns, for rows and columns that are numbered by head and token, ``length`` tokens each."""
        row_of_entry = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        column = row_of_entry // length * length + self.indices
        order = np.argsort(column, kind="stable").astype(np.int64)
        counts = np.bincount(column, minlength=len(self.starts) - 1)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return SparseRows(starts, row_of_entry[order] % length, order)


def _runs(values: Sequence[int]) -> str:
    """Write sorted integers as ``1 2 5..9``."""
    parts: list[str] = []
    first = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            if i - first > 2:
                parts.append(f"{values[first]}..{values[i - 1]}")
            else:
                parts += [str(v) for v in values[first:i]]
            first = i
    return " ".join(parts)


def _parse_runs(text: str) -> list[int]:
    values: list[int] = []
    for part in text.split():
        low, _, high = part.partition("..")
        values += range(int(low), int(high or low) + 1)
    return values


def _head_text(offsets: tuple[int, ...]) -> str:
    if any(offsets) and set(offsets) == {-o for o in offsets}:
        return "+-" + _runs([o for o in offsets if o >= 0])
    return _runs(offsets)


def _parse_head(text: str) -> list[int]:
    if text.startswith("+-"):
        distances = _parse_runs(text[2:])
        return [-d for d in distances] + distances
    return _parse_runs(text)


class Pattern:
    """Which keys each query of each head may look at; immutable, hashable, free of models and devices.

    A sequence is ``prefix_tokens`` prefix tokens (CLS, registers) followed by ``num_tokens`` patch tokens. Prefix
    tokens see all tokens and are seen by all tokens, in every head. Over the patch tokens a pattern has one of two
    forms: *offsets* (per head, query ``i`` sees keys ``i + o``) or *rows* (explicit keys per query). A pattern that is
    the same in all heads is stored once.

    Make one with `Pattern.from_offsets`, `Pattern.from_rows`, `Pattern.from_mask` or a factory of
    `fibottention.patterns`. Patterns of one form with the same pairs are one object, so they share what is computed
    from them.

    Attributes:
        num_heads: Number of heads, H.
        num_tokens: Number of patch tokens, N.
        prefix_tokens: Number of prefix tokens, P.
        offsets: The offset form: sorted offsets, one tuple per stored head; None for the row form.
        allow_empty: Whether a query may keep no key. Its output is then zero, and so are its gradients.
        key: Stable text form; equal patterns have equal keys.
        stored_heads: 1 for a pattern that is the same in all heads, else ``num_heads``.
        patch_counts: Kept patch-to-patch pairs of each head.
        row_form: The row form: the keys of each patch query, as patch tokens; None for the offset form.
        relation: Bucket of each patch pair in a table of relative biases, in row-major order; None without one.
        num_buckets: Number of buckets of that table; 0 without one.
    """

    num_heads: int
    num_tokens: int
    prefix_tokens: int
    offsets: tuple[tuple[int, ...], ...] | None
    allow_empty: bool
    key: str
    stored_heads: int
    patch_counts: tuple[int, ...]
    row_form: SparseRows | None
    relation: Int32Array | None
    num_buckets: int

    def __init__(self) -> None:
        raise TypeError("make a Pattern with from_offsets, from_rows, from_mask or a factory of fibottention.patterns")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Pattern is immutable, cannot set {name}")

    @classmethod
    def from_offsets(
        cls,
        offsets: Sequence[Iterable[int]],
        num_tokens: int,
        *,
        num_heads: int | None = None,
        prefix_tokens: int = 0,
        allow_empty: bool = False,
    ) -> "Pattern":
        """Pattern in which query ``i`` of head ``h`` sees the keys ``i + o`` for each ``o`` in ``offsets[h]``.

        Args:
            offsets: One collection of signed offsets per head, or a single one for all of ``num_heads`` heads.
                Offsets that leave the sequence for every query are dropped.
            num_tokens: Number of patch tokens.
            num_heads: Number of heads; ``len(offsets)`` if None.
            prefix_tokens: Number of prefix tokens in front of the patch tokens.
            allow_empty: Accept queries that keep no key.

        Raises:
            ValueError: If a size is out of range, or a query would keep no key and ``allow_empty`` is False.
        """
        num_heads = len(offsets) if num_heads is None else num_heads
        check_sizes(num_heads, num_tokens, prefix_tokens)
        if len(offsets) not in (1, num_heads):
            raise ValueError(
                f"offsets must hold one collection per head (num_heads={num_heads}) or one for all, got {len(offsets)}"
            )
        kept = tuple(tuple(sorted({int(o) for o in head if abs(o) < num_tokens})) for head in offsets)
        if len(set(kept)) == 1:
            kept = kept[:1]
        body = " | ".join(_head_text(head) for head in kept)
        key = _key("offsets", num_heads, num_tokens, prefix_tokens, allow_empty, body)
        if (known := _interned.get(key)) is not None:
            return known
        if not allow_empty and not prefix_tokens:
            for h, head in enumerate(kept):
                # Query i keeps a key unless it lies past the reach of every offset on both sides.
                first_lost = num_tokens - min((o for o in head if o >= 0), default=num_tokens)
                last_lost = min((-o for o in head if o <= 0), default=num_tokens)
                if first_lost < last_lost:
                    _raise_empty(first_lost, h, "add offset 0 so that each token sees itself, or use smaller offsets")
        return cls._make(key, num_heads, num_tokens, prefix_tokens, kept, None, allow_empty)

    @classmethod
    def from_rows(
        cls,
        keys: Sequence[Sequence[Iterable[int]]],
        num_tokens: int,
        *,
        num_heads: int | None = None,
        prefix_tokens: int = 0,
        allow_empty: bool = False,
    ) -> "Pattern":
        """Pattern with explicit keys: query ``i`` of head ``h`` sees the patch tokens ``keys[h][i]``.

        Args:
            keys: Per head, per query, the keys (patch token numbers from 0); or a single head for all heads.
            num_tokens: Number of patch tokens.
            num_heads: Number of heads; ``len(keys)`` if None.
            prefix_tokens: Number of prefix tokens in front of the patch tokens.
            allow_empty: Accept queries that keep no key.

        Raises:
            ValueError: If a size or key is out of range, or a query would keep no key and ``allow_empty`` is False.
        """
        for h, head in enumerate(keys):
            if len(head) != num_tokens:
                raise ValueError(f"keys[{h}] must hold one row per token (num_tokens={num_tokens}), got {len(head)}")
        rows = [np.unique(np.fromiter(row, dtype=np.int64)) for head in keys for row in head]
        indices = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        return cls._from_sorted_rows(
            np.array([len(r) for r in rows], dtype=np.int64),
            indices,
            stored_heads=len(keys),
            num_tokens=num_tokens,
            num_heads=num_heads,
            prefix_tokens=prefix_tokens,
            allow_empty=allow_empty,
        )

    @classmethod
    def from_mask(
        cls,
        mask: Tensor | NDArray[np.bool_],
        *,
        num_heads: int | None = None,
        prefix_tokens: int = 0,
        allow_empty: bool = False,
    ) -> "Pattern":
        """Pattern from a boolean mask over the patch tokens, True where query (row) sees key (column).

        Args:
            mask: ``(H, N, N)`` or, for all heads, ``(N, N)``. The prefix tokens are not in it.
            num_heads: Number of heads; H (or 1) if None.
            prefix_tokens: Number of prefix tokens in front of the patch tokens.
            allow_empty: Accept queries that keep no key.

        Raises:
            ValueError: If the shape is wrong, or a query would keep no key and ``allow_empty`` is False.
        """
        array = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask)
        if array.ndim == 2:
            array = array[None]
        if array.dtype != np.bool_ or array.ndim != 3 or array.shape[1] != array.shape[2]:
            raise ValueError(f"mask must be boolean of shape (H, N, N) or (N, N), got {array.dtype} {array.shape}")
        return cls._from_sorted_rows(
            array.sum(2).reshape(-1),
            array.nonzero()[2],
            stored_heads=array.shape[0],
            num_tokens=array.shape[1],
            num_heads=num_heads,
            prefix_tokens=prefix_tokens,
            allow_empty=allow_empty,
        )

    @classmethod
    def _from_sorted_rows(
        cls,
        counts: Int64Array,
        indices: Int64Array,
        *,
        stored_heads: int,
        num_tokens: int,
        num_heads: int | None,
        prefix_tokens: int,
        allow_empty: bool,
        relation: Int32Array | None = None,
        num_buckets: int = 0,
    ) -> "Pattern":
        num_heads = stored_heads if num_heads is None else num_heads
        check_sizes(num_heads, num_tokens, prefix_tokens)
        if stored_heads not in (1, num_heads):
            raise ValueError(f"the rows must be of one head or of num_heads={num_heads} heads, got {stored_heads}")
        if indices.size and not 0 <= indices.min() <= indices.max() < num_tokens:
            bad = indices[(indices < 0) | (indices >= num_tokens)][0]
            raise ValueError(f"keys must be in 0..{num_tokens - 1} (num_tokens={num_tokens}), got {bad}")
        if not allow_empty and not prefix_tokens and (counts == 0).any():
            row = int(np.flatnonzero(counts == 0)[0])
            _raise_empty(row % num_tokens, row // num_tokens, "give it a key, for example the token itself")
        if stored_heads > 1 and relation is None:
            per_head = counts.reshape(stored_heads, num_tokens)
            if (per_head == per_head[0]).all():
                by_head = indices.reshape(stored_heads, -1)
                if (by_head == by_head[0]).all():
                    counts, indices = per_head[0], by_head[0]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        content = starts.tobytes() + indices.tobytes() + (b"" if relation is None else relation.tobytes())
        buckets = "" if relation is None else f"{num_buckets} buckets, "
        body = f"{len(indices)} patch pairs, {buckets}sha256 {hashlib.sha256(content).hexdigest()[:32]}"
        key = _key("rows", num_heads, num_tokens, prefix_tokens, allow_empty, body)
        if (known := _interned.get(key)) is not None:
            return known
        starts.setflags(write=False)
        indices.setflags(write=False)
        if relation is not None:
            relation.setflags(write=False)
        rows = SparseRows(starts, indices)
        return cls._make(key, num_heads, num_tokens, prefix_tokens, None, rows, allow_empty, relation, num_buckets)

    @classmethod
    def _make(
        cls,
        key: str,
        num_heads: int,
        num_tokens: int,
        prefix_tokens: int,
        offsets: tuple[tuple[int, ...], ...] | None,
        row_form: SparseRows | None,
        allow_empty: bool,
        relation: Int32Array | None = None,
        num_buckets: int = 0,
    ) -> "Pattern":
        if offsets is not None:
            counts = [sum(num_tokens - abs(o) for o in head) for head in offsets]
        else:
            assert row_form is not None
            counts = np.diff(row_form.starts[::num_tokens]).tolist()
        pattern = object.__new__(cls)
        pattern.__dict__.update(
            stored_heads=len(counts),
            patch_counts=tuple(counts) * (num_heads // len(counts)),
            key=key,
            num_heads=num_heads,
            num_tokens=num_tokens,
            prefix_tokens=prefix_tokens,
            offsets=offsets,
            row_form=row_form,
            allow_empty=allow_empty,
            relation=relation,
            num_buckets=num_buckets,
        )
        return _interned.setdefault(key, pattern)

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """The pattern whose `key` is ``text``: any offset form, or a row form that is still in use.

        Raises:
            ValueError: If the text is not a pattern's key or names a row form that is not in memory.
        """
        if (known := _interned.get(text)) is not None:
            return known
        match = re.fullmatch(
            r"offsets\(heads=(\d+), tokens=(\d+), prefix=(\d+)(, allow_empty)?: ([-+. |\d]*)\)", text.strip()
        )
        if match is None:
            raise ValueError(f"not the text of an offset pattern, nor of a row pattern in memory: {text!r}")
        heads, tokens, prefix, allow_empty, body = match.groups()
        return cls.from_offsets(
            [_parse_head(head.strip()) for head in body.split("|")],
            int(tokens),
            num_heads=int(heads),
            prefix_tokens=int(prefix),
            allow_empty=allow_empty is not None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            self.key,
            self.num_heads,
            self.num_tokens,
            self.prefix_tokens,
            self.offsets,
            self.row_form,
            self.allow_empty,
            self.relation,
            self.num_buckets,
        )

    def __copy__(self) -> "Pattern":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pattern":
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Pattern.{self.key}"

    @property
    def sequence_length(self) -> int:
        """Number of tokens with the prefix tokens, T = P + N."""
        return self.prefix_tokens + self.num_tokens

    @property
    def nnz(self) -> int:
        """Number of kept pairs over all heads, prefix tokens included."""
        prefix_pairs = self.sequence_length**2 - self.num_tokens**2
        return sum(self.patch_counts) + self.num_heads * prefix_pairs

    @property
    def stored_pairs(self) -> int:
        """Number of kept pairs of the stored heads, prefix tokens included."""
        return self.nnz * self.stored_heads // self.num_heads

    @property
    def is_dense(self) -> bool:
        """Whether every pair is kept."""
        return self.nnz == self.num_heads * self.sequence_length**2

    def density(self, include_prefix: bool = True) -> float:
        """Kept pairs as a share of all pairs, over the whole sequence or over the patch tokens alone.

        Args:
            include_prefix: Count the pairs of prefix tokens.
        """
        if include_prefix:
            return self.nnz / (self.num_heads * self.sequence_length**2)
        return sum(self.patch_counts) / (self.num_heads * self.num_tokens**2)

    def macs(self, head_dim: int) -> int:
        """Multiply-accumulates of QK^T and AV over the kept pairs, for one image and one layer.

        Args:
            head_dim: Size of one head.
        """
        return 2 * self.nnz * head_dim

    def dense_macs(self, head_dim: int) -> int:
        """Multiply-accumulates of QK^T and AV over all pairs, for one image and one layer.

        Args:
            head_dim: Size of one head.
        """
        return 2 * self.num_heads * self.sequence_length**2 * head_dim

    @cached_property
    def rows(self) -> SparseRows:
        """Keys of each query over the whole sequence; row ``g * T + i`` is query ``i`` of stored head ``g``."""
        counts, patch_keys = self._patch_rows()
        prefix, length, heads = self.prefix_tokens, self.sequence_length, self.stored_heads
        if not prefix:
            starts = np.concatenate([[0], np.cumsum(counts)])
            return SparseRows(starts.astype(np.int64), patch_keys)
        full_counts = np.full((heads, length), length, dtype=np.int64)
        full_counts[:, prefix:] = counts.reshape(heads, -1) + prefix
        starts = np.concatenate([[0], np.cumsum(full_counts.reshape(-1))]).astype(np.int64)
        row_of_entry = np.repeat(np.arange(heads * length), full_counts.reshape(-1))
        position = np.arange(starts[-1]) - starts[row_of_entry]
        is_patch_pair = (row_of_entry % length >= prefix) & (position >= prefix)
        indices = position
        indices[is_patch_pair] = patch_keys + prefix
        return SparseRows(starts, indices)

    @cached_property
    def columns(self) -> SparseRows:
        """Queries of each key: the transposed `rows`, with the position of each entry in the row-major order."""
        return self.rows.transposed(self.sequence_length)

    def _patch_rows(self) -> tuple[Int64Array, Int64Array]:
        """Number of keys of each patch query, and the keys, without the prefix tokens."""
        if self.row_form is not None:
            return np.diff(self.row_form.starts), self.row_form.indices
        assert self.offsets is not None
        queries = np.arange(self.num_tokens)[:, None]
        counts, keys = [], []
        for head in self.offsets:
            candidates = queries + np.array(head, dtype=np.int64)[None]
            inside = (candidates >= 0) & (candidates < self.num_tokens)
            counts.append(inside.sum(1))
            keys.append(candidates[inside])
        return np.concatenate(counts), np.concatenate(keys)

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Stored head, query and key of each kept pair, three ``(pairs,)`` tensors in row-major order.

        The pair operations and ``return_weights`` use this order. For a pattern that is the same in all heads the
        pairs of one head are given.
        """
        rows, length = self.rows, self.sequence_length
        row = np.repeat(np.arange(len(rows.starts) - 1), np.diff(rows.starts))
        return torch.from_numpy(row // length), torch.from_numpy(row % length), torch.from_numpy(rows.indices.copy())

    def mask(self, device: torch.device | str | None = None) -> Tensor:
        """Boolean mask ``(H, T, T)``, True where a pair is kept. For small sequences: it has T^2 entries per head."""
        return self._stored_mask.to(device).expand(self.num_heads, -1, -1)

    @cached_property
    def _stored_mask(self) -> Tensor:
        length = self.sequence_length
        if self.stored_heads * length**2 > 2**31:
            raise ValueError(f"mask() of {self.stored_heads} heads and {length} tokens would need over 2 GiB")
        with torch.inference_mode(False):  # a mask made in inference mode could not be used in training later
            mask = torch.zeros(self.stored_heads, length, length, dtype=torch.bool)
            mask[self.pairs()] = True
        return mask

    def with_relation(self, relation: Sequence[int] | NDArray[np.integer] | Tensor, num_buckets: int) -> "Pattern":
        """The same pairs, each patch pair with a bucket of a table of relative biases; in row form.

        `sparse_attention` then takes the table ``(H, num_buckets)`` as its ``bias``. Pairs of prefix tokens get none.

        Args:
            relation: ``(patch pairs,)`` bucket of each patch pair: stored head by stored head, query by query, keys
                ascending.
            num_buckets: Number of buckets.

        Raises:
            ValueError: If the length or a bucket is out of range.
        """
        counts, keys = self._patch_rows()
        buckets = np.asarray(relation.cpu() if isinstance(relation, Tensor) else relation)
        if buckets.size and buckets.dtype.kind not in "iu":
            raise ValueError(f"relation must hold whole numbers, got {buckets.dtype}")
        if buckets.shape != keys.shape:
            raise ValueError(f"relation must hold one bucket per patch pair ({len(keys)}), got shape {buckets.shape}")
        if buckets.size and not 0 <= buckets.min() <= buckets.max() < num_buckets:
            raise ValueError(
                f"relation must be in 0..{num_buckets - 1} (num_buckets={num_buckets}), "
                f"got {buckets.min()}..{buckets.max()}"
            )
        return Pattern._from_sorted_rows(
            counts,
            keys,
            stored_heads=self.stored_heads,
            num_tokens=self.num_tokens,
            num_heads=self.num_heads,
            prefix_tokens=self.prefix_tokens,
            allow_empty=self.allow_empty,
            relation=np.array(buckets, dtype=np.int32),
            num_buckets=num_buckets,
        )

    def _refuse_relation(self, what: str) -> None:
        if self.relation is not None:
            raise ValueError(f"{what} of a pattern with a relation is not defined; make it before with_relation")

    def union(self) -> "Pattern":
        """The pattern, the same in all heads, that keeps each pair that some head keeps.

        Raises:
            ValueError: If the pattern differs between heads and has a relation.
        """
        return self if self.stored_heads == 1 else self._union

    @cached_property
    def _union(self) -> "Pattern":
        self._refuse_relation("the union")
        if self.offsets is not None:
            return self._like_offsets([{o for head in self.offsets for o in head}])
        head, query, key = self._patch_pairs()
        return self._like_rows(np.zeros_like(head), query, key, 1)

    def __or__(self, other: "Pattern") -> "Pattern":
        """The pattern that keeps, in each head, the pairs that one of the two keeps."""
        mine = (self.num_heads, self.num_tokens, self.prefix_tokens)
        theirs = (other.num_heads, other.num_tokens, other.prefix_tokens)
        if mine != theirs:
            raise ValueError(f"patterns must agree in (heads, tokens, prefix tokens) to be united: {mine} and {theirs}")
        self._refuse_relation("the union")
        other._refuse_relation("the union")
        heads = max(self.stored_heads, other.stored_heads)
        if self.offsets is not None and other.offsets is not None:
            left, right = self.offsets * (heads // len(self.offsets)), other.offsets * (heads // len(other.offsets))
            return self._like_offsets([set(a) | set(b) for a, b in zip(left, right, strict=True)])
        parts = []
        for pattern in (self, other):
            head, query, key = pattern._patch_pairs()
            repeat = heads // pattern.stored_heads
            head = np.concatenate([head + r for r in range(repeat)])
            parts.append((head, np.tile(query, repeat), np.tile(key, repeat)))
        head, query, key = (np.concatenate(p) for p in zip(*parts, strict=True))
        return self._like_rows(head, query, key, heads)

    def permute_heads(self, order: Sequence[int]) -> "Pattern":
        """The pattern whose head ``s`` is head ``order[s]`` of this one.

        Args:
            order: A permutation of ``range(num_heads)``.
        """
        if sorted(order) != list(range(self.num_heads)):
            raise ValueError(f"order must be a permutation of 0..{self.num_heads - 1}, got {list(order)}")
        if self.stored_heads == 1:
            return self
        self._refuse_relation("a permutation of the heads")
        if self.offsets is not None:
            return self._like_offsets([self.offsets[h] for h in order])
        head, query, key = self._patch_pairs()
        return self._like_rows(np.argsort(np.asarray(order))[head], query, key, self.num_heads)

    def _patch_pairs(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        counts, keys = self._patch_rows()
        row = np.repeat(np.arange(len(counts)), counts)
        return row // self.num_tokens, row % self.num_tokens, keys

    def _like_offsets(self, offsets: Sequence[Iterable[int]]) -> "Pattern":
        return Pattern.from_offsets(
            offsets,
            self.num_tokens,
            num_heads=self.num_heads,
            prefix_tokens=self.prefix_tokens,
            allow_empty=self.allow_empty,
        )

    def _like_rows(self, head: Int64Array, query: Int64Array, key: Int64Array, heads: int) -> "Pattern":
        return pattern_from_pairs(
            head,
            query,
            key,
            num_tokens=self.num_tokens,
            stored_heads=heads,
            num_heads=self.num_heads,
            prefix_tokens=self.prefix_tokens,
            allow_empty=self.allow_empty,
        )


def pattern_from_pairs(
    head: Int64Array,
    query: Int64Array,
    key: Int64Array,
    *,
    num_tokens: int,
    stored_heads: int,
    num_heads: int,
    prefix_tokens: int,
    allow_empty: bool = False,
) -> Pattern:
    """Row-form pattern from patch pairs in any order; repeated pairs count once."""
    # Ten times as fast as np.unique, which hashes.
    flat = np.sort((head * num_tokens + query) * num_tokens + key, kind="stable")
    flat = flat[np.concatenate([[True], flat[1:] != flat[:-1]])] if len(flat) else flat
    return Pattern._from_sorted_rows(
        np.bincount(flat // num_tokens, minlength=stored_heads * num_tokens),
        flat % num_tokens,
        stored_heads=stored_heads,
        num_tokens=num_tokens,
        num_heads=num_heads,
        prefix_tokens=prefix_tokens,
        allow_empty=allow_empty,
    )


def _rebuild(key: str, *state: Any) -> Pattern:
    return _interned.get(key) or Pattern._make(key, *state)


def check_sizes(num_heads: int, num_tokens: int, prefix_tokens: int) -> None:
    """Raise ValueError for a number that is not whole or too small."""
    for name, value, least in (
        ("num_heads", num_heads, 1),
        ("num_tokens", num_tokens, 1),
        ("prefix_tokens", prefix_tokens, 0),
    ):
        if not isinstance(value, int | np.integer):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _raise_empty(query: int, head: int, fix: str) -> None:
    raise ValueError(f"query {query} of head {head} would keep no key; {fix}, or pass allow_empty=True")


def _key(kind: str, num_heads: int, num_tokens: int, prefix_tokens: int, allow_empty: bool, body: str) -> str:
    empty = ", allow_empty" if allow_empty else ""
    return f"{kind}(heads={num_heads}, tokens={num_tokens}, prefix={prefix_tokens}{empty}: {body})"
