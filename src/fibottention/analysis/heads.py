"""How much the heads of a layer differ: distances and similarity of their outputs, entropy of their weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fibottention.analysis.attention_maps import CapturedLayer, captured_attention, check_images
from fibottention.analysis.colours import COLOURS
from fibottention.ops.pairs import row_blocks

__all__ = ["HeadStatistics", "draw_diversity", "draw_head_statistics", "head_statistics"]


@dataclass(frozen=True)
class HeadStatistics:
    """The heads of one layer on some images.

    Attributes:
        layer: Path of the layer in the model.
        diversity: ``(B,)``: of each image, the mean over unordered pairs of heads of the Frobenius norm of the
            difference of their outputs (arXiv 2406.19391).
        similarity: ``(H, H)``: linear centred kernel alignment of the outputs over all tokens and images, in [0, 1].
        entropy: ``(H,)``: mean entropy of a query's weights in bits, before any transform of them; None for attention
            without weights of pairs.
        keys: ``(H,)``: geometric mean of the number of keys of a query that have a weight (the kept ones; all with
            ``fill="zero"``), whose logarithm bounds the entropy.
    """

    layer: str
    diversity: Tensor
    similarity: Tensor
    entropy: Tensor | None
    keys: Tensor | None


@torch.no_grad()
def head_statistics(model: nn.Module, images: Tensor, batch_size: int = 8) -> list[HeadStatistics]:
    """The heads of the layers that attend over whole images, see `attention_maps`.

    Args:
        model: A model of timm or transformers, made sparse or not. It is not changed.
        images: ``(B, C, H, W)``, normalized.
        batch_size: Images at a time, which bounds the memory.

    Raises:
        ValueError: If the model is not one that `sparsify` supports, or takes more than images.
    """
    check_images(images)
    batches = [captured_attention(model, part, _of_batch) for part in images.split(batch_size)]
    return [_together(parts) for parts in zip(*batches, strict=True)]


@dataclass(frozen=True)
class _Sums:
    """What one batch adds to the statistics of a layer."""

    layer: str
    diversity: Tensor
    count: int  # tokens of all images
    sums: Tensor  # (H, D)
    products: Tensor  # (H, H, D, D)
    entropy: Tensor | None
    keys: Tensor | None


def _of_batch(layer: CapturedLayer) -> _Sums:
    out = layer.out.double()
    features = out.transpose(0, 1).flatten(1, 2)  # (H, B * N, D)
    entropy = keys = None
    if layer.module.spec.has_pattern:
        entropy, keys = _entropy(layer)
    products = torch.einsum("hnd,gne->hgde", features, features)
    return _Sums(layer.name, _diversity(out), features.shape[1], features.sum(1), products, entropy, keys)


def _together(parts: Sequence[_Sums]) -> HeadStatistics:
    count, images = sum(part.count for part in parts), [len(part.diversity) for part in parts]
    mean = sum(part.sums for part in parts) / count
    products = sum(part.products for part in parts) - count * torch.einsum("hd,ge->hgde", mean, mean)
    entropies = [part.entropy for part in parts if part.entropy is not None]
    entropy = None
    if entropies:
        weights = torch.tensor(images, dtype=torch.float64, device=entropies[0].device) / sum(images)
        entropy = (torch.stack(entropies) * weights[:, None]).sum(0)
    diversity = torch.cat([part.diversity for part in parts])
    return HeadStatistics(parts[0].layer, diversity, _similarity(products), entropy, parts[0].keys)


def _diversity(out: Tensor) -> Tensor:
    heads = out.shape[1]
    if heads == 1:
        return out.new_zeros(len(out))
    # By pairs of one head with all later ones, since all differences at once may not fit into memory.
    total = out.new_zeros(len(out))
    for head in range(heads - 1):
        total += (out[:, head, None] - out[:, head + 1 :]).flatten(2).norm(dim=2).sum(1)
    return total / (heads * (heads - 1) // 2)


def _similarity(products: Tensor) -> Tensor:
    """Linear CKA from the products ``(H, H, D, D)`` of centred features."""
    sizes = products.square().sum((2, 3))
    norms = sizes.diagonal().sqrt()
    return sizes / (norms[:, None] * norms[None]).clamp(min=torch.finfo(sizes.dtype).tiny)


def _entropy(layer: CapturedLayer) -> tuple[Tensor, Tensor]:
    pattern, weights = layer.module.pattern(layer.q.shape[2]), layer.weights().double()
    heads, length = pattern.num_heads, pattern.sequence_length
    entropy = weights.new_zeros(weights.shape[0], weights.shape[1], pattern.stored_heads * length)
    keys = weights.new_zeros(pattern.stored_heads * length)
    for block in row_blocks(pattern, weights.device):
        rows = weights[..., block.pairs]
        of_rows = torch.special.entr(rows).sum(-1)
        others = length - rows.shape[-1]
        if layer.module.spec.fill == "zero" and others:
            rest = (1 - rows.sum(-1)).clamp(min=0) / others  # of each pair that is not kept
            of_rows = of_rows + others * torch.special.entr(rest)
        entropy[..., block.rows] = of_rows
        seen = length if layer.module.spec.fill == "zero" else rows.shape[-1]
        keys[block.rows] = float(np.log(seen))
    per_head = entropy.view(weights.shape[0], heads, length).mean((0, 2)) / np.log(2)
    return per_head, keys.view(-1, length).mean(1).exp().expand(heads if pattern.stored_heads == 1 else -1)


def draw_diversity(models: Mapping[str, Sequence[HeadStatistics]]) -> Figure:
    """Box plots of the head diversity over the images, by layer, models side by side."""
    if not models or not all(models.values()):
        raise ValueError("draw_diversity needs at least one model, and a layer of each")
    layers = max(len(layers) for layers in models.values())
    figure = Figure(figsize=(1.6 + 0.42 * layers * len(models) + 0.3 * layers, 3.2), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(models)
    for index, (name, layers_of_model) in enumerate(models.items()):
        colour = COLOURS[index % len(COLOURS)]
        boxes = axis.boxplot(
            [layer.diversity.cpu().numpy() for layer in layers_of_model],
            positions=[1 + i + (index - (len(models) - 1) / 2) * width for i in range(len(layers_of_model))],
            widths=0.85 * width,
            showfliers=False,
            patch_artist=True,
            manage_ticks=False,
            medianprops={"color": "black"},
        )
        for box in boxes["boxes"]:
            box.set_facecolor(colour)
            box.set_alpha(0.7)
        axis.plot([], [], "s", color=colour, alpha=0.7, label=name)
    axis.set_xticks(range(1, layers + 1))
    axis.set_xlabel("layer")
    axis.set_ylabel("mean distance between heads")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(4, len(models)), fontsize=8)
    return figure


def draw_head_statistics(layers: Sequence[HeadStatistics]) -> Figure:
    """For every layer the similarity of its heads; below, the entropy of each head's weights by layer."""
    count = len(layers)
    columns = min(6, count)
    lines = -(-count // columns)
    bounds = [(layer.entropy, layer.keys) for layer in layers if layer.entropy is not None and layer.keys is not None]
    height = 1.7 * lines + 0.4
    figure = Figure(figsize=(1.5 * columns + 1.2, height + (2.6 if bounds else 0)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, 2.6]) if bounds else (figure, None)
    above, below = parts
    panels = above.subplots(lines, columns, squeeze=False).reshape(-1)
    picture = None
    for number, (panel, layer) in enumerate(zip(panels, layers, strict=False), 1):
        picture = panel.imshow(layer.similarity.cpu(), vmin=0, vmax=1, cmap="cividis")
        panel.set_title(f"layer {number}", fontsize=8)
        panel.set_xlabel("head", fontsize=7)
        panel.set_ylabel("head", fontsize=7)
        panel.set_xticks([])
        panel.set_yticks([])
    for panel in panels[count:]:
        panel.set_visible(False)
    if picture is not None:
        above.colorbar(picture, ax=list(panels), shrink=0.8, label="similarity (CKA)")
    if not bounds:
        return figure
    axis = below.subplots()
    for number, (entropy, keys) in enumerate(bounds, 1):
        heads = len(entropy)
        places = number + (np.arange(heads) - (heads - 1) / 2) * 0.6 / max(heads, 2)
        labels = ("a head", "log2 of its keys") if number == 1 else (None, None)
        axis.plot(places, entropy.cpu(), "o", markersize=3.5, color=COLOURS[0], label=labels[0])
        axis.plot(places, keys.cpu().log2(), "_", color=COLOURS[1], label=labels[1])
    axis.set_xticks(range(1, count + 1))
    axis.set_xlabel("layer")
    axis.set_ylabel("entropy of weights (bits)")
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=7)
    return figure
