"""How much of the attention of an object's patches stays in the object."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from fibottention.analysis.attention_maps import CapturedLayer, captured_attention, patch_grid
from fibottention.analysis.colours import COLOURS
from fibottention.ops.pairs import pair_sum

__all__ = ["Localisation", "draw_localisation", "localisation", "patch_masks"]


@dataclass(frozen=True)
class Localisation:
    """Attention from patches of the object to patches of the object, in one layer.

    Attributes:
        layer: Path of the layer in the model.
        mean: ``(B, H)`` mean weight of the pairs inside; pairs that are not kept count as 0.
        variance: ``(B, H)`` variance of these weights (arXiv 2406.19391).
        share: ``(B, H)`` share of the weight of the object's patches that stays in the object, prefix tokens left out;
            0.5 says nothing by itself: compare with ``area``.
        area: ``(B,)`` share of the patches that belong to the object.
    """

    layer: str
    mean: Tensor
    variance: Tensor
    share: Tensor
    area: Tensor


def patch_masks(masks: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """The patches of which at least half belong to an object, ``(B, N)``, in raster order.

    Args:
        masks: ``(B, height, width)`` of pixels; what is not 0 belongs to the object.
        grid_size: Rows and columns of patches.

    Raises:
        ValueError: If a mask has no such patch, or all of them.
    """
    inside = F.adaptive_avg_pool2d((masks[:, None] != 0).float(), grid_size).flatten(1) >= 0.5
    for index, row in enumerate(inside):
        if not row.any() or row.all():
            what = "no patch" if not row.any() else "every patch"
            raise ValueError(
                f"mask {index} covers {what} of the {grid_size[0]} x {grid_size[1]}; some must be in, some out"
            )
    return inside


@torch.no_grad()
def localisation(model: nn.Module, images: Tensor, masks: Tensor, batch_size: int = 8) -> list[Localisation]:
    """Inside-to-inside attention of the layers that attend over whole images, see `attention_maps`.

    Layers without weights of pairs known beforehand (top-k, Linformer, efficient attention) are left out.

    Args:
        model: A model of timm or transformers, made sparse or not. It is not changed.
        images: ``(B, C, H, W)``, normalized.
        masks: ``(B, H, W)``, not 0 in the object.
        batch_size: Images at a time, which bounds the memory.

    Raises:
        ValueError: If the model is not one that `sparsify` supports or takes more than images, its patches form no grid
            on the image, or a mask covers no patch or all.
    """
    if images.ndim != 4 or masks.shape != (len(images), *images.shape[-2:]):
        raise ValueError(
            f"images must be (B, C, H, W) and masks (B, H, W), got {tuple(images.shape)} and {tuple(masks.shape)}"
        )
    batches = [
        captured_attention(model, part, lambda layer, own=own: _of_layer(layer, own))
        for part, own in zip(images.split(batch_size), masks.split(batch_size), strict=True)
    ]
    found = []
    for parts in zip(*batches, strict=True):
        own = [part for part in parts if part is not None]
        if own:
            fields = [
                torch.cat([getattr(part, name) for part in own]) for name in ("mean", "variance", "share", "area")
            ]
            found.append(Localisation(own[0].layer, *fields))
    return found


def _of_layer(layer: CapturedLayer, masks: Tensor) -> Localisation | None:
    if not layer.module.spec.has_pattern:
        return None
    pattern, weights = layer.module.pattern(layer.q.shape[2]), layer.weights(layer.module.transform).double()
    heads, prefix = (
        pattern.num_heads,
        layer.module.prefix_tokens,
    )  # LSA's pattern takes these for tokens like the others
    tokens = pattern.sequence_length - prefix
    inside = patch_masks(masks, patch_grid(tokens, masks.shape[-2:])).to(weights.device)
    inside = torch.cat([inside.new_zeros(len(inside), prefix), inside], 1)
    patch = torch.cat([inside.new_zeros(prefix), inside.new_ones(tokens)]).expand_as(inside)
    kept = torch.ones_like(weights)

    def of_queries(values: Tensor, keys: Tensor) -> Tensor:
        """Sum of the values of each query's kept pairs with some keys, ``(B, H, T)``."""
        chosen = keys.to(values.dtype)[:, None, :, None].expand(-1, heads, -1, 1)
        return pair_sum(values, chosen, pattern.key).squeeze(-1)

    outside = weights.new_zeros(())  # weight of each pair that is not kept
    if layer.module.spec.fill == "zero":
        everything = torch.ones_like(inside)
        missing = pattern.sequence_length - of_queries(kept, everything)
        outside = (1 - of_queries(weights, everything)) / missing.clamp(min=1)

    def total(values: Tensor, keys: Tensor, rest: Tensor) -> Tensor:
        """Sum over the pairs of the object's queries with some keys, ``(B, H)``."""
        others = keys.sum(1)[:, None, None] - of_queries(kept, keys)
        return ((of_queries(values, keys) + rest * others) * inside[:, None]).sum(-1)

    count = inside.sum(1, keepdim=True).double() ** 2
    stays = total(weights, inside, outside)
    mean = stays / count
    variance = total(weights.square(), inside, outside.square()) / count - mean.square()
    share = stays / total(weights, patch, outside).clamp(min=1e-300)
    return Localisation(layer.name, mean, variance, share, inside[:, prefix:].double().mean(1))


def draw_localisation(layers: Sequence[Localisation]) -> Figure:
    """Share of weight that stays in the object, and the variance, of every head by layer; means over images."""
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    share, variance = figure.subplots(1, 2)
    numbers = range(1, len(layers) + 1)
    for axis, values, label in (
        (share, [100 * layer.share.mean(0) for layer in layers], "attention that stays in the object (%)"),
        (variance, [layer.variance.mean(0) for layer in layers], "variance of the weights inside"),
    ):
        for number, of_heads in zip(numbers, values, strict=True):
            axis.plot([number] * len(of_heads), of_heads.cpu(), "o", markersize=3.5, color=COLOURS[0], alpha=0.6)
        axis.plot(
            numbers, [of_heads.mean().item() for of_heads in values], "-", color=COLOURS[0], label="mean of the heads"
        )
        axis.set_xlabel("layer")
        axis.set_ylabel(label)
        axis.set_xticks(list(numbers))
        axis.grid(alpha=0.3)
    share.axhline(100 * layers[0].area.mean().item(), color=COLOURS[1], linestyle="--", label="area of the object")
    share.legend(fontsize=7)
    variance.legend(fontsize=7)
    return figure
