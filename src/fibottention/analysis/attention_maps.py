"""Where each head looks: attention maps of a model's layers on images."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fibottention.adapters import sparsify
from fibottention.layers.neighborhood_attention import NeighborhoodAttention2D
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.ops.arguments import WeightTransform
from fibottention.ops.attention import sparse_attention
from fibottention.ops.pairs import pair_sum_transposed
from fibottention.specs import Dense, Neighborhood

__all__ = [
    "AttentionMap",
    "CapturedLayer",
    "attention_maps",
    "captured_attention",
    "check_images",
    "evaluating",
    "patch_grid",
]


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

    Layers that attend within windows (Swin), or mix their weights with others (ConViT's gated layers, CaiT's talking
    heads) are left out, and so are neighborhoods that do not fit into the image (NAT and DiNAT pad it for them).

    Args:
        model: A model of timm or transformers, made sparse or not. It is not changed.
        images: ``(B, C, H, W)``, normalized.

    Raises:
        ValueError: If the model is not one that `sparsify` supports.
    """
    return captured_attention(
        model, images, lambda layer: AttentionMap(layer.name, _map(layer), layer.module.prefix_tokens > 0)
    )


@dataclass(frozen=True)
class CapturedLayer:
    """What an attention layer got and gave for some images.

    Attributes:
        name: Path of the layer in the model.
        module: Its attention between the projections.
        q: Queries ``(B, H, N, D)``, after what the spec does to them.
        k: Keys.
        v: Values.
        out: Output of each head, before the output projection.
        bias: Dense bias of the scores, or None.
        scale: Factor of the scores.
    """

    name: str
    module: PatternAttention
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    bias: Tensor | None
    scale: float

    def weights(self, transform: WeightTransform | None = None) -> Tensor:
        """The weights of the kept pairs, ``(B, G, pairs)``, with a transform or before any."""
        _, weights = sparse_attention(
            self.q,
            self.k,
            self.k,
            self.module.pattern(self.q.shape[2]),
            bias=self.module.with_table(self.bias, self.module.pattern(self.q.shape[2])),
            scale=self.scale,
            fill=self.module.spec.fill,
            transform=transform,
            return_weights=True,
            backend="gather",
        )
        return weights


T = TypeVar("T")


@torch.no_grad()
def captured_attention(model: nn.Module, images: Tensor, use: Callable[[CapturedLayer], T]) -> list[T]:
    """What a function makes of each layer of `attention_maps`, in the order in which they are used.

    The tensors of a layer are given up before the next one is computed.

    Args:
        model: As for `attention_maps`.
        images: ``(B, C, H, W)``, normalized.
        use: Called with each layer.

    Raises:
        ValueError: If the model is not one that `sparsify` supports, or takes more than images.
    """
    check_images(images)
    main_input = getattr(model, "main_input_name", "pixel_values")  # of transformers
    if main_input != "pixel_values":
        raise ValueError(f"{type(model).__name__} takes {main_input}; give the part of it that takes images only")
    if not any(isinstance(module, PatternAttention | NeighborhoodAttention2D) for module in model.modules()):
        model = copy.deepcopy(model)
        sparsify(model, Dense())
    made: list[T] = []
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PatternAttention) and not _is_windowed(model.get_submodule(name.removesuffix(".sparse")))
    }

    def capture(name: str):
        def hook(module: PatternAttention, args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            q, scale = module.with_temperature(args[0], kwargs.get("scale"))
            layer = name.removesuffix(".sparse")
            made.append(use(CapturedLayer(layer, module, q, args[1], args[2], out, kwargs.get("bias"), scale)))

        return hook

    def capture_neighborhood(name: str):
        def hook(module: NeighborhoodAttention2D, args: tuple[Tensor, ...], out: Tensor) -> None:
            layer = _neighborhood_layer(name, module, args[0])
            if layer is not None:
                made.append(use(layer))

        return hook

    hooks = [module.register_forward_hook(capture(name), with_kwargs=True) for name, module in modules.items()]
    for name, module in model.named_modules():
        if isinstance(module, NeighborhoodAttention2D):
            hooks.append(module.register_forward_hook(capture_neighborhood(name)))
    with evaluating(model, hooks):
        model(images)
    return made


def _neighborhood_layer(name: str, module: NeighborhoodAttention2D, x: Tensor) -> CapturedLayer | None:
    """A layer of NAT or DiNAT as one with a pattern; None if there is none for this grid."""
    grid, kernel, dilation = x.shape[1:3], set(module.kernel_size), set(module.dilation)
    if len(kernel) > 1 or len(dilation) > 1 or set(module.stride) != {1} or any(module.is_causal):
        return None
    spec = Neighborhood(kernel.pop(), dilation.pop(), rel_pos_bias=module.rpb is not None)
    if min(grid) < spec.kernel_size * module.dilation[0]:
        return None
    attention = PatternAttention(spec, module.num_heads, grid_size=(grid[0], grid[1]), device=x.device, dtype=x.dtype)
    if module.rpb is not None and attention.rpb is not None:
        attention.rpb.copy_(module.rpb.flatten(1))
    qkv = module.qkv(x).flatten(1, 2).unflatten(-1, (3, module.num_heads, module.head_dim))
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    out = attention(q, k, v, scale=module.scale)
    return CapturedLayer(name, attention, q, k, v, out, None, module.scale)


@contextlib.contextmanager
def evaluating(model: nn.Module, hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """A model in evaluation mode; afterwards every part is in the mode it was in, and the hooks are gone."""
    was_training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in was_training.items():
            module.training = training
        for hook in hooks:
            hook.remove()


def check_images(images: Tensor) -> None:
    """Check that something is a batch of images or clips, as a model gets them.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(images, Tensor) or images.ndim not in (4, 5) or not len(images) or not images.is_floating_point():
        got = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a tensor (B, C, H, W) of normalized numbers, got {got}")


def patch_grid(num_tokens: int, image_size: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of square patches that make so many of an image.

    Args:
        num_tokens: Number of patches.
        image_size: Height and width of the image.

    Raises:
        ValueError: If no such grid has so many patches.
    """
    height, width = image_size
    side = (height * width / num_tokens) ** 0.5
    rows, columns = max(1, round(height / side)), max(1, round(width / side))
    if rows * columns != num_tokens:
        raise ValueError(f"{num_tokens} patches form no grid of squares on an image of {height} x {width}")
    return rows, columns


def _is_windowed(module: nn.Module) -> bool:
    return isinstance(module, WindowAttention) or type(module).__name__ == "SwinAttention"


@torch.no_grad()
def _map(layer: CapturedLayer) -> Tensor:
    module, q, k = layer.module, layer.q, layer.k
    prefix, pattern = module.prefix_tokens, module.pattern(q.shape[2])
    if prefix:
        # A prefix token sees every key that its pattern keeps; in most patterns all.
        scores = ((q[:, :, :1] @ k.transpose(-2, -1)) * layer.scale).float()
        if layer.bias is not None:
            scores = scores + layer.bias[:, :, :1]
        _, query, key = pattern.pairs()
        seen = torch.zeros(q.shape[2], dtype=torch.bool)
        seen[key[query == 0]] = True
        weights = scores.masked_fill(~seen.to(q.device), float("-inf")).softmax(-1)
        weights = weights if module.transform is None else module.transform(weights)
        return weights[:, :, 0, prefix:]
    weights = layer.weights(module.transform)
    ones = torch.ones(*q.shape[:3], 1, dtype=weights.dtype, device=q.device)
    return pair_sum_transposed(weights, ones, pattern.key).squeeze(-1) / q.shape[2]
