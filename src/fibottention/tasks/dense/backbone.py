"""Backbones: from images to feature maps of four sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from fibottention.adapters import SparsifyReport, sparsify
from fibottention.errors import UserError
from fibottention.models.neighborhood_checkpoints import convert_checkpoint
from fibottention.models.neighborhood_registry import is_neighborhood_model
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer
from fibottention.specs import AttentionSpec
from fibottention.tasks.dense.config import DenseModelConfig
from fibottention.tasks.timm_model import check_timm_name, create_timm_model
from fibottention.training.run import load_weights

__all__ = ["Backbone", "SimplePyramid", "build_backbone"]

_LEVELS = 4
# Parts of a classifier, or of a whole model, that a backbone has not.
_SURPLUS = ("head", "norm.", "fc_norm.", "backbone.norms.", "backbone.pyramid.")


class Backbone(nn.Module):
    """A model of timm's that gives feature maps.

    Attributes:
        channels: Channels of each map.
        strides: Pixels of the image per pixel of each map.
        has_simple_pyramid: Whether the maps come from a `SimplePyramid`.

    Args:
        model: A pyramid (NAT, DiNAT, Swin, ...), whose last four levels each get a norm unless they have one, or a
            plain vision transformer, whose last tokens get a `SimplePyramid`.
        pyramid_channels: Channels of the maps of a `SimplePyramid`.
    """

    def __init__(self, model: Any, pyramid_channels: int = 256) -> None:
        super().__init__()
        self.model = model
        info = list(model.feature_info)[-_LEVELS:]
        reductions = [entry["reduction"] for entry in info]
        self.has_simple_pyramid = len(set(reductions)) == 1
        self.strides: list[int]
        self.channels: list[int]
        self.pyramid: SimplePyramid | None = None
        self.norms: nn.ModuleList | None = None
        if self.has_simple_pyramid:
            patch = reductions[-1]
            if patch % 4:
                raise ValueError(f"the patches of a plain transformer must be a multiple of 4 pixels, got {patch}")
            self.strides = [patch // 4, patch // 2, patch, 2 * patch]
            self.channels = [pyramid_channels] * _LEVELS
            self.pyramid = SimplePyramid(info[-1]["num_chs"], pyramid_channels)
        else:
            if len(info) < _LEVELS or sorted(set(reductions)) != reductions:
                raise ValueError(f"a pyramid must have {_LEVELS} levels, got strides {reductions}")
            self.strides, self.channels = reductions, [entry["num_chs"] for entry in info]
            model.prune_intermediate_layers(_LEVELS, prune_norm=True, prune_head=True)
            if not getattr(model, "feature_norms", False):
                self.norms = nn.ModuleList(LayerNorm2d(channels) for channels in self.channels)

    def forward(self, x: Tensor) -> list[Tensor]:
        """From images ``(B, 3, H, W)``, whose sides are multiples of the largest stride, to maps ``(B, C, h, w)``."""
        options: dict[str, Any] = {"intermediates_only": True, "output_fmt": "NCHW"}
        if self.pyramid is not None:
            return self.pyramid(self.model.forward_intermediates(x, indices=1, norm=True, **options)[0])
        features = self.model.forward_intermediates(x, indices=_LEVELS, **options)
        if self.norms is None:
            return list(features)
        return [norm(feature) for norm, feature in zip(self.norms, features, strict=True)]


class SimplePyramid(nn.Module):
    """Maps of four sizes from the last one of a plain transformer (ViTDet, arXiv 2203.16527, section 3).

    Args:
        in_channels: Channels of the transformer.
        channels: Channels of each map.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        half, quarter = max(1, in_channels // 2), max(1, in_channels // 4)

        def up(inner: int, outer: int) -> nn.Module:
            return nn.ConvTranspose2d(inner, outer, 2, 2)

        scales: Sequence[tuple[list[nn.Module], int]] = (
            ([up(in_channels, half), LayerNorm2d(half), nn.GELU(), up(half, quarter)], quarter),
            ([up(in_channels, half)], half),
            ([], in_channels),
            ([nn.MaxPool2d(2, 2)], in_channels),
        )
        self.levels = nn.ModuleList(
            nn.Sequential(
                *layers,
                nn.Conv2d(width, channels, 1, bias=False),
                LayerNorm2d(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                LayerNorm2d(channels),
            )
            for layers, width in scales
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """From a map ``(B, C, h, w)`` with even sides to maps of 4, 2, 1 and half times its sides."""
        return [level(x) for level in self.levels]


def build_backbone(
    config: DenseModelConfig, spec: AttentionSpec | None, pyramid_channels: int = 256
) -> tuple[Backbone, SparsifyReport | None]:
    """The backbone of a configuration, with an attention spec put in, and what that did.

    Args:
        config: Options of the model.
        spec: The spec.
        pyramid_channels: Channels of the maps of a plain vision transformer.

    Raises:
        UserError: If the model is unknown, gives no maps, or cannot take the spec.
    """
    name = config.name.split(".")[0]
    check_timm_name(config.name)
    reserved = [option for option in ("num_classes", "in_chans", "features_only") if option in config.options]
    if reserved:
        raise UserError(f"model.options must not hold {reserved[0]}, which a backbone does not take")
    options = {**config.options}
    if config.drop_path is not None:
        options["drop_path_rate"] = config.drop_path
    if is_neighborhood_model(name):
        model = _create(config.name, False, {**options, "feature_norms": True})
        if config.pretrained:
            _fill(model, _create(config.name, True, options).state_dict(), "the pretrained model")
    else:
        model = _create(config.name, config.pretrained, options)
    report = None
    if spec is not None:
        try:
            report = sparsify(model, spec)
        except ValueError as error:
            raise UserError(f"attention {spec.name} in {config.name}: {error}") from error
    if config.backbone_checkpoint is not None:
        _load(model, config.backbone_checkpoint)
    try:
        return Backbone(model, pyramid_channels), report
    except (ValueError, AttributeError) as error:
        raise UserError(f"model {config.name} is no backbone: {error}") from error


def _create(name: str, pretrained: bool, options: dict[str, Any]) -> Any:
    return create_timm_model(name, pretrained, {"num_classes": 0, **options}, {"dynamic_img_size": True})


def _load(model: Any, source: str) -> None:
    """Load weights of a classifier or a backbone from a file."""
    weights = load_weights(Path(source))
    if isinstance(model, NeighborhoodTransformer):
        try:
            weights = convert_checkpoint(weights, model)
        except ValueError as error:
            raise UserError(f"the weights in {source} do not fit: {error}") from error
    else:
        weights = {name.removeprefix("backbone.model."): weight for name, weight in weights.items()}
    _fill(model, weights, source)


def _fill(model: Any, weights: dict[str, Tensor], source: str) -> None:
    """Load weights; norms of the levels, which a classifier has not, may be missing, and its own parts too many."""
    own = model.state_dict()
    optional = tuple(f"norm{level}." for level in range(_LEVELS)) if isinstance(model, NeighborhoodTransformer) else ()
    kept = {n: w for n, w in weights.items() if n in own or not n.startswith(_SURPLUS)}
    missing = [n for n in own if n not in kept and not (optional and n.startswith(optional))]
    wrong = [n for n, w in kept.items() if n not in own or own[n].shape != w.shape]
    if missing or wrong:
        found = f"{missing[0]} is missing" if missing else f"{wrong[0]} {tuple(kept[wrong[0]].shape)} has no place"
        more = len(missing) + len(wrong) - 1
        raise UserError(
            f"the weights in {source} do not fit {type(model).__name__}: {found}"
            + (f", and {more} more" if more else "")
        )
    model.load_state_dict(kept, strict=False)
