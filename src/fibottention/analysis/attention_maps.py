"""Where each head looks: attention maps of a model's layers on images."""

import copy
from dataclasses import dataclass

import torch
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from fibottention.adapters.timm import sparsify
from fibottention.layers.neighborhood_attention import NeighborhoodAttention2D
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.ops.arguments import WeightTransform
from fibottention.ops.attention import sparse_attention
from fibottention.ops.pairs import pair_sum_transposed
from fibottention.specs import Dense

__all__ = ["AttentionMap", "attention_maps", "captured_attention", "kept_weights"]


@dataclass(frozen=True)
class AttentionMap:
    """Attention of one layer, per head, over the patch tokens.

    Attributes:
        layer: Path of the layer in the model.
        values: ``(B, H, N)`` weights. With prefix tokens: those of the first prefix token (CLS) as query. Without:
            the mean over all queries.
        of_prefix: Which of the two it is.
    """

    layer: str
    values: Tensor
    of_prefix: bool


def attention_maps(model: nn.Module, images: Tensor) -> list[AttentionMap]:
    """Attention maps of all layers that attend over whole images.

    Layers that attend within windows (Swin, NAT and DiNAT), or mix their weights with others (ConViT's gated layers,
    CaiT's talking heads) are left out.

    Args:
        model: A model of timm, made sparse or not. It is not changed.
        images: ``(B, C, H, W)``, normalized.

    Raises:
        ValueError: If the model is not one that `sparsify` supports.
    """
    return [
        AttentionMap(name, _map(module, q, k, scale), module.prefix_tokens > 0)
        for name, module, q, k, scale in captured_attention(model, images)
    ]


_Captured = tuple[str, PatternAttention, Tensor, Tensor, float | None]


def captured_attention(model: nn.Module, images: Tensor) -> list[_Captured]:
    """Name, module, queries, keys and scale of the layers of `attention_maps`, on some images.

    Args:
        model: As for `attention_maps`.
        images: ``(B, C, H, W)``, normalized.

    Raises:
        ValueError: If the model is not one that `sparsify` supports.
    """
    if any(isinstance(module, NeighborhoodAttention2D) for module in model.modules()):
        return []
    if not any(isinstance(module, PatternAttention) for module in model.modules()):
        model = copy.deepcopy(model)
        sparsify(model, Dense())
    captured: dict[str, tuple[Tensor, Tensor, float | None]] = {}
    windowed = [f"{name}.sparse" for name, m in model.named_modules() if isinstance(m, WindowAttention)]
    modules = {name: m for name, m in model.named_modules() if isinstance(m, PatternAttention) and name not in windowed}

    def capture(name: str):
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> None:
            scale = kwargs.get("scale")
            captured[name] = (args[0], args[1], scale if isinstance(scale, float) else None)

        return hook

    hooks = [m.register_forward_pre_hook(capture(name), with_kwargs=True) for name, m in modules.items()]
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return [(name.removesuffix(".sparse"), modules[name], *of_layer) for name, of_layer in captured.items()]


def kept_weights(
    module: PatternAttention, q: Tensor, k: Tensor, scale: float, transform: WeightTransform | None
) -> Tensor:
    """The weights of a layer's kept pairs, ``(B, G, pairs)``, for queries and a scale after `with_temperature`."""
    _, weights = sparse_attention(
        q,
        k,
        k,
        module.pattern(q.shape[2]),
        bias=module.rpb,
        scale=scale,
        fill=module.spec.fill,
        transform=transform,
        return_weights=True,
        backend="gather",
    )
    return weights


@torch.no_grad()
def _map(module: PatternAttention, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    prefix = module.prefix_tokens
    q, scale = module.with_temperature(q, scale)
    pattern = module.pattern(q.shape[2])
    if prefix:
        # A prefix token sees every key that its pattern keeps; in most patterns all.
        scores = ((q[:, :, :1] @ k.transpose(-2, -1)) * scale).float()
        _, query, key = pattern.pairs()
        seen = torch.zeros(q.shape[2], dtype=torch.bool)
        seen[key[query == 0]] = True
        weights = scores.masked_fill(~seen.to(q.device), float("-inf")).softmax(-1)
        weights = weights if module.transform is None else module.transform(weights)
        return weights[:, :, 0, prefix:]
    weights = kept_weights(module, q, k, scale, module.transform)
    ones = torch.ones(*q.shape[:3], 1, dtype=weights.dtype, device=q.device)
    return pair_sum_transposed(weights, ones, pattern.key).squeeze(-1) / q.shape[2]
