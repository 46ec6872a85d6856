"""transformers: `sparsify` for its vision models, specs as attention implementations, and its Auto classes."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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

from fibottention.adapters.first_forward import FirstForward
from fibottention.adapters.report import LayerReport, SparsifyReport
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.layers.sparse_attention import additive_mask
from fibottention.models import transformers_neighborhood as models
from fibottention.ops.attention import Backend
from fibottention.ops.twist import Twist
from fibottention.specs import AttentionSpec, GridSize, make_spec, spec_names

__all__ = ["register", "sparsify"]


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
    """An attention module in a model, and the tokens it sees; None if it stays dense."""

    path: str
    module: Any
    tokens: _Tokens | None


def register(specs: Mapping[str, AttentionSpec] | None = None) -> None:
    """Make transformers use this project's attention and models, in this process.

    - Every spec becomes an attention implementation by its name and with its default settings:
      ``model.set_attn_implementation("fibottention")``, ``from_pretrained(..., attn_implementation="sata")``. A model
      that cannot take a spec raises ValueError; models whose attention transformers would leave as it is do so too.
    - DiNAT and NAT: ``AutoModel``, ``AutoModelForImageClassification`` and ``AutoBackbone`` give this project's classes
      for the model types ``"dinat"`` and ``"nat"``, and so do Mask2Former, OneFormer, MaskFormer and UperNet with such
      a backbone. Configurations and weights are transformers' own.

    Calling it again changes nothing, but for further specs.

    Args:
        specs: Specs with settings of their own, by the names that they shall have.

    Raises:
        ValueError: If a name is that of an attention implementation of transformers.
    """
    for name, spec in {**{name: make_spec(name) for name in spec_names()}, **(specs or {})}.items():
        _name_spec(name, spec)
    _follow_names()
    AutoConfig.register("nat", models.NatConfig, exist_ok=True)
    for config, base, classifier, backbone in (
        (DinatConfig, models.DinatModel, models.DinatForImageClassification, models.DinatBackbone),
        (models.NatConfig, models.NatModel, models.NatForImageClassification, models.NatBackbone),
    ):
        AutoModel.register(config, base, exist_ok=True)
        AutoModelForImageClassification.register(config, classifier, exist_ok=True)
        AutoBackbone.register(config, backbone, exist_ok=True)


def sparsify(model: PreTrainedModel, spec: AttentionSpec, *, backend: Backend = "auto") -> SparsifyReport:
    """Make a vision model of transformers attend as a spec says, in place.

    Weights and state-dict keys stay as they are; what a spec learns is added in each layer, under ``sparse``. Supports
    ViT, DeiT, ViT-MSN, I-JEPA, DINOv2 (also with registers), DINOv3, BEiT, Swin (within each window), the vision towers
    of CLIP and SigLIP, VideoMAE, ViViT and the encoder of V-JEPA 2 (over all tokens of a clip, in time and space), also
    inside other models.

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
    report = _attach(model, spec, backend)
    _name_spec(spec.name, _named.get(spec.name, spec))
    for site in _sites(model):
        site.module.config._attn_implementation = spec.name
    return report


# Specs by the name of their attention implementation.
_named: dict[str, AttentionSpec] = {}


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
            f"{type(module).__name__} has no attention spec although its configuration names one; call "
            "fibottention.adapters.transformers.register() before the model is made, or give the spec with "
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


def _attach(model: PreTrainedModel, spec: AttentionSpec, backend: Backend = "auto") -> SparsifyReport:
    """Give every attention layer of a model its part of a spec; changes nothing if one cannot take it."""
    sites = _sites(model)
    replaced = [site for site in sites if site.tokens is not None]
    if not replaced:
        raise ValueError(_refusal(model))
    layers, modules = [], []
    for index, site in enumerate(replaced):
        sparse = _pattern_attention(site, spec, index, backend)
        modules.append(sparse)
        layers.append(_layer_report(site, sparse))
    for site, sparse in zip(replaced, modules, strict=True):
        site.module.sparse = sparse
    left = [site for site in sites if site.tokens is None]
    for site in left:
        site.module.sparse = None
    FirstForward.forget(model)
    if spec.transform() is not None:
        FirstForward.watch(model, {f"{site.path}.sparse": site.module.sparse for site in replaced})
    return SparsifyReport(type(model).__name__, spec, tuple(layers), tuple(site.path for site in left))


