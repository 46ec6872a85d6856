"""Models in transformers' layout: what their folder says about them, as options."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fibottention.errors import UserError
from fibottention.models.neighborhood_registry import matching_model_name
from fibottention.tasks.dense.config import DenseModelConfig

__all__ = ["adopt_published"]

_HEADS = ("upernet", "mask2former", "oneformer")
_BACKBONES = ("dinat", "nat")
_SIZES = ("embed_dim", "depths", "num_heads", "kernel_size", "dilations", "mlp_ratio", "qkv_bias")


def adopt_published(config: DenseModelConfig, folder: Path, classes: Sequence[str]) -> None:
    """Let options take over what a folder in transformers' layout says about its model; those that are given win.

    Args:
        config: The options, which change.
        folder: Folder with ``config.json``.
        classes: Names of the classes of the data. If they are among those of the model, but not in their order, the
            names of the model's become ``head_classes``.

    Raises:
        UserError: If the folder is not that of such a model, or of another head.
    """
    content = _read(folder / "config.json")
    kind, backbone = content.get("model_type"), content.get("backbone_config")
    if kind not in _HEADS:
        raise UserError(f"{folder} is a model of type {kind}; model.checkpoint takes those of {', '.join(_HEADS)}")
    if kind != config.head:
        raise UserError(f"{folder} is a model of type {kind}, but model.head={config.head}")
    if not isinstance(backbone, dict) or backbone.get("model_type") not in _BACKBONES:
        raise UserError(f"the backbone of {folder} must be a NAT or DiNAT")
    sizes = _sizes(backbone, folder)
    config.name = matching_model_name(backbone["model_type"], sizes) or config.name
    config.options = {**sizes, **config.options}
    config.head_options = {**_head_options(content, kind), **config.head_options}
    names = content.get("id2label")
    if config.head_classes is None and kind != "upernet" and isinstance(names, dict):
        config.head_classes = _head_classes([names[key] for key in sorted(names, key=int)], classes)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"model.checkpoint: there is no {path}")
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no options")
    return content


def _sizes(backbone: dict[str, Any], folder: Path) -> dict[str, Any]:
    from transformers import DinatConfig  # transformers takes a second to import

    known = DinatConfig().to_dict()
    sizes = {name: backbone.get(name, known[name]) for name in _SIZES}
    if backbone["model_type"] == "nat":
        sizes["dilations"] = [[1] * depth for depth in sizes["depths"]]
    if sizes["dilations"] is None:
        raise UserError(f"the backbone of {folder} names no dilations")
    if scale := backbone.get("layer_scale_init_value"):
        sizes["layer_scale"] = scale
    return sizes


def _head_options(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """Those that differ from their defaults."""
    from transformers import PreTrainedConfig

    from fibottention.tasks.dense.heads.transformers_heads import head_defaults

    defaults, general = head_defaults(kind), PreTrainedConfig().to_dict()
    return {
        name: value
        for name, value in content.items()
        if name in defaults and name not in general and value != defaults[name]
    }


def _head_classes(names: list[str], classes: Sequence[str]) -> list[str] | None:
    """The names of a model's classes, as the data write them, if those of the data are among them in another order."""
    written = {_plain(name): name for name in classes}
    if names == list(classes) or not {_plain(name) for name in names} >= set(written):
        return None
    return [written.get(_plain(name), name) for name in names]


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())
