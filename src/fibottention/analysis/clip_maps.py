"""Where each head looks in a clip, frame by frame."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from fibottention.adapters.timesformer import holds_timesformer
from fibottention.analysis.attention_maps import attention_maps

__all__ = ["ClipMap", "clip_maps", "draw_clip_maps", "overlay_clip"]


@dataclass(frozen=True)
class ClipMap:
    """Attention of one layer over the patches of each frame.

    Attributes:
        layer: Path of the layer in the model.
        values: ``(B, H, T, rows, columns)``: weights of CLS, or the mean over all queries without it; T counts frames,
            or the tubelets that a token covers.
        of_prefix: Whether they are those of CLS.
    """

    layer: str
    values: Tensor
    of_prefix: bool


def clip_maps(model: nn.Module, clips: Tensor) -> list[ClipMap]:
    """Attention maps of the layers of a video model that attend in space, or in space and time.

    Args:
        model: TimeSformer, VideoMAE or ViViT of transformers, made sparse or not. It is not changed.
        clips: ``(B, T, C, S, S)``, normalized.

    Raises:
        ValueError: If the model is none of these, or has no weights of pairs.
    """
    batch, config, is_timesformer = len(clips), cast(Any, model.config), holds_timesformer(model)
    found = []
    for layer in attention_maps(model, clips):
        if ".temporal_attention." in layer.layer:
            continue
        values = layer.values
        if is_timesformer and config.attention_type == "joint_space_time":
            frames = config.num_frames  # the frames of a patch lie side by side
            values = values.unflatten(-1, (-1, frames)).transpose(-2, -1)
        elif is_timesformer:
            values = values.unflatten(0, (batch, -1)).transpose(1, 2)
        else:
            tubelet = config.tubelet_size if isinstance(config.tubelet_size, int) else config.tubelet_size[0]
            values = values.unflatten(-1, (config.num_frames // tubelet, -1))
        side = math.isqrt(values.shape[-1])
        found.append(ClipMap(layer.layer, values.unflatten(-1, (side, -1)), layer.of_prefix))
    return found


def draw_clip_maps(frames: NDArray[np.float64], values: Tensor, most_heads: int = 12) -> Figure:
    """A contact sheet: the frames of a clip above the maps of each head, each head on one scale for all frames.

    Args:
        frames: ``(T, S, S, 3)`` in [0, 1].
        values: ``(H, T', rows, columns)`` of one clip; T' divides T.
        most_heads: Heads drawn.
    """
    heads, columns = min(most_heads, len(values)), values.shape[1]
    shown = frames[:: len(frames) // columns]
    figure = Figure(figsize=(1.1 * columns + 0.4, 1.1 * (heads + 1) + 0.3), layout="constrained")
    panels = figure.subplots(heads + 1, columns, squeeze=False)
    limits = [_range(head) for head in values[:heads]]
    for line in range(heads + 1):
        for column in range(columns):
            panel = panels[line, column]
            panel.set_xticks([])
            panel.set_yticks([])
            if line == 0:
                panel.imshow(shown[column], vmin=0, vmax=1)
                panel.set_title(f"{column + 1}", fontsize=8)
            else:
                panel.imshow(_overlay(shown[column], values[line - 1, column], limits[line - 1]))
        panels[line, 0].set_ylabel("frame" if line == 0 else f"head {line}", fontsize=8)
    return figure


def overlay_clip(frames: NDArray[np.float64], values: Tensor) -> NDArray[np.uint8]:
    """The frames of a clip with the mean of the heads' maps over them, ``(T, S, 2 S, 3)`` of uint8, plain on the left.

    Args:
        frames: ``(T, S, S, 3)`` in [0, 1].
        values: ``(H, T', rows, columns)`` of one clip; T' divides T.
    """
    mean = values.mean(0)
    repeats, limits = len(frames) // len(mean), _range(mean)
    drawn = [
        np.concatenate([frame, _overlay(frame, mean[index // repeats], limits)], 1)
        for index, frame in enumerate(frames)
    ]
    return (np.stack(drawn) * 255).round().astype(np.uint8)


def _range(values: Tensor) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _overlay(frame: NDArray[np.float64], values: Tensor, limits: Sequence[float]) -> NDArray[np.float64]:
    """A grey frame under a map of colours."""
    low, high = limits
    scaled = (values.double() - low) / max(high - low, 1e-12)
    sized = torch.nn.functional.interpolate(scaled[None, None], size=frame.shape[:2], mode="bilinear")[0, 0]
    strength = sized.clamp(0, 1).cpu().numpy()[..., None]
    grey = np.broadcast_to(frame.mean(-1, keepdims=True), frame.shape)
    colour = colormaps["inferno"](strength[..., 0])[..., :3]
    alpha = 0.25 + 0.6 * strength
    return (1 - alpha) * grey + alpha * colour
