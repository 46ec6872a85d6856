"""Accumulated trivial attention: how much of each query's attention goes to keys that hardly matter.

Source: arXiv 2210.12333, figure 1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fibottention.analysis.attention_maps import CapturedLayer, captured_attention
from fibottention.ops.pairs import row_blocks

__all__ = ["TrivialAttention", "draw_trivial_attention", "trivial_attention"]


@dataclass(frozen=True)
class TrivialAttention:
    """The trivial attention of one layer, before any transform of its weights.

    Attributes:
        layer: Name of the layer.
        weights: All kept weights of all heads and queries, in no order.
        sums: Sum of the trivial weights of each query and head.
        share: Trivial weights as a share of the kept ones.
    """

    layer: str
    weights: Tensor
    sums: Tensor
    share: float


@torch.no_grad()
def trivial_attention(model: nn.Module, images: Tensor, threshold: float = 0.1) -> list[TrivialAttention]:
    """The weights and the sums of the trivial ones, for the layers of `attention_maps`.

    A weight is trivial if it is at most ``threshold`` times the largest one of its query.

    Args:
        model: A model of timm or transformers, made sparse or not. It is not changed.
        images: ``(B, C, H, W)``, normalized.
        threshold: The threshold, in [0, 1].

    Raises:
        ValueError: If the model is not one that `sparsify` supports, or the threshold is out of range.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}")
    return captured_attention(model, images, lambda layer: _of_layer(layer, threshold))


def _of_layer(layer: CapturedLayer, threshold: float) -> TrivialAttention:
    weights = layer.weights()
    sums, trivial = [], 0
    for block in row_blocks(layer.module.pattern(layer.q.shape[2]), weights.device):
        rows = weights[..., block.pairs]
        is_trivial = rows <= threshold * rows.amax(-1, keepdim=True)
        sums.append(rows.masked_fill(~is_trivial, 0.0).sum(-1).flatten())
        trivial += int(is_trivial.sum())
    return TrivialAttention(layer.name, weights.flatten(), torch.cat(sums), trivial / weights.numel())


def draw_trivial_attention(layers: list[TrivialAttention], threshold: float = 0.1) -> Figure:
    """One panel per layer: the weights, and above them the sums of the trivial ones of a query.

    Args:
        layers: What `trivial_attention` gives.
        threshold: The threshold that was given to it.
    """
    columns = min(4, len(layers))
    lines = -(-len(layers) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.4, 2.1 * lines + 0.7), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    bins = np.logspace(-5, 0, 51)
    for panel, layer in zip(panels, layers, strict=False):
        for values, label in ((layer.weights, "weights"), (layer.sums, "sum of the trivial ones")):
            # Per cent of all, but what is too small for the axis (sums of queries without any) is not seen.
            seen = values[values >= bins[0]].double().cpu().numpy()
            panel.hist(seen, bins, weights=np.full(seen.shape, 100 / len(values)), alpha=0.6, label=label)
        panel.set_xscale("log")
        panel.set_title(f"{layer.layer}: {layer.share:.0%} trivial", fontsize=8)
        panel.tick_params(labelsize=7)
    for panel in panels[len(layers) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.supylabel("per cent", fontsize=8)
    figure.suptitle(f"trivial: at most {threshold:g} of the largest weight of the query", fontsize=9)
    return figure
