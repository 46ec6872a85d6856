"""Attention that no fixed pattern describes: top-k, Linformer and efficient attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fibottention.ops.eager import cast_for_autocast, full_precision

__all__ = ["EfficientAttentionOp", "LinformerOp", "TopKOp"]


class TopKOp(nn.Module):
    """Each query attends to the keys with its ``k`` largest scores; prefix tokens are tokens like the others.

    Exact, hence all scores are computed, and the sum over the values is a dense product, which repeats bit for bit.
    Among equal scores, those that ``torch.topk`` takes are kept.

    Args:
        k: Keys per query; all if there are fewer.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float, dropout_p: float
    ) -> Tensor:
        """Attend; ``(B, H, N, D)``, with a dense bias or None."""
        q, k, v = cast_for_autocast(q, k, v)
        weights = F.dropout(_largest_weights(q, k, bias, scale, self.k), dropout_p)
        return weights.to(v.dtype) @ v


@full_precision
def _largest_weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, count: int) -> Tensor:
    """Weights ``(B, H, N, N)`` of the largest scores, from products in float32 or better."""
    exact = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = (q.to(exact) * scale) @ k.to(exact).mT
    if bias is not None:
        scores = scores + _by_batch(bias, len(q)).to(exact)
    largest, keys = scores.topk(min(count, scores.shape[-1]), -1)
    dead = largest[..., :1].isneginf()  # a query whose keys are all masked gets zeros
    weights = largest.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return torch.zeros_like(scores).scatter(-1, keys, weights)


class LinformerOp(nn.Module):
    """Keys and values projected along the tokens to ``projection`` summaries, which all queries attend to.

    Source: arXiv 2006.04768, with the projections shared by the heads of a layer.

    Args:
        projection: Number of summaries.
        sequence_length: Number of tokens, prefix tokens included; no other number can be taken.
    """

    def __init__(self, projection: int, sequence_length: int) -> None:
        super().__init__()
        self.key_projection = nn.Parameter(torch.empty(projection, sequence_length))
        self.value_projection = nn.Parameter(torch.empty(projection, sequence_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections so that summaries of independent keys vary as much as a key does."""
        for weight in (self.key_projection, self.value_projection):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float, dropout_p: float
    ) -> Tensor:
        """Attend; ``(B, H, N, D)``."""
        _refuse_bias("linformer", bias)
        length = self.key_projection.shape[1]
        if k.shape[2] != length:
            raise ValueError(f"linformer was made for {length} tokens, prefix tokens included, got {k.shape[2]}")
        q, k, v = cast_for_autocast(q, k, v)
        keys, values = self.key_projection.to(k.dtype) @ k, self.value_projection.to(v.dtype) @ v
        return F.scaled_dot_product_attention(q, keys, values, dropout_p=dropout_p, scale=scale)


class EfficientAttentionOp(nn.Module):
    """Softmax of each query over its channels and of each channel of the keys over the tokens; linear in the tokens.

    Scores are not scaled, as in the paper. Source: arXiv 1812.01243, with softmax normalization.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float, dropout_p: float
    ) -> Tensor:
        """Attend; ``(B, H, N, D)``."""
        _refuse_bias("efficient_attention", bias)
        if dropout_p:
            raise ValueError(f"efficient_attention has no weights to drop: it needs a dropout of 0, got {dropout_p}")
        q, k, v = cast_for_autocast(q, k, v)
        context = k.softmax(2).mT @ v
        return q.softmax(-1) @ context


def _refuse_bias(name: str, bias: Tensor | None) -> None:
    if bias is not None:
        raise ValueError(f"{name} has no scores of pairs, so it takes no bias or mask")


def _by_batch(bias: Tensor, batch: int) -> Tensor:
    """A bias for as many sequences as there are, repeated along the batch as for shift masks of windows."""
    return bias if bias.shape[0] in (1, batch) else bias.repeat(batch // bias.shape[0], 1, 1, 1)
