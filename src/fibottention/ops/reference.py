"""The dense form of sparse attention: obvious, any device, O(N^2) memory. The oracle of the tests."""

import torch
from torch import Tensor

from fibottention.ops.arguments import AttentionCall
from fibottention.ops.constants import pattern_mask

__all__ = ["attention"]


def attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Masked softmax attention over all pairs, and the kept weights if asked for."""
    q, k, v = (t if t.dtype == torch.float64 else t.float() for t in (call.q, call.k, call.v))
    mask = pattern_mask(call.pattern, q.device)
    scores = q @ k.transpose(-2, -1) * call.scale
    bias = call.dense_bias()
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    scores = scores.masked_fill(~mask, 0.0 if call.zero_fill else float("-inf"))
    # A row without a finite score has no weights at all, where softmax would give NaN.
    dead = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    if call.transform is not None:
        weights = call.transform(weights)
    weights = call.dropout(weights)
    out = (weights @ v).to(call.q.dtype)
    return out, call.pattern_weights(weights) if call.return_weights else None
