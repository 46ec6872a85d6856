"""transformers: `sparsify` for its vision models, specs as attention implementations, and its Auto classes."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    DinatConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fibottention.adapters import timesformer
from fibottention.adapters.first_forward import FirstForward
from fibottention.adapters.report import LayerReport, SparsifyReport, check_layer
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.layers.sparse_attention import additive_mask
from fibottention.models import transformers_neighborhood as models
from fibottention.ops.attention import Backend
from fibottention.ops.eager import static_size
from fibottention.ops.rivals import LinformerOp
from fibottention.ops.twist import Twist
from fibottention.specs import AttentionSpec, make_spec, spec_names

__all__ = ["register", "sites", "sparsify"]


@dataclass(frozen=True)
class _Tokens:
    """The tokens that the attention layers of a model see.

    Attributes:
        prefix_tokens: Number of prefix tokens.
        grid_size: Length of each axis of the patch tokens: height and width, or time, height and width.
        sequences: Sequences per image.
    """

    prefix_tokens: int
    grid_size: tuple[int, ...]
    sequences: int = 1

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid_size)


@dataclass(frozen=True)
class _Site:
    """An attention module in a model, and the tokens it sees; None if it stays dense.

    Attributes:
        path: Path of the module in the model.
        module: The module.
        tokens: The tokens.
        parts: The models of transformers that hold the module, the innermost first.
        layer: Index of the layer in the innermost one, from 0.
    """

    path: str
    module: Any
    tokens: _Tokens | None
    parts: tuple[PreTrainedModel, ...]
    layer: int

    @property
    def part(self) -> PreTrainedModel:
        return self.parts[0]

    @property
    def where(self) -> str:
        return f"{type(self.module).__name__} at {self.path}"


def register(specs: Mapping[str, AttentionSpec] | None = None) -> None:
    """Make transformers use this project's attention and models, in this process.

    - Every spec becomes an attention implementation by its name and with its default settings:
      ``model.set_attn_implementation("fibottention")``, ``from_pretrained(..., attn_implementation="sata")``. A model
      that cannot take a spec raises ValueError; models whose attention transformers would leave as it is do so too.
    - DiNAT and NAT: ``AutoModel``, ``AutoModelForImageClassification`` and ``AutoBackbone`` give this project's classes
      for the model types ``"dinat"`` and ``"nat"``, and so do Mask2Former, OneFormer, MaskFormer and UperNet with such
      a backbone. Configurations and weights are transformers' own.

    Calling it again changes nothing, but for the specs that are given.

    Args:
        specs: Specs with settings of their own, by the names that they shall have.

    Raises:
        ValueError: If a name is that of an attention implementation of transformers, or of a spec.
        TypeError: If one is not a spec.
    """
    if not isinstance(specs, Mapping | None):
        raise TypeError(f"specs must be a mapping of names to specs, got {type(specs).__name__}")
    _prepare()
    for name, spec in (specs or {}).items():
        if name in spec_names() and _named.get(name, spec) != spec:
            raise ValueError(f"the name {name!r} is that of a spec with its default settings; choose another")
        if not isinstance(spec, AttentionSpec):
            raise TypeError(f"specs must hold attention specs, got {type(spec).__name__} for {name!r}")
        _name_spec(name, spec)
    AutoConfig.register("nat", models.NatConfig, exist_ok=True)
    for config, base, classifier, backbone in (
        (DinatConfig, models.DinatModel, models.DinatForImageClassification, models.DinatBackbone),
        (models.NatConfig, models.NatModel, models.NatForImageClassification, models.NatBackbone),
    ):
        AutoModel.register(config, base, exist_ok=True)
        AutoModelForImageClassification.register(config, classifier, exist_ok=True)
        AutoBackbone.register(config, backbone, exist_ok=True)


def sparsify(model: nn.Module, spec: AttentionSpec, *, backend: Backend = "auto") -> SparsifyReport:
    """Make a vision model of transformers attend as a spec says, in place.

    Weights and state-dict keys stay as they are; what a spec learns is added in each layer, under ``sparse``. The model
    gets a configuration of its own. Supports ViT, DeiT, ViT-MSN, I-JEPA, DINOv2 (also with registers), DINOv3, BEiT,
    Swin (within each window), the vision towers of CLIP and SigLIP, VideoMAE, ViViT and the encoder of V-JEPA 2 (over
    all tokens of a clip, in time and space), also inside other models. In TimeSformer it is the attention in space that
    changes, see `fibottention.adapters.timesformer.sparsify`.

    Args:
        model: The model.
        spec: How to attend; ``Dense()`` gives back ordinary attention.
        backend: As in `fibottention.sparse_attention`.

    Returns:
        A report of every layer, which prints as a table.

    Raises:
        ValueError: If the model holds no attention that can be replaced, or some that cannot.
        TypeError: If ``spec`` is not a spec.
    """
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec must be an AttentionSpec such as Fibottention(), got {type(spec).__name__}")
    if timesformer.holds_timesformer(model) and not sites(model):
        return timesformer.sparsify(model, spec, backend=backend)
    _prepare()
    name = spec.name if _named.get(spec.name) == spec else str(spec)
    if name not in _named:
        _name_spec(name, spec)
    report = _attach(model, sites(model), spec, backend)
    _separate_configs(model)
    for site in sites(model):
        site.module.config._attn_implementation = name
    return report


def _separate_configs(model: nn.Module) -> None:
    """Give the models in a module configurations that no other model has."""
    copies: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            copy.deepcopy(part.config, copies)
    for module in model.modules():
        own = getattr(module, "config", None)
        if id(own) in copies:
            module.config = copies[id(own)]


# Specs by the name of their attention implementation.
_named: dict[str, AttentionSpec] = {}


def _prepare() -> None:
    """Name all specs that have no name yet, and let models follow names."""
    for name in spec_names():
        if name not in _named:
            with contextlib.suppress(TypeError):  # a spec of the user's own may have options without default
                _name_spec(name, make_spec(name))
    _follow_names()


def _name_spec(name: str, spec: AttentionSpec) -> None:
    if name == "eager" or (name not in _named and name in AttentionInterface()):
        raise ValueError(f"the name {name!r} is that of an attention implementation of transformers; choose another")
    _named[name] = spec
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, sdpa_mask)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer with a spec, as transformers calls it."""
    if not hasattr(module, "sparse"):
        raise RuntimeError(
            f"{type(module).__name__} has no attention spec although its configuration names one; give it with "
            "model.set_attn_implementation(...) or fibottention.sparsify(model, spec)"
        )
    if module.sparse is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    if is_causal:
        raise ValueError("is_causal=True is not supported with an attention spec")
    bias = None if attention_mask is None else additive_mask(attention_mask, query)
    out = module.sparse(query, key, value, bias=bias, scale=scaling, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


def _attach(model: nn.Module, chosen: list[_Site], spec: AttentionSpec, backend: Backend = "auto") -> SparsifyReport:
    """Give some attention layers of a model their part of a spec; changes nothing if one cannot take it."""
    replaced = [site for site in chosen if site.tokens is not None]
    if not replaced:
        raise ValueError(_refusal(model))
    modules = [_pattern_attention(site, spec, backend) for site in replaced]
    layers = [_layer_report(site, sparse) for site, sparse in zip(replaced, modules, strict=True)]
    left = [site for site in chosen if site.tokens is None]
    for site, sparse in zip(replaced, modules, strict=True):
        site.module.sparse = sparse
    for site in left:
        site.module.sparse = None
    for part in {id(part): part for site in replaced for part in site.parts}.values():
        _GridHook.follow(part, [site for site in replaced if part in site.parts], spec)
    for part in {id(site.part): site.part for site in replaced}.values():
        own = [site for site in replaced if site.part is part]
        FirstForward.forget(part)
        if spec.transform() is not None:
            FirstForward.watch(part, {f"{site.path}.sparse": site.module.sparse for site in own})
    return SparsifyReport(type(model).__name__, spec, tuple(layers), tuple(site.path for site in left))


class _GridHook:
    """Tells the layers of a model the grid of patches of the images that it gets, which may be of any size."""

    def __init__(self, layers: list[PatternAttention], patch_size: tuple[int, int]) -> None:
        self.layers, self.patch_size = layers, patch_size

    @classmethod
    def follow(cls, part: PreTrainedModel, sites: list[_Site], spec: AttentionSpec) -> None:
        """Let the layers in a model know their grid, if their spec needs it and their tokens are those of an image."""
        for key, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, cls):
                del part._forward_pre_hooks[key]
                part._forward_pre_hooks_with_kwargs.pop(key, None)
        config = sites[0].module.config
        if spec.needs_grid and config.model_type != "swin":
            layers = [site.module.sparse for site in sites]
            part.register_forward_pre_hook(cls(layers, _pair(config.patch_size)), with_kwargs=True)

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        images = kwargs.get("pixel_values", args[0] if args else None)
        if isinstance(images, Tensor) and images.ndim == 4:
            grid = [static_size(size) // side for size, side in zip(images.shape[-2:], self.patch_size, strict=True)]
            for layer in self.layers:
                layer.grid_size = (grid[0], grid[1])


def _pattern_attention(site: _Site, spec: AttentionSpec, backend: Backend) -> PatternAttention:
    module, tokens = site.module, site.tokens
    assert tokens is not None
    if spec.needs_grid and len(tokens.grid_size) != 2:
        raise ValueError(f"{spec.name} needs tokens in two dimensions, but those of {site.where} are in time too")
    rates = [getattr(module, name, 0.0) for name in ("attention_dropout", "dropout", "dropout_prob")]
    check_layer(
        spec,
        site.where,
        has_bias=module.config.model_type in ("swin", "beit"),
        dropout=max(rate for rate in rates if isinstance(rate, float | int)),
    )
    device, dtype = _placement(site)
    return PatternAttention(
        spec,
        _num_heads(module),
        prefix_tokens=tokens.prefix_tokens,
        layer=site.layer,
        backend=backend,
        grid_size=(tokens.grid_size[0], tokens.grid_size[1]) if len(tokens.grid_size) == 2 else None,
        head_dim=_head_dim(module),
        sequence_length=tokens.prefix_tokens + tokens.num_tokens,
        device=device,
        dtype=dtype,
    )


def _placement(site: _Site) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for what a spec learns: those of the layer, which may be offloaded or quantized."""
    parameters = list(site.module.parameters())
    dtype = next((p.dtype for p in parameters if p.dtype.is_floating_point), site.part.dtype)
    device = parameters[0].device
    for module in site.module.modules():
        hook = getattr(module, "_hf_hook", None)  # of accelerate, which keeps weights elsewhere between uses
        execution_device = getattr(hook, "execution_device", None)
        if device.type == "meta" and execution_device is not None:
            device = torch.device(execution_device)
    return device, dtype if dtype.is_floating_point else torch.float32


def _layer_report(site: _Site, sparse: PatternAttention) -> LayerReport:
    assert site.tokens is not None
    head_dim = _head_dim(site.module)
    return LayerReport.of(
        sparse.cost(site.tokens.prefix_tokens + site.tokens.num_tokens, head_dim),
        path=site.path,
        attention_class=type(site.module).__name__,
        num_heads=sparse.num_heads,
        head_dim=head_dim,
        sequences=site.tokens.sequences,
        num_tokens=site.tokens.num_tokens,
        prefix_tokens=site.tokens.prefix_tokens,
    )


def _num_heads(module: Any) -> int:
    return module.num_heads if hasattr(module, "num_heads") else module.num_attention_heads


def _head_dim(module: Any) -> int:
    return module.head_dim if hasattr(module, "head_dim") else module.attention_head_size


def _follow_names() -> None:
    """Let models take up the specs that their configurations name, which transformers has no hook for."""
    if getattr(PreTrainedModel, "_follows_attention_specs", False):
        return
    post_init, initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights
    set_attn_implementation = PreTrainedModel.set_attn_implementation

    @functools.wraps(post_init)
    def post_init_with_spec(self: PreTrainedModel) -> None:
        post_init(self)
        if self.config._attn_implementation in _named and not sites(self) and not _has_parts(self):
            raise ValueError(_refusal(self))
        _take_up(self)

    @functools.wraps(initialize)
    def initialize_with_spec(self: PreTrainedModel, module: nn.Module, is_custom_code: bool = False) -> None:
        # from_pretrained makes parameters without values, for those too that a checkpoint lacks.
        learns = isinstance(module, PatternAttention | Twist | LinformerOp)
        if learns and not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()
        initialize(self, module, is_custom_code)

    @functools.wraps(set_attn_implementation)
    def set_with_spec(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        _check_all_follow(self, attn_implementation)
        configs = {id(m.config): m.config for m in self.modules() if isinstance(m, PreTrainedModel)}
        before = {key: config._attn_implementation_internal for key, config in configs.items()}
        set_attn_implementation(self, attn_implementation, *args, **kwargs)
        try:
            _take_up(self)
        except Exception:
            for key, config in configs.items():
                config._attn_implementation_internal = before[key]
            raise

    PreTrainedModel.post_init = post_init_with_spec
    PreTrainedModel._initialize_weights = initialize_with_spec
    PreTrainedModel.set_attn_implementation = set_with_spec
    PreTrainedModel._follows_attention_specs = True  # pyright: ignore[reportAttributeAccessIssue]


def _has_parts(model: nn.Module) -> bool:
    """Whether a model is made of other models of transformers."""
    return any(isinstance(other, PreTrainedModel) for other in model.modules() if other is not model)


def _check_all_follow(model: PreTrainedModel, request: Any) -> None:
    """Refuse a request that names a spec for a part of a model that would not follow it."""
    requested = dict(_requested(model.config, request))
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or _has_parts(part):
            continue
        name = requested.get(id(part.config), request if isinstance(request, str) else None)
        if name in _named and not any(site.tokens for site in sites(part)):
            hint = "" if part is model else "; a dictionary names one part, as in {'vision_config': 'fibottention'}"
            raise ValueError(_refusal(part) + hint)


def _requested(config: Any, request: Any) -> Iterator[tuple[int, str]]:
    """Configurations and the implementations asked for them, as transformers reads a name or a dictionary."""
    if isinstance(request, str):
        yield id(config), request
    elif isinstance(request, dict) and "" in request:
        yield id(config), request[""]
    for key in config.sub_configs:
        part = getattr(config, key, None)
        own = request if isinstance(request, str) else (request or {}).get(key)
        if part is not None and own is not None:
            yield from _requested(part, own)


def _take_up(model: PreTrainedModel) -> None:
    """Give the layers of a model the specs that their configurations name now, and take from them all others."""
    changed: dict[str, list[_Site]] = {}
    for site in sites(model):
        name = site.module.config._attn_implementation
        sparse = getattr(site.module, "sparse", None)
        if name in _named and site.tokens is None:
            site.module.sparse = None
        elif name in _named:
            if sparse is None or sparse.spec != _named[name]:  # what was learned under the same spec stays
                changed.setdefault(name, []).append(site)
        elif hasattr(site.module, "sparse"):
            FirstForward.forget(site.part)
            del site.module.sparse
    for name, own in changed.items():
        _attach(model, own, _named[name])


def _refusal(model: nn.Module) -> str:
    ignoring = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and getattr(module.config, "model_type", None) in _IGNORE
    }
    if ignoring:
        if min(ignoring).startswith("Timesformer"):
            return f"{min(ignoring)} takes no attention by name; use fibottention.sparsify(model, spec)"
        return f"sparsify does not support {min(ignoring)}, whose attention does not go through transformers' interface"
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    return (
        f"sparsify found no attention that it supports in {type(model).__name__} (model_type {model_type!r}); it "
        f"supports the model types {', '.join(sorted(_TOKENS))}"
    )


def sites(model: nn.Module) -> list[_Site]:
    """The attention modules in a model that are of a supported kind."""
    found: list[_Site] = []
    modules: dict[str, nn.Module] = dict(model.named_modules())
    counts: dict[int, int] = {}
    for path, module in modules.items():
        if type(module).__name__ in ("VideoMAEForPreTraining", "VideoMAEDecoder"):
            raise ValueError(
                "sparsify does not support VideoMAEForPreTraining, whose encoder sees some of the tokens only"
            )
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(module, PreTrainedModel) or model_type not in _TOKENS:
            continue
        if not (hasattr(module, "is_causal") and (hasattr(module, "scaling") or hasattr(module, "scale"))):
            continue  # not the module that calls the attention function
        pieces = path.split(".")
        above = [".".join(pieces[:count]) for count in range(len(pieces) - 1, -1, -1)]
        holders = [name for name in above if isinstance(modules[name], PreTrainedModel)]
        if not holders:
            continue  # a layer alone, without a model that calls it
        parts = tuple(part for name in holders if isinstance(part := modules[name], PreTrainedModel))
        tokens = _TOKENS[model_type](module, modules[above[0]], path.removeprefix(holders[0]).lstrip("."))
        layer = counts.get(id(parts[0]), 0)
        counts[id(parts[0])] = layer + (tokens is not None)
        found.append(_Site(path, module, tokens, parts, layer))
    return found


_Describe = Callable[[Any, Any, str], _Tokens | None]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _images(prefix_tokens: int) -> _Describe:
    def describe(module: Any, parent: Any, path: str) -> _Tokens:
        config = module.config
        registers = getattr(config, "num_register_tokens", 0)
        (height, width), (rows, columns) = _pair(config.image_size), _pair(config.patch_size)
        return _Tokens(prefix_tokens + registers, (height // rows, width // columns))

    return describe


def _windows(module: Any, parent: Any, path: str) -> _Tokens:
    height, width = parent.input_resolution
    side = parent.window_size
    return _Tokens(0, (side, side), -(-height // side) * -(-width // side))


def _clips(prefix_tokens: int) -> _Describe:
    def describe(module: Any, parent: Any, path: str) -> _Tokens:
        config = module.config
        if isinstance(config.tubelet_size, int):
            tubelet = (config.tubelet_size, *_pair(config.patch_size))
        else:
            tubelet = tuple(config.tubelet_size)
        size = (config.num_frames, *_pair(config.image_size))
        return _Tokens(prefix_tokens, tuple(whole // part for whole, part in zip(size, tubelet, strict=True)))

    return describe


def _vjepa2(module: Any, parent: Any, path: str) -> _Tokens | None:
    if not path.startswith("encoder."):
        return None  # the predictor sees chosen tokens, the pooler has queries of its own
    config = module.config
    side = config.crop_size // _pair(config.patch_size)[0]
    return _Tokens(0, (config.frames_per_clip // config.tubelet_size, side, side))


_TOKENS: dict[str, _Describe] = {
    "vit": _images(1),
    "deit": _images(2),
    "vit_msn": _images(1),
    "ijepa": _images(0),
    "dinov2": _images(1),
    "dinov2_with_registers": _images(1),
    "dinov3_vit": _images(1),
    "beit": _images(1),
    "clip_vision_model": _images(1),
    "siglip_vision_model": _images(0),
    "swin": _windows,
    "videomae": _clips(0),
    "vivit": _clips(1),
    "vjepa2": _vjepa2,
}
_IGNORE = ("timesformer", "swinv2", "hiera", "dinat", "nat")
