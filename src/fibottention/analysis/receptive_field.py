"""Receptive fields: which inputs an output depends on, by its gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from fibottention.models.neighborhood_transformer import NeighborhoodTransformer

__all__ = ["LevelField", "draw_fields", "influence", "level_fields"]


def influence(forward: Callable[[Tensor], Tensor], x: Tensor, position: Sequence[int]) -> Tensor:
    """How much one output depends on each place of the input: the size of the gradient.

    The set of places with a value above 0 is the receptive field.

    Args:
        forward: Maps ``(1, C, *grid)`` to ``(1, C', *grid)``.
        x: The input ``(1, C, *grid)``, where the gradient is taken.
        position: Place of the output in its grid.

    Returns:
        ``(*grid)`` norm over the channels of the gradient of a random combination of the output's channels.
    """
    x = x.detach().requires_grad_()
    at = forward(x)[(0, slice(None), *position)]
    # LayerNorm's plain sum over the channels would have no gradient.
    weight = torch.randn(at.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((at * weight.to(at)).sum(), x)
    return gradient[0].norm(dim=0)


@dataclass(frozen=True)
class LevelField:
    """The receptive field of the central token of a level.

    Attributes:
        level: Index of the level, from 0.
        grid_size: Height and width of the level's feature map.
        num_heads: Heads of its layers.
        dilations: Dilations of its layers.
        influence: ``(H, W)`` as `influence` gives it, over the pixels.
        own_influence: ``(h, w)`` likewise over the tokens that the level's layers get, so of these layers alone.
    """

    level: int
    grid_size: tuple[int, int]
    num_heads: int
    dilations: tuple[int, ...]
    influence: Tensor
    own_influence: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the box around the field."""
        return _box(self.influence)

    @property
    def own_size(self) -> tuple[int, int]:
        """Height and width in tokens of the box around the field of the level's layers alone."""
        return _box(self.own_influence)

    @property
    def share(self) -> float:
        """Pixels in the field as a share of all pixels."""
        return float((self.influence > 0).double().mean())


def _box(influence: Tensor) -> tuple[int, int]:
    inside = influence > 0
    rows, columns = inside.any(1).nonzero(), inside.any(0).nonzero()
    return int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1


def level_fields(model: NeighborhoodTransformer, image_size: tuple[int, int]) -> list[LevelField]:
    """The receptive field of the central token of each level of a model.

    Args:
        model: The model. It is left in evaluation mode and in float64, in which no influence is too small to be seen.
        image_size: Height and width of the image in pixels.
    """
    model = model.eval().double().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, model.in_chans, *image_size, generator=generator, dtype=torch.float64)
    fields = []
    for level, grid in enumerate(model.level_sizes(image_size)):
        layers: Any = model.levels[level]
        tokens = torch.randn(1, model.feature_info[level]["num_chs"], *grid, generator=generator, dtype=torch.float64)

        def features(x: Tensor, level: int = level) -> Tensor:
            return model.forward_intermediates(x, [level], stop_early=True)[1][0]

        def own(x: Tensor, layers: Any = layers) -> Tensor:
            return layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

        centre = (grid[0] // 2, grid[1] // 2)
        heads, dilations = layers.blocks[0].attn.num_heads, tuple(model.dilations[level])
        fields.append(
            LevelField(
                level, grid, heads, dilations, influence(features, image, centre), influence(own, tokens, centre)
            )
        )
    return fields


def draw_fields(fields: Sequence[LevelField], path: str | Path, title: str = "") -> None:
    """Save a picture of receptive fields as PNG, one panel per level, pixels that have no influence white.

    Args:
        fields: What `level_fields` gives.
        path: File to write.
        title: Title of the picture.
    """
    figure = Figure(figsize=(2.9 * len(fields) + 0.8, 3.6), layout="constrained")
    axes = figure.subplots(1, len(fields), squeeze=False)[0]
    colors = colormaps["viridis_r"].with_extremes(bad="white", under=colormaps["viridis_r"](0.0))
    norm = LogNorm(1e-6, 1)
    for axis, field in zip(axes, fields, strict=True):
        relative = field.influence / field.influence.max()
        axis.imshow(np.ma.masked_equal(relative.numpy(), 0), cmap=colors, norm=norm, interpolation="nearest")
        height, width = field.size
        dilations = " ".join(map(str, field.dilations[:6])) + (" ..." if len(field.dilations) > 6 else "")
        axis.set_title(f"level {field.level + 1}: {height} x {width} pixels\ndilations {dilations}", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=10)
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=list(axes), shrink=0.8, extend="min")
    bar.set_label("influence on the central token\n(size of the gradient, relative)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(str(path), dpi=150, format="png")
