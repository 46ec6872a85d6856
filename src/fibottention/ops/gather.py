"""Sparse attention in plain PyTorch from the pair operations: any device, memory O(pairs)."""

import torch
from torch import Tensor

from fibottention.ops import export
from fibottention.ops.arguments import AttentionCall, WeightTransform
from fibottention.ops.constants import cached_on_device, pair_indices
from fibottention.ops.eager import refuse_forward_mode
from fibottention.ops.pairs import pair_dot, pair_softmax, pair_sum, row_blocks
from fibottention.patterns.pattern import Pattern

__all__ = ["apply_weights", "attention", "attention_and_log_sum", "transform_weights"]


def attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Attention over just the kept pairs, and the kept weights if asked for."""
    if torch.onnx.is_in_onnx_export():
        return export.attention(call), None
    pattern = call.pattern
    weights, outside = pair_softmax(_scores(call), pattern.key, call.zero_fill)
    if call.transform is not None:
        weights = transform_weights(weights, call.transform, pattern)
    weights = call.dropout(weights)
    out = apply_weights(weights, outside if call.zero_fill else None, call.v, pattern)
    return out, weights if call.return_weights else None


def _scores(call: AttentionCall) -> Tensor:
    """Scaled scores with bias of the kept pairs, ``(B, G, pairs)``."""
    refuse_forward_mode("gather", call.q, call.k, call.v, call.bias)
    scores = pair_dot(call.q, call.k, call.pattern.key) * call.scale
    bias = call.pair_bias()
    return scores if bias is None else scores + bias.to(scores.dtype)


def attention_and_log_sum(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of exponentials of each query's scores ``(B, H, T)``."""
    pattern, scores = call.pattern, _scores(call)
    weights, _ = pair_softmax(scores, pattern.key, False)
    out = apply_weights(call.dropout(weights), None, call.v, pattern)
    return out, _log_sums(scores, pattern)


def _log_sums(scores: Tensor, pattern: Pattern) -> Tensor:
    flat = scores.flatten(0, 1)
    log_sums = flat.new_full((flat.shape[0], pattern.stored_heads * pattern.sequence_length), float("-inf"))
    for block in row_blocks(pattern, scores.device):
        logits = flat[:, block.pairs]
        # A row without a finite score has the sum 0, and no gradient where logsumexp would give NaN.
        dead = logits.isneginf().all(-1)
        sums = logits.masked_fill(dead.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(dead, float("-inf"))
        log_sums = log_sums.index_copy(1, block.rows, sums)
    return log_sums.view(scores.shape[0], pattern.num_heads, pattern.sequence_length)


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
