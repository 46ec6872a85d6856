"""NAT, DiNAT, DiNAT_s and the isotropic models under their published names, registered with timm.

``timm.create_model("dinat_tiny")`` makes one after ``import fibottention``; keyword arguments are those of
`NeighborhoodTransformer`. Sizes are those of arXiv 2204.07143 and arXiv 2209.15001 and of their released code.
"""

from collections.abc import Mapping
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor

from fibottention.models.neighborhood_checkpoints import convert_checkpoint
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer

__all__: list[str] = []

_MINI: dict[str, Any] = {"embed_dim": 64, "depths": (3, 4, 6, 5), "num_heads": (2, 4, 8, 16), "drop_path_rate": 0.2}
_TINY = {**_MINI, "depths": (3, 4, 18, 5)}
_SMALL = {**_TINY, "embed_dim": 96, "num_heads": (3, 6, 12, 24), "mlp_ratio": 2.0, "drop_path_rate": 0.3}
_BASE = {**_SMALL, "embed_dim": 128, "num_heads": (4, 8, 16, 32), "drop_path_rate": 0.5, "layer_scale": 1e-5}
_LARGE = {**_SMALL, "embed_dim": 192, "num_heads": (6, 12, 24, 48), "drop_path_rate": 0.35}

_AT_224 = (8, 4, 2, 1)
_AT_384 = (13, 6, 3, 1)


def _swin_skeleton(embed_dim: int, depth: int, drop_path_rate: float) -> dict[str, Any]:
    return {
        "embed_dim": embed_dim,
        "depths": (2, 2, depth, 2),
        "num_heads": tuple(embed_dim // 32 * 2**level for level in range(4)),
        "dilations": _AT_224,
        "tokenizer": "patch",
        "mlp_ratio": 4.0,
        "drop_path_rate": drop_path_rate,
    }


def _isotropic(embed_dim: int, dilation: int, drop_path_rate: float) -> dict[str, Any]:
    return {
        "embed_dim": embed_dim,
        "depths": (12,),
        "num_heads": (embed_dim // 32,),
        "dilations": (dilation,),
        "tokenizer": "patch",
        "patch_size": 16,
        "mlp_ratio": 4.0,
        "drop_path_rate": drop_path_rate,
    }


_MODELS: dict[str, dict[str, Any]] = {
    "nat_mini": _MINI,
    "nat_tiny": _TINY,
    "nat_small": {**_SMALL, "layer_scale": 1e-5},
    "nat_base": _BASE,
    "dinat_mini": {**_MINI, "dilations": _AT_224},
    "dinat_tiny": {**_TINY, "dilations": _AT_224},
    "dinat_small": {**_SMALL, "dilations": _AT_224},
    "dinat_base": {**_BASE, "dilations": _AT_224},
    "dinat_large": {**_LARGE, "dilations": _AT_224},
    "dinat_large_384": {**_LARGE, "dilations": _AT_384, "img_size": 384},
    "dinat_large_384_11x11": {**_LARGE, "dilations": _AT_224, "kernel_size": 11, "img_size": 384},
    "dinat_s_tiny": _swin_skeleton(96, 6, 0.2),
    "dinat_s_small": _swin_skeleton(96, 18, 0.3),
    "dinat_s_base": _swin_skeleton(128, 18, 0.5),
    "dinat_s_large": _swin_skeleton(192, 18, 0.35),
    "dinat_s_large_384": {**_swin_skeleton(192, 18, 0.35), "dilations": _AT_384, "img_size": 384},
    "nat_isotropic_small": _isotropic(384, 1, 0.1),
    "nat_isotropic_base": _isotropic(768, 1, 0.4),
    "dinat_isotropic_small": _isotropic(384, 2, 0.1),
    "dinat_isotropic_base": _isotropic(768, 2, 0.4),
}

# Names of the weights in transformers' layout on the Hugging Face hub.
_HUB = {
    "nat_mini": "nat-mini-in1k-224",
    "nat_tiny": "nat-tiny-in1k-224",
    "nat_small": "nat-small-in1k-224",
    "nat_base": "nat-base-in1k-224",
    "dinat_mini": "dinat-mini-in1k-224",
    "dinat_tiny": "dinat-tiny-in1k-224",
    "dinat_small": "dinat-small-in1k-224",
    "dinat_base": "dinat-base-in1k-224",
    "dinat_large": "dinat-large-in22k-in1k-224",
    "dinat_large_384": "dinat-large-in22k-in1k-384",
    "dinat_large_384_11x11": "dinat-large-11x11-in22k-in1k-384",
}


def _cfg(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    side = arguments.get("img_size", 224)
    of_hub = {}
    if name in _HUB:
        of_hub = {"hf_hub_id": f"shi-labs/{_HUB[name]}", "hf_hub_filename": "pytorch_model.bin"}
    return {
        "num_classes": 1000,
        "input_size": (3, side, side),
        "pool_size": (side // 32, side // 32) if len(arguments["depths"]) > 1 else (side // 16, side // 16),
        "fixed_input_size": False,
        "crop_pct": 1.0 if side == 384 else 0.875,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj" if arguments.get("tokenizer") == "patch" else "patch_embed.proj.0",
        "classifier": "head",
        **of_hub,
    }


default_cfgs = generate_default_cfgs({name: _cfg(name, arguments) for name, arguments in _MODELS.items()})


def is_neighborhood_model(name: str) -> bool:
    """Whether a name is that of one of these models."""
    return name.split(".")[0] in _MODELS


def matching_model_name(kind: str, sizes: Mapping[str, Any]) -> str | None:
    """The name of the first of these models of some sizes, whatever their dilations; None if there is none.

    Args:
        kind: ``"nat"`` or ``"dinat"``.
        sizes: Arguments of `NeighborhoodTransformer`.
    """
    compared = ("embed_dim", "depths", "num_heads", "mlp_ratio", "kernel_size")

    def of(arguments: Mapping[str, Any]) -> list[Any]:
        values = [arguments.get(key, usual.get(key)) for key in compared]
        values = [list(value) if isinstance(value, list | tuple) else value for value in values]
        return [*values, bool(arguments.get("layer_scale"))]

    usual = {"mlp_ratio": 3.0, "kernel_size": 7}
    return next(
        (
            name
            for name, arguments in _MODELS.items()
            if name.startswith(f"{kind}_") and "tokenizer" not in arguments and of(arguments) == of(sizes)
        ),
        None,
    )


def neighborhood_model_names() -> list[str]:
    """The names of these models."""
    return list(_MODELS)


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: NeighborhoodTransformer) -> dict[str, Tensor]:
    """What timm calls to load published weights."""
    return convert_checkpoint(state_dict, model)


def _register(name: str, arguments: dict[str, Any]) -> None:
    def create(pretrained: bool = False, **kwargs: Any) -> NeighborhoodTransformer:
        out_indices = kwargs.pop("out_indices", tuple(range(len(arguments["depths"]))))
        return build_model_with_cfg(
            NeighborhoodTransformer,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            **{**arguments, **kwargs},
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name} of arXiv 2204.07143 or arXiv 2209.15001."
    globals()[name] = register_model(create)  # which adds the name to __all__


for _name, _arguments in _MODELS.items():
    _register(_name, _arguments)
