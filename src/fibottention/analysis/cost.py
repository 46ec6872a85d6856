"""What a whole model computes per sample."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fibottention.layers.neighborhood_attention import NeighborhoodAttention2D
from fibottention.layers.pattern_attention import PatternAttention

__all__ = ["forward_macs", "whole_model_macs"]


def whole_model_macs(model: nn.Module, input_shape: Sequence[int]) -> int:
    """Multiply-accumulates of one forward pass on one sample, attention counted over the kept pairs.

    Args:
        model: The model, made sparse or not. It is not changed.
        input_shape: Shape of the sample without the batch: ``(C, H, W)`` of an image, ``(T, C, H, W)`` of a clip.
    """
    sample = torch.zeros(1, *input_shape, device=next(model.parameters()).device)
    return forward_macs(model, lambda copied: copied(sample))


def forward_macs(model: nn.Module, run: Callable[[Any], object]) -> int:
    """Multiply-accumulates of what is done with a model, attention counted over the kept pairs.

    Args:
        model: The model, made sparse or not. It is not changed.
        run: Does it, with a copy of the model.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PatternAttention | NeighborhoodAttention2D):
            # The dense backends compute pairs that are then thrown away.
            module.backend = "gather"
    # Fused attention is not counted on every device; its parts are.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(model)
    return counter.get_total_flops() // 2