def _pattern_attention(site: _Site, spec: AttentionSpec, layer: int, backend: Backend) -> PatternAttention:
    module, tokens = site.module, site.tokens
    assert tokens is not None
    where = f"{type(module).__name__} at {site.path}"
    if spec.needs_grid and len(tokens.grid_size) != 2:
        raise ValueError(f"{spec.name} needs tokens in two dimensions, but those of {where} are in time too")
    if module.config.model_type == "swin" and spec.bias_size:
        raise ValueError(f"rel_pos_bias=True is not supported by {where}, which has its own bias")
    rates = [getattr(module, name, 0.0) for name in ("attention_dropout", "dropout", "dropout_prob")]
    dropout = max(rate for rate in rates if isinstance(rate, float | int))
    if spec.fill == "zero" and dropout:
        raise ValueError(
            "fill='zero' gives weight to pairs that are not stored, so it needs an attention dropout of 0, got "
            f"{dropout} at {site.path}"
        )
    grid_size: GridSize | None = None
    if len(tokens.grid_size) == 2 and tokens.grid_size[0] != tokens.grid_size[1]:
        grid_size = (tokens.grid_size[0], tokens.grid_size[1])
    weight = next(module.parameters())
    return PatternAttention(
        spec,
        _num_heads(module),
        prefix_tokens=tokens.prefix_tokens,
        layer=layer,
        backend=backend,
        grid_size=grid_size,  # the grid of square images follows from the number of tokens, whatever their size
        head_dim=_head_dim(module),
        device=weight.device,
        dtype=weight.dtype,
    )


def _layer_report(site: _Site, sparse: PatternAttention) -> LayerReport:
    assert site.tokens is not None
    return LayerReport.of(
        sparse.pattern(site.tokens.prefix_tokens + site.tokens.num_tokens),
        head_dim=_head_dim(site.module),
        sequences=site.tokens.sequences,
        path=site.path,
        attention_class=type(site.module).__name__,
        num_heads=sparse.num_heads,
        num_tokens=site.tokens.num_tokens,
        prefix_tokens=site.tokens.prefix_tokens,
    )


def _num_heads(module: Any) -> int:
    return module.num_heads if hasattr(module, "num_heads") else module.num_attention_heads


def _head_dim(module: Any) -> int:
    return module.head_dim if hasattr(module, "head_dim") else module.attention_head_size


def _follow_names() -> None:
    """Let models take up the specs that their configurations name, which transformers has no hook for."""
    if hasattr(PreTrainedModel.post_init, "__wrapped__"):
        return
    post_init, initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights
    set_attn_implementation = PreTrainedModel.set_attn_implementation

    @functools.wraps(post_init)
    def post_init_with_spec(self: PreTrainedModel) -> None:
        post_init(self)
        if (name := self.config._attn_implementation) in _named:
            sites = _sites(self)
            if not sites or not all(hasattr(site.module, "sparse") for site in sites):  # its parts come first
                _attach(self, _named[name])

    @functools.wraps(initialize)
    def initialize_with_spec(self: PreTrainedModel, module: nn.Module, is_custom_code: bool = False) -> None:
        # from_pretrained makes parameters without values, for those too that a checkpoint lacks.
        if isinstance(module, PatternAttention | Twist) and not getattr(module, "_is_hf_initialized", False):
            module.reset_parameters()
        initialize(self, module, is_custom_code)

    @functools.wraps(set_attn_implementation)
    def set_with_spec(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        configs = {id(m.config): m.config for m in self.modules() if isinstance(m, PreTrainedModel)}
        before = {key: config._attn_implementation_internal for key, config in configs.items()}
        if attn_implementation in _named if isinstance(attn_implementation, str) else False:
            _check_all_follow(self)
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


def _check_all_follow(model: PreTrainedModel) -> None:
    """Refuse a spec for a whole model of which a part would not follow it."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        has_parts = any(isinstance(other, PreTrainedModel) for other in part.modules() if other is not part)
        if not has_parts and not any(site.tokens for site in _sites(part)):
            hint = "" if part is model else "; a dictionary names one part, as in {'vision_config': 'fibottention'}"
            raise ValueError(_refusal(part) + hint)


def _take_up(model: PreTrainedModel) -> None:
    """Give the layers of a model the specs that their configurations name now, and take from them all others."""
    FirstForward.forget(model)
    sites = _sites(model)
    names = {site.module.config._attn_implementation for site in sites}
    for name in names & set(_named):
        _attach(model, _named[name])
    for site in sites:
        if site.module.config._attn_implementation not in _named and hasattr(site.module, "sparse"):
            del site.module.sparse


def _refusal(model: nn.Module) -> str:
    ignoring = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and getattr(module.config, "model_type", None) in _IGNORE
    }
    if ignoring:
        return f"sparsify does not support {min(ignoring)}, whose attention does not go through transformers' interface"
    return (
        f"sparsify found no attention that it supports in {type(model).__name__} (model_type "
        f"{getattr(model.config, 'model_type', '')!r}); it supports the model types {', '.join(sorted(_TOKENS))}"
    )


def _sites(model: nn.Module) -> list[_Site]:
    sites = []
    parents: dict[str, nn.Module] = dict(model.named_modules())
    for path, module in parents.items():
        if type(module).__name__ in ("VideoMAEForPreTraining", "VideoMAEDecoder"):
            raise ValueError(
                "sparsify does not support VideoMAEForPreTraining, whose encoder sees some of the tokens only"
            )
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(module, PreTrainedModel) or model_type not in _TOKENS:
            continue
        if not (hasattr(module, "is_causal") and (hasattr(module, "scaling") or hasattr(module, "scale"))):
            continue  # not the module that calls the attention function
        parent = parents[path.rpartition(".")[0]]
        sites.append(_Site(path, module, _TOKENS[model_type](module, parent, path)))
    return sites


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
    if "encoder" not in path.split("."):
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
