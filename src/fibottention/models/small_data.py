"""Transformers for small images, 32x32 and 64x64, registered with timm.

ViT and PiT have the sizes of SATA (arXiv 2210.12333, section 4.1), Swin and CaiT those of "Vision Transformer for
Small-Size Datasets" (2021). Keyword arguments are those of timm's classes, and ``shifted_patches``: tokenize patches of
the image and of its four half-patch diagonal shifts (SPT, section 3.2 of the latter).
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.cait import Cait
from timm.models.pit import PoolingVisionTransformer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

__all__: list[str] = []

_VIT: dict[str, Any] = {"embed_dim": 192, "depth": 9, "num_heads": 12, "mlp_ratio": 2.0, "qkv_bias": False}
_PIT: dict[str, Any] = {"base_dims": (48, 48, 48), "depth": (2, 6, 4), "heads": (2, 4, 8), "mlp_ratio": 2.0}
_SWIN: dict[str, Any] = {
    "embed_dim": 96,
    "depths": (2, 6, 4),
    "num_heads": (3, 6, 12),
    "window_size": 4,
    "mlp_ratio": 2.0,
}
_CAIT: dict[str, Any] = {
    "embed_dim": 192,
    "depth": 24,
    "depth_token_only": 2,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    "mlp_ratio_token_only": 2.0,
}

# Class, arguments, and side of a patch in images of 32 pixels; twice as much in images of 64.
_FAMILIES: dict[str, tuple[type[nn.Module], dict[str, Any], int]] = {
    "vit": (VisionTransformer, _VIT, 4),
    "pit": (PoolingVisionTransformer, _PIT, 2),
    "swin": (SwinTransformer, _SWIN, 2),
    "cait": (Cait, _CAIT, 4),
}


class ShiftedPatches(nn.Module):
    """Shifted patch tokenization: patches of an image and of its four diagonal shifts, normalized and projected.

    Args:
        in_chans: Channels of the image.
        embed_dim: Size of the embeddings.
        patch_size: Side of a patch; the shifts are half of it.
    """

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        size = 5 * in_chans * patch_size**2
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """From images ``(B, C, H, W)`` to embeddings ``(B, embed_dim, H / patch_size, W / patch_size)``."""
        step = self.patch_size // 2
        shifts = [F.pad(x, (dx, -dx, dy, -dy)) for dy in (step, -step) for dx in (step, -step)]
        patches = F.pixel_unshuffle(torch.cat([x, *shifts], 1), self.patch_size)
        return self.linear(self.norm(patches.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def _shift_patches(model: Any, in_chans: int, patch_size: int) -> None:
    """Put shifted patch tokenization in the place of a model's patch convolution."""
    name = "conv" if isinstance(model, PoolingVisionTransformer) else "proj"
    embed_dim = getattr(model.patch_embed, name).out_channels
    setattr(model.patch_embed, name, ShiftedPatches(in_chans, embed_dim, patch_size))


def _cfg(family: str, size: int) -> dict[str, Any]:
    return {
        "num_classes": 100 if size == 32 else 200,
        "input_size": (3, size, size),
        "pool_size": None,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.conv" if family == "pit" else "patch_embed.proj",
        "classifier": "head.fc" if family == "swin" else "head",
    }


default_cfgs = generate_default_cfgs(
    {f"{family}_small_data_{size}": _cfg(family, size) for family in _FAMILIES for size in (32, 64)}
)


def _register(family: str, size: int) -> None:
    model_class, arguments, patch_size = _FAMILIES[family]
    name = f"{family}_small_data_{size}"

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        shifted = kwargs.pop("shifted_patches", False)
        options = {"img_size": size, "patch_size": patch_size * size // 32, **arguments, **kwargs}
        if family == "pit":
            options.setdefault("stride", options["patch_size"])
        model = build_model_with_cfg(model_class, name, pretrained, **options)
        if shifted:
            _shift_patches(model, options.get("in_chans", 3), options["patch_size"])
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{family} for images of {size} pixels."
    globals()[name] = register_model(create)  # which adds the name to __all__


for _family in _FAMILIES:
    for _size in (32, 64):
        _register(_family, _size)
