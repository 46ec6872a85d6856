"""PyTorch's scaled_dot_product_attention with the pattern as a mask: the fastest form where most pairs are kept."""

import torch.nn.functional as F
from torch import Tensor

from fibottention.ops.arguments import AttentionCall
from fibottention.ops.constants import pattern_mask

__all__ = ["attention", "unsupported"]


def unsupported(call: AttentionCall) -> str | None:
    """Why this backend cannot serve the call, or None."""
    if call.zero_fill and not call.pattern.is_dense:
        return "it has no fill='zero'"
    if call.transform is not None:
        return "it has no transform"
    if call.return_weights:
        return "it does not return weights"
    if call.pattern.allow_empty:
        return "it gives NaN for queries without a key, which the pattern allows"
    return None


def attention(call: AttentionCall) -> tuple[Tensor, None]:
    """Fused dense attention under the pattern's mask; without a mask if all pairs are kept."""
    mask = call.dense_bias()
    if mask is not None:
        mask = mask.to(call.q.dtype)
    if not call.pattern.is_dense:
        allowed = pattern_mask(call.pattern, call.q.device)
        mask = allowed if mask is None else mask.masked_fill(~allowed, float("-inf"))
    out = F.scaled_dot_product_attention(
        call.q, call.k, call.v, attn_mask=mask, dropout_p=call.dropout_p, scale=call.scale
    )
    return out, None
