"""NAT, DiNAT, DiNAT_s and their isotropic forms: transformers of neighborhood attention.

Sources: Hassani et al., arXiv 2204.07143 (NAT), and Hassani and Shi, arXiv 2209.15001 (DiNAT). Parameter names are
those of the published classification checkpoints.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, trunc_normal_
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from fibottention.layers.neighborhood_attention import NeighborhoodAttention2D
from fibottention.ops.neighborhood import NeighborhoodBackend

__all__ = ["Dilations", "NeighborhoodTransformer", "level_dilations"]

Dilations = Literal["max", "gradual"] | Sequence[int | Sequence[int]]
"""Dilations of a model.

``"max"``, ``"gradual"``, or an entry per level: a number per layer, or one number D for 1, D, 1, D, ...
"""

# Steps in which a dilation grows to the largest one in the published settings.
_GRADUAL_STEPS = 3


def level_dilations(depth: int, largest: int, *, gradual: bool = False) -> list[int]:
    """Dilations of the layers of a level: every other layer, from the first on, has dilation 1.

    Args:
        depth: Number of layers.
        largest: The largest dilation.
        gradual: Let the dilations of the other layers grow to the largest one in cycles of up to three steps, as in
            the published settings for detection and segmentation, instead of taking the largest at once.
    """
    others = depth // 2
    steps = min(_GRADUAL_STEPS, others) if gradual else 1
    grown = [-(-largest * (i % steps + 1) // steps) for i in range(others)]
    return [grown[i // 2] if i % 2 else 1 for i in range(depth)]


class ConvTokenizer(nn.Module):
    """Overlapping patch embedding: two 3x3 convolutions of stride 2, then LayerNorm.

    Args:
        in_chans: Input channels.
        embed_dim: Output channels.
    """

    def __init__(self, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.stride = 4
        self.proj = nn.Sequential(
            nn.Conv2d(in_chans, embed_dim // 2, 3, 2, 1), nn.Conv2d(embed_dim // 2, embed_dim, 3, 2, 1)
        )
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """From ``(B, in_chans, H, W)`` to ``(B, H / 4, W / 4, embed_dim)``, rounded up."""
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class PatchEmbed(nn.Module):
    """Patch embedding: one convolution over patches that do not overlap, then LayerNorm.

    Args:
        in_chans: Input channels.
        embed_dim: Output channels.
        patch_size: Side of a patch in pixels; images are padded at the end to a multiple of it.
    """

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.stride = patch_size
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """From ``(B, in_chans, H, W)`` to ``(B, H / patch_size, W / patch_size, embed_dim)``, rounded up."""
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % self.stride, 0, -height % self.stride))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class ConvDownsampler(nn.Module):
    """A 3x3 convolution of stride 2 without bias, then LayerNorm.

    Args:
        dim: Input channels; the output has twice as many.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction = nn.Conv2d(dim, 2 * dim, 3, 2, 1, bias=False)
        self.norm = nn.LayerNorm(2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """From ``(B, H, W, dim)`` to ``(B, H / 2, W / 2, 2 * dim)``, rounded up."""
        return self.norm(self.reduction(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Swin's downsampler: LayerNorm over four neighbours, then a linear layer without bias.

    Args:
        dim: Input channels; the output has twice as many.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """From ``(B, H, W, dim)`` to ``(B, H / 2, W / 2, 2 * dim)``, rounded up."""
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        quarters = [x[:, i::2, j::2] for j in range(2) for i in range(2)]
        return self.reduction(self.norm(torch.cat(quarters, -1)))


class Block(nn.Module):
    """Neighborhood attention and an MLP, each after LayerNorm and in a residual branch.

    Args:
        dim: Size of the token embeddings.
        attention: The attention layer.
        mlp_ratio: Hidden size of the MLP as a multiple of ``dim``.
        proj_drop: Dropout probability in the MLP.
        drop_path: Stochastic depth probability.
        layer_scale: Initial value of the scales of the branches; no scales if None.
    """

    def __init__(
        self,
        dim: int,
        attention: NeighborhoodAttention2D,
        mlp_ratio: float,
        proj_drop: float,
        drop_path: float,
        layer_scale: float | None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.gamma1 = self.gamma2 = None
        if layer_scale is not None:
            self.gamma1 = nn.Parameter(torch.full((dim,), layer_scale))
            self.gamma2 = nn.Parameter(torch.full((dim,), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        """From tokens ``(B, H, W, dim)`` to tokens."""
        attended = self.attn(self.norm1(x))
        x = x + self.drop_path(attended if self.gamma1 is None else self.gamma1 * attended)
        hidden = self.mlp(self.norm2(x))
        return x + self.drop_path(hidden if self.gamma2 is None else self.gamma2 * hidden)


class Level(nn.Module):
    """Blocks of one resolution, and the downsampler after them, which the model calls.

    Args:
        blocks: The blocks.
        downsample: The downsampler, an identity in the last level.
    """

    def __init__(self, blocks: list[Block], downsample: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.downsample = downsample
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """From tokens ``(B, H, W, dim)`` to tokens of the same resolution."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)


def _height_and_width(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    numbers = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, Sequence) else ()
    if len(numbers) != 2 or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ValueError(f"{name} must be one whole number above 0 or two, got {size!r}")
    return numbers[0], numbers[1]


class NeighborhoodTransformer(nn.Module):
    """A transformer of neighborhood attention layers for images of any size.

    With dilations it is DiNAT; with ``tokenizer="patch"`` it is DiNAT_s (Swin's skeleton); with one level it is
    isotropic. Registered with timm under the published names, ``timm.create_model("dinat_tiny")``.

    Args:
        in_chans: Input channels.
        num_classes: Classes; 0 for features.
        global_pool: ``"avg"``, or ``""`` for the feature map.
        embed_dim: Channels of the first level; they double from level to level.
        depths: Layers per level.
        num_heads: Heads per level.
        kernel_size: Side of the neighborhoods.
        dilations: Dilations, as in `Dilations`; all 1 if None.
        tokenizer: ``"conv"`` (overlapping convolutions, also between the levels) or ``"patch"`` (Swin's).
        patch_size: Side of a patch; 4 with ``"conv"``.
        mlp_ratio: Hidden size of the MLPs as a multiple of the channels.
        qkv_bias: Whether the qkv projections have a bias.
        layer_scale: Initial value of scales of the residual branches; none if None.
        drop_rate: Dropout probability before the classifier.
        proj_drop_rate: Dropout probability after the projections.
        attn_drop_rate: Dropout probability of the attention weights.
        drop_path_rate: Largest stochastic depth probability; it grows linearly over the layers.
        feature_norms: A LayerNorm for the output of each level in place of the final one and the classifier, as in the
            published detection and segmentation backbones; ``num_classes`` is 0 then.
        img_size: Size of images in pixels, from which ``"max"`` and ``"gradual"`` dilations are derived; the model
            takes any size whatever it is.
        backend: As in `fibottention.na2d`.

    Raises:
        ValueError: If the sizes do not fit together.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        depths: Sequence[int] = (3, 4, 6, 5),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        kernel_size: int = 7,
        dilations: Dilations | None = None,
        tokenizer: Literal["conv", "patch"] = "conv",
        patch_size: int = 4,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = True,
        layer_scale: float | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        feature_norms: bool = False,
        img_size: int | tuple[int, int] = 224,
        backend: NeighborhoodBackend = "auto",
    ) -> None:
        super().__init__()
        if len(depths) != len(num_heads):
            raise ValueError(f"depths and num_heads must have one entry per level, got {depths} and {num_heads}")
        if tokenizer not in ("conv", "patch"):
            raise ValueError(f"tokenizer must be 'conv' or 'patch', got {tokenizer!r}")
        if tokenizer == "conv" and patch_size != 4:
            raise ValueError(f"patch_size must be 4 with tokenizer='conv', got {patch_size}")
        for name, number, least in (
            ("kernel_size", kernel_size, 1),
            ("patch_size", patch_size, 1),
            ("num_classes", num_classes, 0),
        ):
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {number!r}")
        self._check_pool(global_pool)
        self.in_chans = in_chans
        self.num_classes = 0 if feature_norms else num_classes
        self.global_pool = global_pool
        self.kernel_size = kernel_size
        self.img_size = _height_and_width("img_size", img_size)
        dims = [embed_dim * 2**level for level in range(len(depths))]
        self.num_features = self.head_hidden_size = dims[-1]
        if tokenizer == "conv":
            self.patch_embed: ConvTokenizer | PatchEmbed = ConvTokenizer(in_chans, embed_dim)
        else:
            self.patch_embed = PatchEmbed(in_chans, embed_dim, patch_size)
        downsampler = ConvDownsampler if tokenizer == "conv" else PatchMerging
        rates = iter(drop_path_rate * i / max(1, sum(depths) - 1) for i in range(sum(depths)))
        levels = []
        for level, (dim, depth, heads) in enumerate(zip(dims, depths, num_heads, strict=True)):
            blocks = []
            for _ in range(depth):
                attention = NeighborhoodAttention2D(
                    dim,
                    heads,
                    kernel_size,
                    qkv_bias=qkv_bias,
                    rel_pos_bias=True,
                    attn_drop=attn_drop_rate,
                    proj_drop=proj_drop_rate,
                    backend=backend,
                )
                blocks.append(Block(dim, attention, mlp_ratio, proj_drop_rate, next(rates), layer_scale))
            levels.append(Level(blocks, downsampler(dim) if level < len(depths) - 1 else nn.Identity()))
        self.levels = nn.ModuleList(levels)
        self.feature_info = [
            {"num_chs": dim, "reduction": self.patch_embed.stride * 2**level, "module": f"levels.{level}"}
            for level, dim in enumerate(dims)
        ]
        self.feature_norms = feature_norms
        if feature_norms:
            for level, dim in enumerate(dims):
                self.add_module(f"norm{level}", nn.LayerNorm(dim))
        self.norm = nn.Identity() if feature_norms else nn.LayerNorm(self.num_features)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()
        self.apply(self._init_weights)
        self.set_dilations(dilations)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @staticmethod
    def _check_pool(global_pool: str) -> None:
        if global_pool not in ("avg", ""):
            raise ValueError(f"global_pool must be 'avg' or '', got {global_pool!r}")

    @property
    def dilations(self) -> list[list[int]]:
        """Dilation of each layer of each level."""
        return [[block.attn.dilation[0] for block in level.blocks] for level in self._levels()]

    def _levels(self) -> list[Any]:
        return list(self.levels)

    def level_sizes(self, image_size: int | tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Height and width of the feature map of each level.

        Args:
            image_size: Size of the image in pixels, one number or height and width; the model's ``img_size`` if None.
        """
        height, width = self.img_size if image_size is None else _height_and_width("image_size", image_size)
        strides = [info["reduction"] for info in self.feature_info]
        return [(-(-height // stride), -(-width // stride)) for stride in strides]

    def set_dilations(self, dilations: Dilations | None, image_size: int | tuple[int, int] | None = None) -> None:
        """Change the dilations of a built model, as the paper does at test time (arXiv 2209.15001, section 4.4).

        Args:
            dilations: ``"max"``: 1 and the largest dilation of the level, floor(n / kernel_size), in turn;
                ``"gradual"``: 1 and dilations that grow to the largest one; or an entry per level, a number per layer
                or one number D for 1, D, 1, D, ...; all 1 if None.
            image_size: Size of the image from which n, the shorter side of the level's feature map, is derived; the
                model's ``img_size`` if None.

        Raises:
            ValueError: If the numbers do not fit the levels and layers.
        """
        depths = [len(level.blocks) for level in self._levels()]
        wanted: list[list[int]] = []
        if isinstance(dilations, str):
            if dilations not in ("max", "gradual"):
                raise ValueError(f"dilations must be 'max', 'gradual' or an entry per level, got {dilations!r}")
            largest = [max(1, min(size) // self.kernel_size) for size in self.level_sizes(image_size)]
            for level, depth in enumerate(depths):
                # The published settings do not grow within the last level of several.
                gradual = dilations == "gradual" and (level < len(depths) - 1 or len(depths) == 1)
                wanted.append(level_dilations(depth, largest[level], gradual=gradual))
        else:
            if image_size is not None:
                raise ValueError("image_size is for dilations='max' and 'gradual' only")
            if not isinstance(dilations, Sequence | None):
                raise ValueError(f"dilations must be 'max', 'gradual' or an entry per level, got {dilations!r}")
            entries = [1] * len(depths) if dilations is None else list(dilations)
            if len(entries) != len(depths):
                raise ValueError(f"dilations must have {len(depths)} entries, one per level, got {len(entries)}")
            for level, (entry, depth) in enumerate(zip(entries, depths, strict=True)):
                given = [entry] if isinstance(entry, int) else list(entry) if isinstance(entry, Sequence) else []
                of_level = level_dilations(depth, entry) if isinstance(entry, int) else given
                whole = all(isinstance(d, int) and not isinstance(d, bool) and d > 0 for d in given)
                if not given or not whole or len(of_level) != depth:
                    raise ValueError(
                        f"dilations of level {level} must be one whole number above 0 or {depth} of them, got {entry!r}"
                    )
                wanted.append(of_level)
        for level, of_level in zip(self._levels(), wanted, strict=True):
            for block, dilation in zip(level.blocks, of_level, strict=True):
                block.attn.dilation = (dilation, dilation)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features of each level, before its downsampler.

        Args:
            x: Images ``(B, in_chans, H, W)``.
            indices: Levels: the last n, those of a list, or all if None.
            norm: Apply the final norm to the last level's features. Norms of ``feature_norms`` are always applied.
            stop_early: Stop after the last level that is asked for.
            output_fmt: ``"NCHW"`` or ``"NHWC"``.
            intermediates_only: Return the list of features alone.

        Returns:
            The final features ``(B, h, w, C)`` and the list of features, or the list alone.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.levels), indices)
        levels = self._levels()[: last + 1] if stop_early else self._levels()
        features = []
        x = self.patch_embed(x)
        for index, level in enumerate(levels):
            x = level(x)
            if index in taken:
                feature = x
                if self.feature_norms:
                    feature = self.get_submodule(f"norm{index}")(x)
                elif norm and index == len(self.levels) - 1:
                    feature = self.norm(x)
                features.append(feature.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else feature)
            if index < len(levels) - 1:
                x = level.downsample(x)
        if intermediates_only:
            return features
        return self.norm(x) if len(levels) == len(self.levels) else x, features

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the features of some levels do not need.

        Args:
            indices: As in `forward_intermediates`.
            prune_norm: Drop the final norm.
            prune_head: Drop the classifier.
        """
        taken, last = feature_take_indices(len(self.levels), indices)
        if prune_norm or last < len(self.levels) - 1:
            self.norm = nn.Identity()
        if self.feature_norms:
            for level in range(len(self.levels)):
                if level not in taken:
                    setattr(self, f"norm{level}", nn.Identity())
        self.levels = self.levels[: last + 1]
        self._levels()[-1].downsample = nn.Identity()
        self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or last < len(self.feature_info) - 1:
            self.reset_classifier(0, "")
        return taken

    def forward_features(self, x: Tensor) -> Tensor:
        """From images ``(B, in_chans, H, W)`` to the normalized feature map ``(B, h, w, C)``."""
        x = self.patch_embed(x)
        for level in self._levels():
            x = level.downsample(level(x))
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """From the feature map to logits ``(B, num_classes)``, or what the classifier gets."""
        if self.global_pool:
            x = x.mean((1, 2))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """From images ``(B, in_chans, H, W)`` to logits ``(B, num_classes)``."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a new classifier in.

        Args:
            num_classes: Classes; 0 for features.
            global_pool: ``"avg"`` or ``""``; as it is if None.
        """
        if num_classes and self.feature_norms:
            raise ValueError(f"a model with feature_norms has no classifier, got num_classes={num_classes}")
        if global_pool is not None:
            self._check_pool(global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        parameter = next(self.parameters())
        factory: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}
        self.head = nn.Linear(self.num_features, num_classes, **factory) if num_classes else nn.Identity()
        self._init_weights(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Save memory by computing the blocks again in the backward pass."""
        for level in self._levels():
            level.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that sort parameters into layers, for layer-wise learning rate decay."""
        blocks = (
            r"^levels\.(\d+)"
            if coarse
            else [
                (r"^levels\.(\d+)\.blocks\.(\d+)", None),
                (r"^levels\.(\d+)\.downsample", (99998,)),  # after the blocks of its level
                (r"^norm", (99999,)),
            ]
        )
        return {"stem": r"^patch_embed", "blocks": blocks}
