"""Video models of transformers with attention specs."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForVideoClassification,
    TimesformerConfig,
    VideoMAEConfig,
    VivitConfig,
)

from fibottention.adapters import SparsifyReport, timesformer
from fibottention.adapters import transformers as adapter
from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.config import attention_spec
from fibottention.tasks.video.config import VideoConfig
from fibottention.tasks.weights import check_classes, load_into
from fibottention.training.run import load_weights

__all__ = ["build_model"]

_CONFIGS: dict[str, Any] = {
    "timesformer": TimesformerConfig,
    "videomae": VideoMAEConfig,
    "vivit": VivitConfig,
}
_RESERVED = {
    "image_size": "data.image_size",
    "num_frames": "data.num_frames",
    "num_labels": "the classes of the data",
    "drop_path_rate": "model.drop_path",
}
# Of a model's configuration: what its weights' shapes depend on, and what says nothing about its layers.
_SHAPES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "patch_size",
    "tubelet_size",
)
_NO_SIZES = ("architectures", "dtype", "id2label", "label2id", "transformers_version")


def build_model(config: VideoConfig, num_classes: int) -> tuple[nn.Module, SparsifyReport | None]:
    """The model of a configuration, with its attention specs put in, and what they did.

    Raises:
        UserError: If the model is unknown, cannot be made so, or cannot take a spec.
    """
    name = config.model.name
    spec = attention_spec(config.attention)
    temporal = attention_spec(config.temporal_attention, "temporal_attention")
    for option in config.model.options:
        if option in _RESERVED:
            raise UserError(f"model.options must not hold {option}, which comes from {_RESERVED[option]}")
    if config.model.pretrained:
        model = _pretrained(config, num_classes)
    else:
        model = _from_config(_model_config(config, num_classes))
    is_timesformer = timesformer.holds_timesformer(model)
    if temporal is not None and not is_timesformer:
        raise UserError(
            f"temporal_attention is for TimeSformer, which {name} is not: its attention spec is for all tokens"
        )
    report = None
    try:
        if is_timesformer and (spec is not None or temporal is not None):
            report = timesformer.sparsify(model, spec, temporal=temporal)
        elif spec is not None:
            report = adapter.sparsify(model, spec)
    except ValueError as error:
        raise UserError(f"attention in {name}: {error}") from error
    if config.model.checkpoint is not None:
        weights = load_weights(Path(config.model.checkpoint))
        load_into(model, weights, config.model.checkpoint, new_classifier=config.train.epochs > 0)
    return model, report


def _model_config(config: VideoConfig, num_classes: int) -> Any:
    """Transformers' configuration of the options."""
    name, data = config.model.name, config.data
    model_config = _CONFIGS[name](image_size=data.image_size, num_frames=data.num_frames, num_labels=num_classes)
    known = [key for key in model_config.to_dict() if key not in _RESERVED]
    for option, value in config.model.options.items():
        if option not in known:
            raise UserError(f"model.options: {name} has no option {option!r}{nearest(option, known)}")
        setattr(model_config, option, value)
    if config.model.drop_path:
        if not hasattr(model_config, "drop_path_rate"):
            raise UserError(f"model.drop_path is for timesformer; {name} has no stochastic depth")
        model_config.drop_path_rate = config.model.drop_path
    return model_config


def _from_config(model_config: Any) -> nn.Module:
    heads, width = model_config.num_attention_heads, model_config.hidden_size
    if not isinstance(heads, int) or heads < 1:
        raise UserError(f"model.options: num_attention_heads must be a whole number of at least 1, got {heads}")
    if width % heads:
        raise UserError(f"model.options: hidden_size={width} must be a multiple of num_attention_heads={heads}")
    tubelet: Any = getattr(model_config, "tubelet_size", 1)
    frames = tubelet if isinstance(tubelet, int) else tubelet[0]
    patch = getattr(model_config, "patch_size", None) or (1 if isinstance(tubelet, int) else tubelet[1])
    if not isinstance(patch, int):
        raise UserError(f"model.options: patch_size must be one number for square patches, got {patch}")
    if model_config.image_size % patch:
        raise UserError(f"data.image_size={model_config.image_size} must be a multiple of the patch size {patch}")
    if model_config.num_frames % frames:
        raise UserError(
            f"data.num_frames={model_config.num_frames} must be a multiple of the tubelet's {frames} frames"
        )
    try:
        return AutoModelForVideoClassification.from_config(
            model_config, attn_implementation=_implementation(model_config)
        )
    except Exception as error:  # whatever the model's constructor makes of its options
        raise UserError(f"model {model_config.model_type} cannot be made: {' '.join(str(error).split())}") from error


def _implementation(model_config: Any) -> str:
    """The attention of the layers that no spec changes."""
    return "eager" if model_config.model_type == "timesformer" else "sdpa"


def _pretrained(config: VideoConfig, num_classes: int) -> nn.Module:
    """A pretrained model from a folder or a hub; only its classifier may be made anew.

    The options take over its sizes, so that a run of it can be opened without it.
    """
    source, name, frames = str(config.model.pretrained), config.model.name, config.data.num_frames
    if not Path(source).is_dir() and "/" not in source:
        raise UserError(f"model.pretrained={source} is neither a folder here nor a name on the hub (OWNER/NAME)")
    try:
        found = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"model.pretrained={source} cannot be loaded: {str(error).splitlines()[0]}") from error
    if found.model_type != name:
        raise UserError(f"model.pretrained={source} is a {found.model_type}, but model.name={name}")
    if found.image_size != config.data.image_size:
        raise UserError(f"data.image_size must be {found.image_size} for model.pretrained={source}")
    if found.num_frames != frames and name != "timesformer":
        raise UserError(f"data.num_frames must be {found.num_frames} for model.pretrained={source}, got {frames}")
    usual = _CONFIGS[name]().to_dict()
    sizes = {
        key: value
        for key, value in found.to_dict().items()
        if key in usual and value != usual[key] and key not in (*_RESERVED, *_NO_SIZES)
    }
    for option, value in config.model.options.items():
        if option in _SHAPES and getattr(found, option, value) != value:
            theirs = getattr(found, option)
            raise UserError(f"model.options.{option}={value} differs from the {theirs} of model.pretrained={source}")
    config.model.options = {**sizes, **config.model.options}
    model_config = _model_config(config, num_classes)
    model_config.num_frames = found.num_frames
    try:
        model, info = AutoModelForVideoClassification.from_pretrained(
            source,
            config=model_config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            attn_implementation=_implementation(model_config),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.pretrained={source} cannot be loaded: {str(error).splitlines()[0]}") from error
    differing = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])]
    if not config.train.epochs and any(key.startswith("classifier.") for key in differing):
        has_classifier = not any(key.startswith("classifier.") for key in info["missing_keys"])
        check_classes(source, (has_classifier and found.num_labels) or 0, num_classes)
    # A VideoMAE that was trained without labels has no norm before its classifier.
    if strange := [key for key in differing if not key.startswith(("classifier.", "fc_norm."))]:
        raise UserError(
            f"model.pretrained={source} does not fit the options: {len(strange)} weights differ, such as {min(strange)}"
        )
    if found.num_frames != frames:
        # As transformers does in each forward pass of clips of another length.
        embeddings = model.timesformer.embeddings
        times = nn.functional.interpolate(embeddings.time_embeddings.transpose(1, 2), size=frames, mode="nearest")
        embeddings.time_embeddings = nn.Parameter(times.transpose(1, 2).detach().clone())
        model.config.num_frames = frames
    return model
