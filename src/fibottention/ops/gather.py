"""Sparse attention in plain PyTorch from the pair operations: any device, memory O(pairs)."""

import torch
from torch import Tensor

from fibottention.ops.arguments import AttentionCall, WeightTransform
from fibottention.ops.constants import cached_on_device, pair_indices
from fibottention.ops.eager import refuse_forward_mode
from fibottention.ops.pairs import pair_dot, pair_softmax, pair_sum, row_blocks
from fibottention.patterns.pattern import Pattern

__all__ = ["apply_weights", "attention", "transform_weights"]


def attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Attention over just the kept pairs, and the kept weights if asked for."""
    pattern = call.pattern
    refuse_forward_mode("gather", call.q, call.k, call.v, call.bias)
    scores = pair_dot(call.q, call.k, pattern.key) * call.scale
    bias = call.pair_bias()
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    weights, outside = pair_softmax(scores, pattern.key, call.zero_fill)
    if call.transform is not None:
        weights = transform_weights(weights, call.transform, pattern)
    weights = call.dropout(weights)
    out = apply_weights(weights, outside if call.zero_fill else None, call.v, pattern)
    return out, weights if call.return_weights else None


def apply_weights(weights: Tensor, outside: Tensor | None, v: Tensor, pattern: Pattern) -> Tensor:
    """Weighted sum of values, where ``outside`` is the weight of every pair that is not kept."""
    if outside is None:
        return pair_sum(weights, v, pattern.key)
    # sum_kept w v + sum_others r v = sum_kept (w - r) v + r sum_all v
    batch, heads, length = outside.shape
    head, query, _ = pair_indices(pattern, v.device)
    if pattern.stored_heads == 1:
        per_pair = outside[:, :, query]
    else:
        per_pair = outside.reshape(batch, 1, heads * length)[:, :, head * length + query]
    total = v.to(outside.dtype).sum(2, keepdim=True)
    kept = pair_sum(weights - per_pair, v, pattern.key)
    return (kept + outside.unsqueeze(-1) * total).to(v.dtype)


def transform_weights(weights: Tensor, transform: WeightTransform, pattern: Pattern) -> Tensor:
    """Apply a row-wise transform to pair weights, one block of equally long rows at a time."""
    blocks = row_blocks(pattern, weights.device)
    if not blocks:
        return weights
    parts = [
        transform(weights[..., block.pairs.reshape(-1)].unflatten(-1, tuple(block.pairs.shape))).flatten(-2)
        for block in blocks
    ]
    order = cached_on_device(
        pattern,
        "order_of_blocks",
        weights.device,
        lambda device: torch.cat([block.pairs.reshape(-1) for block in blocks]).argsort(),
    )
    return torch.cat(parts, -1)[..., order]
