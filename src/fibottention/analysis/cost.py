"""What a whole model computes per image."""

import copy

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fibottention.layers.neighborhood_attention import NeighborhoodAttention2D
from fibottention.layers.pattern_attention import PatternAttention

__all__ = ["whole_model_macs"]


def whole_model_macs(model: nn.Module, image_size: int | tuple[int, int], in_chans: int = 3) -> int:
    """Multiply-accumulates of one forward pass on one image, attention counted over the kept pairs.

    Args:
        model: The model, made sparse or not. It is not changed.
        image_size: Side of the image in pixels, or height and width.
        in_chans: Channels of the image.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PatternAttention | NeighborhoodAttention2D):
            # The dense backends compute pairs that are then thrown away.
            module.backend = "gather"
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    image = torch.zeros(1, in_chans, height, width, device=next(model.parameters()).device)
    # Fused attention is not counted on every device; its parts are.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() // 2
