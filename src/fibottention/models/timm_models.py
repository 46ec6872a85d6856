"""The paper's models with Fibottention, registered with timm.

``timm.create_model("fibottention_vit_base_patch16_224")`` makes one.

Keyword arguments are those of the timm model of the same name without ``fibottention_``; ``attention`` takes another
spec, or a mapping with a spec's name and fields.
"""

from collections.abc import Mapping
from typing import Any

import timm
from timm.models import generate_default_cfgs, register_model
from torch import nn

from fibottention.adapters.timm import sparsify
from fibottention.specs import AttentionSpec, Fibottention, make_spec

__all__ = [
    "fibottention_convit_base",
    "fibottention_swin_base_patch4_window7_224",
    "fibottention_vit_base_patch16_224",
    "fibottention_vit_small_patch16_224",
    "fibottention_vit_tiny_patch16_224",
]

_imagenet = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_half = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_common = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "classifier": "head",
}

default_cfgs = generate_default_cfgs(
    {
        "fibottention_vit_tiny_patch16_224": {**_common, **_half, "first_conv": "patch_embed.proj"},
        "fibottention_vit_small_patch16_224": {**_common, **_half, "first_conv": "patch_embed.proj"},
        "fibottention_vit_base_patch16_224": {**_common, **_half, "first_conv": "patch_embed.proj"},
        "fibottention_swin_base_patch4_window7_224": {
            **_common,
            **_imagenet,
            "first_conv": "patch_embed.proj",
            "classifier": "head.fc",
        },
        "fibottention_convit_base": {**_common, **_imagenet, "first_conv": "patch_embed.proj"},
    }
)


def _create(base: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    attention: AttentionSpec | Mapping[str, Any] = kwargs.pop("attention", None) or Fibottention()
    for added_by_timm in ("pretrained_cfg", "pretrained_cfg_overlay"):
        kwargs.pop(added_by_timm, None)
    model = timm.create_model(base, pretrained=pretrained, **kwargs)
    sparsify(model, attention if isinstance(attention, AttentionSpec) else make_spec(attention))
    return model


@register_model
def fibottention_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-Tiny/16 (192 wide, 12 layers, 3 heads) with Fibottention; ``pretrained`` loads timm's dense weights."""
    return _create("vit_tiny_patch16_224", pretrained, kwargs)


@register_model
def fibottention_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-Small/16 (384 wide, 12 layers, 6 heads) with Fibottention; ``pretrained`` loads timm's dense weights."""
    return _create("vit_small_patch16_224", pretrained, kwargs)


@register_model
def fibottention_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-Base/16 (768 wide, 12 layers, 12 heads) with Fibottention; ``pretrained`` loads timm's dense weights."""
    return _create("vit_base_patch16_224", pretrained, kwargs)


@register_model
def fibottention_swin_base_patch4_window7_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Swin-Base with Fibottention within each window; ``pretrained`` loads timm's dense weights."""
    return _create("swin_base_patch4_window7_224", pretrained, kwargs)


@register_model
def fibottention_convit_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ConViT-Base with Fibottention; ``pretrained`` loads timm's dense weights."""
    return _create("convit_base", pretrained, kwargs)
