"""Attention rollout: from where a model's prediction gets its information, and pictures of it on the images."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from fibottention.analysis.attention_maps import AttentionMap, CapturedLayer, captured_attention, patch_grid
from fibottention.ops.constants import pair_indices
from fibottention.ops.pairs import pair_sum, pair_sum_transposed

__all__ = ["attention_rollout", "draw_attention_maps"]


@torch.no_grad()
def attention_rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Attention rolled out through all layers, from the output back to the patches.

    Half of each layer's output is its input (the residual connection), the other half what its heads attend to on
    average. Weights are taken before any transform, so that rows sum to 1. Over the kept pairs only.

    Source: Abnar and Zuidema, arXiv 2005.00928.

    Args:
        model: A model of timm or transformers, made sparse or not, whose layers all attend over the same tokens.
        images: ``(B, C, H, W)``, normalized.

    Returns:
        ``(B, N)``: how much the first prefix token gets from each patch; without prefix tokens, their mean.

    Raises:
        ValueError: If the model is not one that `sparsify` supports, or its layers attend over different tokens.
    """
    layers = captured_attention(model, images, lambda layer: layer)
    for layer in layers:
        if not layer.module.spec.has_pattern:
            raise ValueError(f"attention_rollout needs weights of pairs, which {layer.module.spec.name} has not")
    sizes = {(layer.q.shape[2], layer.module.prefix_tokens) for layer in layers}
    if len(sizes) != 1:
        raise ValueError(f"attention_rollout needs layers that attend over the same tokens, got {sorted(sizes)}")
    ((length, prefix),) = sizes
    flow = torch.zeros(len(images), length, dtype=torch.float64, device=layers[0].q.device)
    if prefix:
        flow[:, 0] = 1.0
    else:
        flow += 1 / length
    for layer in reversed(layers):
        flow = 0.5 * flow + 0.5 * _backwards(layer, flow)
    return flow[:, prefix:]


def _backwards(layer: CapturedLayer, flow: Tensor) -> Tensor:
    """What flows to each key, ``(B, T)``, when so much comes to each query; mean over heads."""
    pattern, weights = layer.module.pattern(layer.q.shape[2]), layer.weights().double()
    heads, length = pattern.num_heads, pattern.sequence_length
    of_queries = flow[:, None, :, None].expand(-1, heads, -1, 1)
    if layer.module.spec.fill != "zero":
        return pair_sum_transposed(weights, of_queries, pattern.key).squeeze(-1).mean(1)
    ones = torch.ones_like(of_queries)
    count = pair_sum(torch.ones_like(weights), ones, pattern.key)
    rest = (1 - pair_sum(weights, ones, pattern.key)) / (length - count).clamp(min=1)  # (B, H, T, 1)
    head, query, _ = pair_indices(pattern, weights.device)
    per_pair = rest[:, :, query, 0] if pattern.stored_heads == 1 else rest[:, head, query, 0].unsqueeze(1)
    kept = pair_sum_transposed(weights - per_pair, of_queries, pattern.key).squeeze(-1)
    return (kept + (rest.squeeze(-1) * flow[:, None]).sum(-1, keepdim=True)).mean(1)


def draw_attention_maps(
    pictures: Sequence[NDArray[np.float64]], layer: AttentionMap, rollout: Tensor | None, most_heads: int = 12
) -> Figure:
    """The maps of a layer's heads and the rollout, laid over the images, each map on its own scale.

    Args:
        pictures: Images ``(H, W)`` or ``(H, W, 3)`` in [0, 1], as the model sees them.
        layer: The maps of one layer.
        rollout: ``(B, N)``; left out if None.
        most_heads: Heads drawn.

    Raises:
        ValueError: If the patches form no grid on the images.
    """
    rows, across = patch_grid(layer.values.shape[-1], pictures[0].shape[:2])
    heads = min(most_heads, layer.values.shape[1])
    columns = 1 + heads + (rollout is not None)
    figure = Figure(figsize=(1.15 * columns + 0.2, 1.2 * len(pictures) + 0.4), layout="constrained")
    panels = figure.subplots(len(pictures), columns, squeeze=False)
    titles = ["image", *(f"head {head + 1}" for head in range(heads)), *(["rollout"] if rollout is not None else [])]
    for line, picture in enumerate(pictures):
        maps = [layer.values[line, head] for head in range(heads)]
        if rollout is not None:
            maps.append(rollout[line])
        grey = picture if picture.ndim == 2 else picture.mean(-1)
        for column, panel in enumerate(panels[line]):
            panel.set_xticks([])
            panel.set_yticks([])
            if line == 0:
                panel.set_title(titles[column], fontsize=8)
            if column == 0:
                panel.imshow(picture, cmap="gray", vmin=0, vmax=1)
                continue
            values = maps[column - 1].reshape(rows, across).double().cpu().numpy()
            values = (values - values.min()) / max(values.max() - values.min(), 1e-12)
            panel.imshow(grey, cmap="gray", vmin=0, vmax=1, extent=(0, across, rows, 0))
            colours = colormaps["inferno"](values)
            colours[..., 3] = 0.25 + 0.6 * values
            panel.imshow(colours, extent=(0, across, rows, 0), interpolation="bilinear")
    return figure
