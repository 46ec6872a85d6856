"""Weights of NAT and DiNAT in their published layouts: the papers' own and that of transformers, both ways."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import load_state_dict
from timm.models._features import FeatureGetterNet
from torch import Tensor

from fibottention.models.neighborhood_transformer import NeighborhoodTransformer

__all__ = ["convert_checkpoint", "load_checkpoint", "resize_bias_table", "to_transformers"]

# Names of a block's parts here and in transformers.
_BLOCK_PARTS = {
    "norm1": "layernorm_before",
    "attn.rpb": "attention.self.rpb",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_QKV = ("query", "key", "value")


def resize_bias_table(table: Tensor, kernel_size: int) -> Tensor:
    """A table of relative biases for another kernel size, by bicubic interpolation.

    Args:
        table: ``(heads, 2 * K - 1, 2 * K - 1)`` for a kernel size K.
        kernel_size: The wanted kernel size.
    """
    side = 2 * kernel_size - 1
    if table.shape[-1] == side:
        return table
    resized = F.interpolate(table[None].float(), (side, side), mode="bicubic", align_corners=False)
    return resized[0].to(table.dtype)


def convert_checkpoint(state_dict: Mapping[str, Any], model: NeighborhoodTransformer) -> dict[str, Tensor]:
    """Weights of any published layout under the names of a model, bias tables resized to its kernel size.

    Knows the papers' checkpoints of NAT, DiNAT, DiNAT_s and the isotropic models, their detection and segmentation
    backbones, and transformers' ``DinatForImageClassification``, ``DinatModel`` and ``DinatBackbone`` (and Nat).

    Args:
        state_dict: Weights, or a mapping that holds them under ``"model"`` or ``"state_dict"``.
        model: The model that they are for.

    Raises:
        ValueError: If it holds other things than tensors.
    """
    for wrapper in ("model", "state_dict"):
        state_dict = state_dict.get(wrapper, state_dict)
    strange = [name for name, weight in state_dict.items() if not isinstance(weight, Tensor)]
    if strange:
        raise ValueError(
            f"the checkpoint must hold tensors by name, but {strange[0]!r} is none; pass the part that does"
        )
    state_dict = {name.removeprefix("module."): weight for name, weight in state_dict.items()}
    if any(name.startswith("backbone.") for name in state_dict):
        # A whole detector: its other parts are of no use here.
        state_dict = {n.removeprefix("backbone."): w for n, w in state_dict.items() if n.startswith("backbone.")}
    weights = {n: w for n, w in state_dict.items() if not n.endswith("relative_position_index")}
    if any("embeddings.patch_embeddings" in name for name in weights):
        weights = _from_transformers(weights)
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = re.sub(r"^layers\.(\d+)\.(blocks|downsample)", r"levels.\1.\2", name)
        name = re.sub(r"^layers\.(\d+)\.", r"levels.0.blocks.\1.", name)
        renamed[name] = resize_bias_table(weight, model.kernel_size) if name.endswith(".rpb") else weight
    return renamed


def _from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {re.sub(r"^(dinat|nat)\.", "", name): weight for name, weight in weights.items()}
    converted: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = name.replace("embeddings.patch_embeddings.projection", "patch_embed.proj")
        name = name.replace("embeddings.norm", "patch_embed.norm").removeprefix("encoder.")
        name = re.sub(r"^hidden_states_norms\.stage(\d+)", lambda m: f"norm{int(m[1]) - 1}", name)
        name = re.sub(r"^layernorm\.", "norm.", name)
        name = re.sub(r"^classifier\.", "head.", name)
        name = re.sub(r"^levels\.(\d+)\.layers\.", r"levels.\1.blocks.", name)
        for here, there in _BLOCK_PARTS.items():
            name = re.sub(rf"(blocks\.\d+\.){re.escape(there)}", rf"\1{here}", name)
        if name.endswith("layer_scale_parameters"):
            base = name.removesuffix("layer_scale_parameters")
            converted[base + "gamma1"], converted[base + "gamma2"] = weight.unbind(0)
        elif (match := re.search(r"\.attention\.self\.(query|key|value)\.", name)) is not None:
            others = [_in_transformers(name).replace(f".{match[1]}.", f".{part}.") for part in _QKV]
            if not all(other in weights for other in others):
                converted[name] = weight  # to be named as one that does not fit
            elif match[1] == "query":
                converted[name.replace("attention.self.query", "attn.qkv")] = torch.cat([weights[o] for o in others])
        else:
            converted[name] = weight
    return converted


def _in_transformers(name: str) -> str:
    """Name of an encoder's weight in transformers' layout, from its new name."""
    return "encoder." + re.sub(r"^levels\.(\d+)\.blocks\.", r"levels.\1.layers.", name)


def to_transformers(model: NeighborhoodTransformer) -> dict[str, Tensor]:
    """The weights of a model in transformers' layout.

    For ``DinatForImageClassification``, or for ``DinatBackbone`` if the model has ``feature_norms``. Without a
    classifier the ``classifier`` entries are missing. The prefix is that of DiNAT, ``"dinat."``, also for NAT.

    Args:
        model: A NAT or DiNAT; DiNAT_s and the isotropic models do not exist in transformers.

    Raises:
        ValueError: If the model has no counterpart in transformers.
    """
    model = _unwrapped(model)
    if not isinstance(getattr(model.patch_embed, "proj", None), torch.nn.Sequential):
        raise ValueError("only NAT and DiNAT (tokenizer='conv') have a counterpart in transformers")
    converted: dict[str, Tensor] = {}
    prefix = "" if model.feature_norms else "dinat."
    scales: dict[str, list[Tensor]] = {}
    for name, weight in model.state_dict().items():
        if name.startswith("head."):
            converted[name.replace("head.", "classifier.")] = weight
            continue
        name = name.replace("patch_embed.proj", "embeddings.patch_embeddings.projection")
        name = name.replace("patch_embed.norm", "embeddings.norm")
        name = re.sub(r"^norm(\d+)", lambda m: f"hidden_states_norms.stage{int(m[1]) + 1}", name)
        name = re.sub(r"^norm\.", "layernorm.", name)
        name = re.sub(r"^levels\.(\d+)\.", r"encoder.levels.\1.", name)
        name = re.sub(r"(levels\.\d+)\.blocks\.", r"\1.layers.", name)
        for here, there in _BLOCK_PARTS.items():
            name = re.sub(rf"(layers\.\d+\.){re.escape(here)}(?=$|\.)", rf"\1{there}", name)
        if ".attn.qkv." in name:
            for part, third in zip(_QKV, weight.chunk(3), strict=True):
                converted[prefix + name.replace("attn.qkv", f"attention.self.{part}")] = third
        elif name.endswith(("gamma1", "gamma2")):
            scales.setdefault(prefix + name[: -len("gamma1")] + "layer_scale_parameters", []).append(weight)
        else:
            converted[prefix + name] = weight
    return converted | {name: torch.stack(pair) for name, pair in scales.items()}


def load_checkpoint(
    model: NeighborhoodTransformer | FeatureGetterNet,
    source: str | Path | Mapping[str, Any],
    *,
    new_classifier: bool = False,
) -> None:
    """Load published weights into a model.

    Args:
        model: The model, or one made with ``features_only=True``, which leaves out what it does not need.
        source: A file (.pth, .bin or .safetensors) or weights by name, in a layout of `convert_checkpoint`.
        new_classifier: Keep the model's classifier where the weights have none or one for other classes.

    Raises:
        ValueError: If the file cannot be read, or names or shapes do not fit; the message then lists every one.
        TypeError: If the model is no NAT or DiNAT.
    """
    features_only, model = isinstance(model, FeatureGetterNet), _unwrapped(model)
    weights = convert_checkpoint(source if isinstance(source, Mapping) else _read(Path(source)), model)
    own = model.state_dict()
    if features_only:
        weights = {name: weight for name, weight in weights.items() if name in own}
    if new_classifier:
        weights = {n: w for n, w in weights.items() if not n.startswith("head.") or _fits(own, n, w)}
    problems = [
        f"  missing: {name} {tuple(own[name].shape)}"
        for name in own
        if name not in weights and not (new_classifier and name.startswith("head."))
    ]
    for name, weight in weights.items():
        if name not in own:
            problems.append(f"  unexpected: {name} {tuple(weight.shape)}")
        elif own[name].shape != weight.shape:
            problems.append(f"  of another shape: {name} {tuple(weight.shape)}, the model has {tuple(own[name].shape)}")
    if problems:
        hint = ""
        if not new_classifier and all(": head." in problem for problem in problems):
            hint = "\nnew_classifier=True keeps the model's own classifier"
        raise ValueError(f"{len(problems)} of the weights do not fit the model:\n" + "\n".join(problems) + hint)
    model.load_state_dict(weights, strict=not new_classifier)


def _unwrapped(model: Any) -> NeighborhoodTransformer:
    """The model inside of what timm makes with ``features_only=True``."""
    inner = model.model if isinstance(model, FeatureGetterNet) else model
    if not isinstance(inner, NeighborhoodTransformer):
        raise TypeError(f"model must be a NAT or DiNAT (NeighborhoodTransformer), got {type(inner).__name__}")
    return inner


def _read(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"there is no file of weights {file}")
    try:
        return load_state_dict(str(file))
    except Exception as error:  # whatever the readers of the formats make of it
        raise ValueError(f"{file} is not a file of weights: {str(error).splitlines()[0]}") from error


def _fits(own: Mapping[str, Tensor], name: str, weight: Tensor) -> bool:
    return name in own and own[name].shape == weight.shape
