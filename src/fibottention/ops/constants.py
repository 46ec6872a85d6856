"""Index tensors and masks of a pattern on a device: cached in eager mode, an opaque operation in compiled graphs."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fibottention.patterns.pattern import Pattern

__all__ = ["cached_on_device", "kept_of_union", "pair_indices", "pair_relation", "parse_for_graph", "pattern_mask"]

Made = TypeVar("Made")

# A compiled or exported graph knows a pattern only by its text, so what it uses must stay alive.
_kept_for_graphs: dict[str, Pattern] = {}


def _in_graph() -> bool:
    """Whether constants must be operators of a graph that is being made. ONNX has no such operators."""
    return torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export()


def parse_for_graph(pattern: str) -> Pattern:
    """The pattern of a text form, kept alive from now on."""
    return _kept_for_graphs.setdefault(pattern, Pattern.parse(pattern))


def pattern_mask(pattern: Pattern, device: torch.device) -> Tensor:
    """The boolean mask ``(H, T, T)`` on a device."""
    if _in_graph():
        return _mask_for_graph(pattern.key, device)
    return cached_on_device(pattern, "mask", device, pattern.mask)


def pair_indices(pattern: Pattern, device: torch.device) -> Tensor:
    """Stored head, query and key of each kept pair, ``(3, pairs)``, on a device."""
    if _in_graph():
        return _indices_for_graph(pattern.key, device)
    return cached_on_device(pattern, "pairs", device, lambda device: torch.stack(pattern.pairs()).to(device))


def pair_relation(pattern: Pattern, device: torch.device) -> Tensor:
    """Bucket of each kept pair, ``(pairs,)``, on a device; ``num_buckets`` for the pairs of prefix tokens."""
    if _in_graph():
        return _relation_for_graph(pattern.key, device)

    def make(device: torch.device) -> Tensor:
        assert pattern.relation is not None
        _, query, key = pattern.pairs()
        bucket = torch.full(query.shape, pattern.num_buckets, device="cpu")
        prefix = pattern.prefix_tokens
        bucket[(query >= prefix) & (key >= prefix)] = torch.from_numpy(pattern.relation.astype("int64"))
        return bucket.to(device)

    return cached_on_device(pattern, "relation", device, make)


def kept_of_union(pattern: Pattern, device: torch.device) -> Tensor:
    """Which pairs of ``pattern.union()`` each head keeps, ``(H, pairs)``, on a device."""
    if _in_graph():
        return _kept_for_graph(pattern.key, device)

    def make(device: torch.device) -> Tensor:
        length = pattern.sequence_length
        _, query, key = pair_indices(pattern.union(), device)
        head, own_query, own_key = pair_indices(pattern, device)
        position = torch.searchsorted(query * length + key, own_query * length + own_key)
        kept = torch.zeros(pattern.num_heads, query.numel(), dtype=torch.bool, device=device)
        kept[head, position] = True
        return kept

    return cached_on_device(pattern, "kept_of_union", device, make)


def cached_on_device(pattern: Pattern, name: str, device: torch.device, make: Callable[[torch.device], Made]) -> Made:
    """What ``make`` makes of a pattern on a device, made once and kept as long as the pattern."""
    if is_in_torch_dispatch_mode():  # what a mode makes, such as fake tensors, is of no use to others
        return make(device)
    cache = pattern.__dict__.setdefault("_on_device", {})
    if (name, device) not in cache:
        # What is made in inference mode could not be used in training later.
        with torch.inference_mode(False):
            cache[name, device] = make(device)
    return cache[name, device]


@torch.library.custom_op("fibottention::pattern_mask", mutates_args=())
def _mask_for_graph(pattern: str, device: torch.device) -> Tensor:
    return pattern_mask(Pattern.parse(pattern), device).clone()


@torch.library.custom_op("fibottention::pair_indices", mutates_args=())
def _indices_for_graph(pattern: str, device: torch.device) -> Tensor:
    return pair_indices(Pattern.parse(pattern), device).clone()


@torch.library.custom_op("fibottention::pair_relation", mutates_args=())
def _relation_for_graph(pattern: str, device: torch.device) -> Tensor:
    return pair_relation(Pattern.parse(pattern), device).clone()


@_relation_for_graph.register_fake
def _(pattern: str, device: torch.device) -> Tensor:
    known = parse_for_graph(pattern)
    return torch.empty(known.stored_pairs, dtype=torch.int64, device=device)


@torch.library.custom_op("fibottention::kept_of_union", mutates_args=())
def _kept_for_graph(pattern: str, device: torch.device) -> Tensor:
    return kept_of_union(Pattern.parse(pattern), device).clone()


@_kept_for_graph.register_fake
def _(pattern: str, device: torch.device) -> Tensor:
    known = parse_for_graph(pattern)
    pairs = known.union().nnz // known.num_heads
    return torch.empty((known.num_heads, pairs), dtype=torch.bool, device=device)


@_mask_for_graph.register_fake
def _(pattern: str, device: torch.device) -> Tensor:
    known = parse_for_graph(pattern)
    shape = (known.num_heads, known.sequence_length, known.sequence_length)
    return torch.empty(shape, dtype=torch.bool, device=device)


@_indices_for_graph.register_fake
def _(pattern: str, device: torch.device) -> Tensor:
    known = parse_for_graph(pattern)
    return torch.empty((3, known.stored_pairs), dtype=torch.int64, device=device)
