"""Sparse attention in PyTorch's own operations, for exporters that know no others (ONNX)."""

import numpy as np
import torch
from torch import Tensor

from fibottention.ops.arguments import AttentionCall
from fibottention.ops.layout import sum_dtype
from fibottention.ops.pairs import row_blocks

__all__ = ["attention"]


def attention(call: AttentionCall) -> Tensor:
    """The form of ``gather``, keys and values gathered for all queries at once: memory O(pairs x D).

    Raises:
        ValueError: If the call asks for what has no such form.
    """
    if call.zero_fill or call.return_weights:
        raise ValueError("fill='zero' and return_weights=True cannot be exported to ONNX")
    pattern, dtype = call.pattern, sum_dtype(call.q)
    batch, heads, length, _ = call.q.shape
    stored = pattern.stored_heads
    q, k, v = (t.reshape(batch * heads // stored, stored * length, -1).to(dtype) for t in (call.q, call.k, call.v))
    bias = call.pair_bias()
    if bias is not None:
        bias = bias.expand(batch, heads // stored, -1).reshape(len(q), -1).to(dtype)
    if pattern.is_dense:
        scores = q.unflatten(1, (stored, length)) @ k.unflatten(1, (stored, length)).mT * call.scale
        if bias is not None:
            scores = scores + bias.view(scores.shape)
        out = _weights(call, scores) @ v.unflatten(1, (stored, length))
        return out.reshape(batch, heads, length, -1).to(call.q.dtype)
    counts = np.diff(pattern.rows.starts)
    if not counts.all():
        raise ValueError("a pattern with queries that keep no key cannot be exported to ONNX")
    parts = []
    for block in row_blocks(pattern, q.device):
        others, shape = block.others.reshape(-1), block.others.shape
        keys, values = (t.index_select(1, others).unflatten(1, shape) for t in (k, v))
        scores = (keys @ q.index_select(1, block.rows).unsqueeze(-1)).squeeze(-1) * call.scale
        if bias is not None:
            scores = scores + bias.index_select(1, block.pairs.reshape(-1)).unflatten(1, shape)
        parts.append((_weights(call, scores).unsqueeze(-2) @ values).squeeze(-2))
    # The blocks hold the rows by their number of keys.
    place = torch.from_numpy(np.argsort(np.argsort(counts, kind="stable"))).to(q.device)
    out = torch.cat(parts, 1).index_select(1, place)
    return out.reshape(batch, heads, length, -1).to(call.q.dtype)


def _weights(call: AttentionCall, scores: Tensor) -> Tensor:
    if call.bias is None:
        weights = scores.softmax(-1)
    else:  # where the bias masks a whole row, it has no weights, where softmax gives NaN
        dead = scores.isneginf().all(-1, keepdim=True)
        weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return call.dropout(weights if call.transform is None else call.transform(weights))
