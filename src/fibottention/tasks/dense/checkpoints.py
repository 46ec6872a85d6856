"""Weights of whole models: of runs, and of UperNet, Mask2Former and OneFormer in transformers' layout."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from fibottention.errors import UserError
from fibottention.models.neighborhood_checkpoints import convert_checkpoint
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer
from fibottention.tasks.weights import load_into
from fibottention.training.run import load_weights

__all__ = ["load_checkpoint"]

# Where transformers' models keep their backbone, by the names of their parts.
_BACKBONES = ("model.pixel_level_module.encoder.", "backbone.")
# OneFormer's texts are for its contrastive loss only.
_SURPLUS = ("head.net.model.text_mapper.", "head.net.criterion.")


def load_checkpoint(model: Any, path: Path, *, new_classes: bool = True) -> bool:
    """Load the weights of a run, or of a folder in transformers' layout, into a model of maybe other classes.

    Args:
        model: A `fibottention.tasks.dense.model.DenseModel`.
        path: File of weights, or a folder with ``model.safetensors``, whole or in parts, or ``pytorch_model.bin``.
        new_classes: Whether what depends on the number of classes may begin anew.

    Returns:
        Whether it does.

    Raises:
        UserError: If they cannot be read or do not fit.
    """
    weights = _read_folder(path) if path.is_dir() else load_weights(path)
    own = model.state_dict()
    if not any(name.startswith("head.") for name in weights):
        weights = _from_transformers(model, weights, path)
    other = [n for n in weights if n in own and own[n].shape != weights[n].shape and _is_classifier(n)]
    if other and not new_classes:
        name = other[0].removeprefix("head.")
        raise UserError(
            f"the weights in {path} are for other classes than those of the data ({name} has {len(weights[other[0]])} "
            f"rows, not {len(own[other[0]])}), and with train.epochs=0 new ones would learn nothing; if the data's are "
            "among them, name all of them in model.head_classes"
        )
    for name in other:
        weights[name] = own[name]
    load_into(model, weights, path)
    return bool(other)


def _is_classifier(name: str) -> bool:
    return any(
        part in name
        for part in (
            "cls_score",
            "bbox_pred",
            "mask_fcn_logits",
            "classifier.",
            "class_predictor",
            "decoder.class_embed",
            "empty_weight",
        )
    )


def _read_folder(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is damaged") from error
        return {name: weight for part in names for name, weight in load_weights(folder / part).items()}
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return load_weights(folder / name)
    raise UserError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def _from_transformers(model: Any, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    prefix = next((p for p in _BACKBONES if any(name.startswith(p) for name in weights)), None)
    if prefix is None or not hasattr(model.head, "net"):
        raise UserError(
            f"the weights in {path} are neither of a run nor of UperNet, Mask2Former or OneFormer in transformers' "
            "layout"
        )
    inner = model.backbone.model
    if not isinstance(inner, NeighborhoodTransformer):
        raise UserError(
            f"the weights in {path} are in transformers' layout, which need a NAT or DiNAT backbone, "
            f"not {type(inner).__name__}"
        )
    of_backbone = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    converted = convert_checkpoint(of_backbone, inner)
    rest = {f"head.net.{n}": w for n, w in weights.items() if not n.startswith(prefix)}
    rest = {n: w for n, w in rest.items() if not n.startswith(_SURPLUS)}
    # What the losses keep depends on the options only.
    losses = {n: w for n, w in model.state_dict().items() if n.startswith(_SURPLUS)}
    return {f"backbone.model.{n}": w for n, w in converted.items()} | rest | losses
