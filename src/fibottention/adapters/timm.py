"""`sparsify`: put an attention spec into a timm model, in place, keeping weights and state-dict keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from timm.models.cait import Cait
from timm.models.convit import GPSA, ConVit
from timm.models.eva import Eva
from timm.models.pit import PoolingVisionTransformer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fibottention.adapters.first_forward import FirstForward
from fibottention.adapters.report import LayerReport, SparsifyReport, check_layer
from fibottention.adapters.timm_attention import SPARSE_CLASSES, adopt
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer
from fibottention.ops.attention import Backend
from fibottention.ops.eager import static_size
from fibottention.specs import AttentionCost, AttentionSpec, GridSize

__all__ = ["is_supported", "sparsify"]


@dataclass(frozen=True)
class _Site:
    """An attention module in a model, and the tokens it sees."""

    root: Any
    parent: Any
    path: str
    grid_size: GridSize
    prefix_tokens: int
    sequences: int = 1

    @property
    def module(self) -> Any:
        return self.parent.attn

    @property
    def num_tokens(self) -> int:
        return self.grid_size[0] * self.grid_size[1]


def is_supported(module: nn.Module) -> bool:
    """Whether a module is of one of the families of models that `sparsify` supports."""
    return isinstance(module, tuple(_FAMILIES))


def sparsify(model: nn.Module, spec: AttentionSpec, *, backend: Backend = "auto") -> SparsifyReport:
    """Make a timm model attend as a spec says, in place.

    Weights and state-dict keys stay as they are; what a spec learns is added in each layer, as ``attn.sparse.rpb``,
    ``attn.sparse.temperature`` or ``attn.sparse.transform.scale``. Of a spec with a transform, the model checks in its
    first forward pass that every layer attended as it says.
    Supports VisionTransformer (ViT, DeiT, distilled, registers, pooled),
    Eva (EVA-02, DINOv3), SwinTransformer (within each window), ConVit, PoolingVisionTransformer (PiT) and Cait's patch
    blocks, also nested in another module. A model that was made sparse before gets the new spec.

    Args:
        model: The model.
        spec: How to attend; ``Dense()`` gives back ordinary attention.
        backend: As in `fibottention.sparse_attention`.

    Returns:
        A report of every replaced layer, which prints as a table.

    Raises:
        ValueError: If the model holds no attention that can be replaced, or some that cannot.
        TypeError: If ``model`` is not a module or ``spec`` not a spec.
    """
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec must be an AttentionSpec such as Fibottention(), got {type(spec).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    sites = [site for prefix, root in model.named_modules() if is_supported(root) for site in _sites(prefix, root)]
    if not sites:
        if any(is_supported(module) for module in model.modules()):
            raise ValueError(f"sparsify found no attention layer in {type(model).__name__}: it has no blocks")
        supported = ", ".join(sorted(cls.__name__ for cls in _FAMILIES))
        own = " (NAT and DiNAT have an attention of their own)" if isinstance(model, NeighborhoodTransformer) else ""
        raise ValueError(f"sparsify does not support {type(model).__name__}{own}; it supports timm's {supported}")
    layers, replacements = [], []
    for index, site in enumerate(sites):
        module = site.module
        _check_meaning(spec, site)
        sparse = PatternAttention(
            spec,
            module.num_heads,
            prefix_tokens=site.prefix_tokens,
            layer=index,
            backend=backend,
            grid_size=site.grid_size,
            head_dim=_head_dim(module),
            sequence_length=site.prefix_tokens + site.num_tokens,
            device=module.proj.weight.device,
            dtype=module.proj.weight.dtype,
        )
        layers.append(_layer_report(site, sparse))
        replacements.append((site, sparse))
    # Nothing is changed until every layer has been checked.
    for site, sparse in replacements:
        if type(site.module) in SPARSE_CLASSES:
            site.parent.attn = adopt(site.module, sparse)
        else:
            site.module.sparse = sparse
    for root in {id(site.root): site.root for site in sites}.values():
        _follow_grid(root, [sparse for site, sparse in replacements if site.root is root])
    if spec.transform() is not None:
        FirstForward.watch(model, {site.path: site.module for site, _ in replacements})
    return SparsifyReport(type(model).__name__, spec, tuple(layers))


class _GridHook:
    """Tells attention layers the grid of patches of the image that a patch embedding gets, which may be of any size."""

    def __init__(self, layers: list[PatternAttention]) -> None:
        self.layers = layers

    def __call__(self, patch_embed: Any, inputs: tuple[Any, ...]) -> None:
        height, width = patch_embed.dynamic_feat_size(inputs[0].shape[-2:])
        for layer in self.layers:
            layer.grid_size = (static_size(height), static_size(width))


def _follow_grid(root: Any, layers: list[PatternAttention]) -> None:
    """Let the layers of a model whose tokens are all patches of the image know their grid."""
    if not hasattr(root.patch_embed, "dynamic_feat_size") or isinstance(root, SwinTransformer):
        return
    hooks = root.patch_embed._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _GridHook)]:
        del hooks[key]
    if layers[0].spec.needs_grid:
        root.patch_embed.register_forward_pre_hook(_GridHook(layers))


def _head_dim(module: Any) -> int:
    return getattr(module, "head_dim", None) or module.proj.in_features // module.num_heads


def _check_meaning(spec: AttentionSpec, site: _Site) -> None:
    """Refuse a spec that would mean something else in an attention class than in its paper."""
    name = _dense_name(site.module)
    if name in ("GPSA", "TalkingHeadAttn") and not spec.only_pairs:
        raise ValueError(
            f"{spec.name} is not supported by {name} at {site.path}, whose weights are mixed with others: it would "
            "not mean there what its paper means"
        )
    where = f"{name} at {site.path}"
    check_layer(spec, where, has_bias=name == "WindowAttention", dropout=site.module.attn_drop.p)


def _layer_report(site: _Site, sparse: PatternAttention) -> LayerReport:
    module = site.module
    dense_class = _dense_name(module)
    length, head_dim = site.prefix_tokens + site.num_tokens, _head_dim(module)
    cost = sparse.cost(length, head_dim)
    if dense_class == "TalkingHeadAttn":
        cost = AttentionCost.of(sparse.pattern(length).union(), head_dim)
    return LayerReport.of(
        cost,
        path=site.path,
        attention_class=dense_class or "",
        num_heads=module.num_heads,
        head_dim=head_dim,
        num_tokens=site.num_tokens,
        prefix_tokens=site.prefix_tokens,
        sequences=site.sequences,
    )


def _dense_name(module: nn.Module | None) -> str | None:
    """Name of the timm class that a module is or stands for, or None if it is none that can be made sparse."""
    for dense, sparse in SPARSE_CLASSES.items():
        if type(module) is dense or isinstance(module, sparse):
            return dense.__name__
    return None


def _sites(prefix: str, root: nn.Module) -> list[_Site]:
    if not isinstance(getattr(root, "patch_drop", None), nn.Identity | None):
        raise ValueError("sparsify needs patch_drop_rate=0: dropping patches would break the order of the tokens")
    find = next(find for cls, find in _FAMILIES.items() if isinstance(root, cls))
    sites = []
    for path, block, grid_size, prefix_tokens, sequences in find(root):
        module = getattr(block, "attn", None)
        if _dense_name(module) is None:
            found = type(block if module is None else module).__name__
            raise ValueError(f"sparsify does not support {found}, the attention of {type(root).__name__} at {path}")
        sites.append(_Site(root, block, f"{prefix}.{path}.attn".lstrip("."), grid_size, prefix_tokens, sequences))
    return sites


_Found = Iterator[tuple[str, nn.Module, GridSize, int, int]]


def _plain_blocks(model: Any) -> _Found:
    for i, block in enumerate(model.blocks):
        yield f"blocks.{i}", block, model.patch_embed.grid_size, model.num_prefix_tokens, 1


def _convit_blocks(model: Any) -> _Found:
    # The class token joins after the last GPSA block.
    for i, block in enumerate(model.blocks):
        prefix_tokens = 0 if isinstance(block.attn, GPSA) else 1
        yield f"blocks.{i}", block, model.patch_embed.grid_size, prefix_tokens, 1


def _cait_blocks(model: Any) -> _Found:
    for i, block in enumerate(model.blocks):
        yield f"blocks.{i}", block, model.patch_embed.grid_size, 0, 1


def _pit_blocks(model: Any) -> _Found:
    height, width = model.patch_embed.height, model.patch_embed.width
    for s, stage in enumerate(model.transformers):
        if s:
            height, width = (height + 1) // 2, (width + 1) // 2
        for i, block in enumerate(stage.blocks):
            yield f"transformers.{s}.blocks.{i}", block, (height, width), model.cls_token.shape[1], 1


def _swin_blocks(model: Any) -> _Found:
    for s, stage in enumerate(model.layers):
        for i, block in enumerate(stage.blocks):
            windows = 1
            for size, window in zip(block.input_resolution, block.window_size, strict=True):
                windows *= -(-size // window)
            yield f"layers.{s}.blocks.{i}", block, block.window_size, 0, windows


_FAMILIES = {
    VisionTransformer: _plain_blocks,
    Eva: _plain_blocks,
    SwinTransformer: _swin_blocks,
    ConVit: _convit_blocks,
    PoolingVisionTransformer: _pit_blocks,
    Cait: _cait_blocks,
}
