"""Models in transformers' layout: what their folder says about them, as options."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fibottention.errors import UserError
from fibottention.models.neighborhood_registry import is_neighborhood_model, matching_model_name
from fibottention.tasks.dense.config import DenseModelConfig

__all__ = ["adopt_published"]

_HEADS = ("upernet", "mask2former", "oneformer")
_BACKBONES = ("dinat", "nat")
_SIZES = ("embed_dim", "depths", "num_heads", "kernel_size", "dilations", "mlp_ratio", "qkv_bias")


def adopt_published(config: DenseModelConfig, folder: Path, classes: Sequence[str]) -> None:
    """Let options take over what a folder in transformers' layout says about its model; those that are given win.

    Args:
        config: The options, which change; the name becomes that of a model of the folder's sizes.
        folder: Folder with ``config.json``.
        classes: Names of the classes of the data. If they are among those of the model, but not in their order, the
            names of the model's become ``head_classes``.

    Raises:
        UserError: If the folder is not that of such a model, or of another head, or has some of the classes elsewhere.
    """
    content = _read(folder / "config.json")
    kind, backbone = content.get("model_type"), content.get("backbone_config")
    if kind not in _HEADS:
        raise UserError(f"{folder} is a model of type {kind}; model.checkpoint takes those of {', '.join(_HEADS)}")
    if kind != config.head:
        raise UserError(f"{folder} is a model of type {kind}, but model.head={config.head}")
    if not isinstance(backbone, dict) or backbone.get("model_type") not in _BACKBONES:
        raise UserError(f"the backbone of {folder} must be a NAT or DiNAT")
    if not is_neighborhood_model(config.name):
        raise UserError(f"the backbone of {folder} is a {backbone['model_type']}, but model.name={config.name}")
    sizes = _sizes(backbone, folder)
    config.name = matching_model_name(backbone["model_type"], sizes) or f"{backbone['model_type']}_tiny"
    config.options = {**sizes, **config.options}
    config.head_options = {**_head_options(content, kind), **config.head_options}
    if config.head_classes is None:
        config.head_classes = _head_classes(_labels(content, folder), classes, folder)


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
    given = {name: value for name, value in backbone.items() if value is not None}
    for name, wanted in (("hidden_act", "gelu"), ("layer_norm_eps", 1e-5)):
        if given.get(name, wanted) != wanted:
            raise UserError(f"the backbone of {folder} has {name}={given[name]}; a NAT or DiNAT here has {wanted}")
    sizes = {name: given.get(name, known[name]) for name in _SIZES}
    if not all(isinstance(sizes[name], list | tuple) for name in ("depths", "num_heads", "dilations")):
        raise UserError(f"{folder / 'config.json'} is damaged: depths, num_heads and dilations must be lists")
    if backbone["model_type"] == "nat":
        sizes["dilations"] = [[1] * depth for depth in sizes["depths"]]
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
        if value is not None and name in defaults and name not in general and value != defaults[name]
    }


def _labels(content: dict[str, Any], folder: Path) -> list[str]:
    """The names of a model's classes; none if the file does not say them."""
    names = content.get("id2label") or {}
    if not isinstance(names, dict) or not all(str(key).isdigit() and isinstance(n, str) for key, n in names.items()):
        raise UserError(f"{folder / 'config.json'} is damaged: id2label must be names by number")
    return [names[key] for key in sorted(names, key=int)]


def _head_classes(names: Sequence[str], classes: Sequence[str], folder: Path) -> list[str] | None:
    """The names of a model's classes, as the data write them, if those of the data are among them in another order."""
    written, places = {_plain(name): name for name in classes}, {_plain(name): n for n, name in enumerate(names)}
    if len(written) < len(classes) or len(places) < len(names):
        if len(names) == len(classes) and list(map(_plain, names)) != list(map(_plain, classes)):
            raise UserError(
                f"some classes of {folder} or of the data have one name; say which is which with model.head_classes"
            )
        return None
    moved = [name for place, name in enumerate(classes) if places.get(_plain(name), place) != place]
    absent = [name for name in classes if _plain(name) not in places]
    if not absent:
        is_same = len(names) == len(classes) and not moved
        return None if is_same else [written.get(_plain(name), name) for name in names]
    if moved and len(names) == len(classes):
        raise UserError(
            f"the model in {folder} has the class {moved[0]} at another place than the data and lacks {absent[0]}; "
            "say which of its classes is which with model.head_classes"
        )
    return None


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())
