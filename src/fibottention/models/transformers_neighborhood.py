"""NAT and DiNAT with the configuration, outputs and state-dict keys of transformers.

transformers' own DiNAT does not run with any natten since 0.17.5, and NAT is gone from it;
`fibottention.adapters.transformers.register` puts these in their place.
"""

# transformers' decorators hide the signatures of what they wrap:
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from transformers import DinatConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput, ModelOutput

from fibottention.compat.natten.functional import na2d_av, na2d_qk
from fibottention.models.neighborhood_transformer import ConvDownsampler
from fibottention.ops.neighborhood import neighborhood_attention

__all__ = [
    "DinatBackbone",
    "DinatForImageClassification",
    "DinatModel",
    "NatBackbone",
    "NatConfig",
    "NatForImageClassification",
    "NatModel",
]


class NatConfig(DinatConfig):
    """Configuration of NAT: that of DiNAT with every dilation 1."""

    model_type = "nat"

    def __post_init__(self, **kwargs: Any) -> None:
        """Set what follows from the fields."""
        if self.dilations is not None and any(d != 1 for level in self.dilations for d in level):
            raise ValueError(f"NAT has no dilations but 1, got {self.dilations}; model_type 'dinat' has")
        self.dilations = [[1] * depth for depth in self.depths]
        super().__post_init__(**kwargs)


@dataclass
class NeighborhoodOutput(ModelOutput):
    """Output of the models; what was not asked for is None.

    Attributes:
        loss: Loss, if labels were given.
        logits: ``(B, num_labels)`` scores of the classes.
        last_hidden_state: ``(B, h, w, C)`` normalized features.
        pooler_output: ``(B, C)`` their mean.
        hidden_states: ``(B, h, w, C)`` of the embedding and after each level.
        attentions: ``(B, heads, h, w, K * K)`` weights of the last layer of each level.
        reshaped_hidden_states: The hidden states as ``(B, C, h, w)``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    reshaped_hidden_states: tuple[Tensor, ...] | None = None


class _PatchEmbeddings(nn.Module):
    def __init__(self, config: DinatConfig) -> None:
        super().__init__()
        if config.patch_size not in (4, [4, 4], (4, 4)):
            raise ValueError(f"patch_size must be 4, got {config.patch_size}")
        self.num_channels = config.num_channels
        dim = config.embed_dim
        self.projection = nn.Sequential(
            nn.Conv2d(config.num_channels, dim // 2, 3, 2, 1), nn.Conv2d(dim // 2, dim, 3, 2, 1)
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        if pixel_values.shape[1] != self.num_channels:
            raise ValueError(f"pixel_values must have {self.num_channels} channels, got {pixel_values.shape[1]}")
        return self.projection(pixel_values).permute(0, 2, 3, 1)


class _Embeddings(nn.Module):
    def __init__(self, config: DinatConfig) -> None:
        super().__init__()
        self.patch_embeddings = _PatchEmbeddings(config)
        self.norm = nn.LayerNorm(config.embed_dim)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.dropout(self.norm(self.patch_embeddings(pixel_values)))


class _SelfAttention(nn.Module):
    def __init__(self, config: DinatConfig, dim: int, num_heads: int, dilation: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"the channels of a level ({dim}) must be divisible by its num_heads, got {num_heads}")
        self.num_heads = num_heads
        self.kernel_size, self.dilation = config.kernel_size, dilation
        side = 2 * config.kernel_size - 1
        self.rpb = nn.Parameter(torch.zeros(num_heads, side, side))
        self.query = nn.Linear(dim, dim, bias=config.qkv_bias)
        self.key = nn.Linear(dim, dim, bias=config.qkv_bias)
        self.value = nn.Linear(dim, dim, bias=config.qkv_bias)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: Tensor, output_attentions: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.query, self.key, self.value))
        if not output_attentions:
            dropout_p = self.dropout.p if self.training else 0.0
            out, _ = neighborhood_attention(
                2, q, k, v, self.kernel_size, dilation=self.dilation, rpb=self.rpb, dropout_p=dropout_p
            )
            return out.flatten(-2), None
        q, k, v = (t.movedim(-2, 1) for t in (q * q.shape[-1] ** -0.5, k, v))
        scores = na2d_qk(q, k, self.kernel_size, self.dilation, rpb=self.rpb)
        weights = self.dropout(scores.softmax(-1))
        out = na2d_av(weights, v, self.kernel_size, self.dilation)
        return out.movedim(1, -2).flatten(-2), weights


class _Dense(nn.Module):
    """A linear layer with an activation before or a dropout after it, under transformers' name."""

    def __init__(self, dim: int, out: int, activation: Any = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, out)
        self.activation = ACT2FN[activation] if isinstance(activation, str) else activation or nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.activation(self.dense(x)))


class _Attention(nn.Module):
    def __init__(self, config: DinatConfig, dim: int, num_heads: int, dilation: int) -> None:
        super().__init__()
        self.self = _SelfAttention(config, dim, num_heads, dilation)
        self.output = _Dense(dim, dim, dropout=config.attention_probs_dropout_prob)

    def forward(self, x: Tensor, output_attentions: bool) -> tuple[Tensor, Tensor | None]:
        height, width = x.shape[1:3]
        window = self.self.kernel_size * self.self.dilation
        x = F.pad(x, (0, 0, 0, max(0, window - width), 0, max(0, window - height)))
        out, weights = self.self(x, output_attentions)
        return self.output(out)[:, :height, :width], weights


class _Layer(nn.Module):
    def __init__(self, config: DinatConfig, dim: int, num_heads: int, dilation: int, drop_path: float) -> None:
        super().__init__()
        hidden = int(config.mlp_ratio * dim)
        self.layernorm_before = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.attention = _Attention(config, dim, num_heads, dilation)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.layernorm_after = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.intermediate = _Dense(dim, hidden, activation=config.hidden_act)
        self.output = _Dense(hidden, dim, dropout=config.hidden_dropout_prob)
        self.layer_scale_init_value = config.layer_scale_init_value
        self.layer_scale_parameters = None
        if config.layer_scale_init_value > 0:
            self.layer_scale_parameters = nn.Parameter(torch.full((2, dim), float(config.layer_scale_init_value)))

    def forward(self, x: Tensor, output_attentions: bool) -> tuple[Tensor, Tensor | None]:
        first, second = (1.0, 1.0) if self.layer_scale_parameters is None else self.layer_scale_parameters.unbind(0)
        attended, weights = self.attention(self.layernorm_before(x), output_attentions)
        x = x + self.drop_path(first * attended)
        hidden = self.output(self.intermediate(self.layernorm_after(x)))
        return x + self.drop_path(second * hidden), weights


class _Level(nn.Module):
    def __init__(self, layers: list[_Layer], downsample: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.downsample = downsample

    def forward(self, x: Tensor, output_attentions: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        weights = None
        for layer in self.layers:
            x, weights = layer(x, output_attentions)
        return x if self.downsample is None else self.downsample(x), x, weights


class _Encoder(nn.Module):
    def __init__(self, config: DinatConfig) -> None:
        super().__init__()
        depths, dilations = list(config.depths), list(config.dilations or [])
        # More than are needed are allowed, as in transformers, whose defaults are those of one depth.
        if len(dilations) < len(depths) or any(len(d) < depth for d, depth in zip(dilations, depths)):
            raise ValueError(f"dilations must hold one number per layer of depths={depths}, got {dilations}")
        last, total, count = len(depths) - 1, sum(depths), 0
        levels = []
        for level, depth in enumerate(depths):
            dim = config.embed_dim * 2**level
            layers = []
            for dilation in dilations[level][:depth]:
                drop_path = config.drop_path_rate * count / max(1, total - 1)
                layers.append(_Layer(config, dim, config.num_heads[level], dilation, drop_path))
                count += 1
            levels.append(_Level(layers, ConvDownsampler(dim) if level < last else None))
        self.levels = nn.ModuleList(levels)

    def forward(self, x: Tensor, output_attentions: bool) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """The last features, the states after each level's downsampler and before it, and the attentions."""
        after, before, attentions = [x], [x], []
        for level in self.levels:
            x, undivided, weights = level(x, output_attentions)
            after.append(x)
            before.append(undivided)
            if weights is not None:
                attentions.append(weights)
        return x, after, before, attentions


class _PreTrained(PreTrainedModel):
    config: DinatConfig
    main_input_name = "pixel_values"
    input_modalities = "image"
    _no_split_modules: ClassVar[list[str]] = ["_Layer"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, _SelfAttention):
            init.zeros_(module.rpb)
        elif isinstance(module, _Layer) and module.layer_scale_parameters is not None:
            init.constant_(module.layer_scale_parameters, module.layer_scale_init_value)

    def _wanted(self, **asked: bool | None) -> list[bool]:
        """What is asked for by argument, else by the configuration."""
        return [bool(getattr(self.config, name) if value is None else value) for name, value in asked.items()]


class _Model(_PreTrained):
    def __init__(self, config: DinatConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.num_levels = len(config.depths)
        self.num_features = config.embed_dim * 2 ** (self.num_levels - 1)
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.layernorm = nn.LayerNorm(self.num_features, eps=config.layer_norm_eps)
        self.add_pooling_layer = add_pooling_layer
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embeddings

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """From images ``(B, channels, H, W)`` to a `NeighborhoodOutput`, or a tuple with ``return_dict=False``."""
        attentions_wanted, hidden_wanted, as_dict = self._wanted(
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=return_dict
        )
        x, after, _, attentions = self.encoder(self.embeddings(pixel_values), attentions_wanted)
        x = self.layernorm(x)
        output = NeighborhoodOutput(
            last_hidden_state=x,
            pooler_output=x.mean((1, 2)) if self.add_pooling_layer else None,
            hidden_states=tuple(after) if hidden_wanted else None,
            attentions=tuple(attentions) if attentions_wanted else None,
            reshaped_hidden_states=tuple(h.permute(0, 3, 1, 2) for h in after) if hidden_wanted else None,
        )
        return output if as_dict else output.to_tuple()


class _ForImageClassification(_PreTrained):
    def __init__(self, config: DinatConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        base = self._base_class(config)
        setattr(self, self.base_model_prefix, base)
        self.classifier = nn.Linear(base.num_features, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    _base_class: type[_Model]

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """From images ``(B, channels, H, W)`` to a `NeighborhoodOutput`, or a tuple with ``return_dict=False``."""
        (as_dict,) = self._wanted(return_dict=return_dict)
        base = getattr(self, self.base_model_prefix)(
            pixel_values, output_attentions, output_hidden_states, return_dict=True
        )
        logits = self.classifier(base.pooler_output)
        output = NeighborhoodOutput(
            loss=None if labels is None else self.loss_function(labels, logits, self.config),
            logits=logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            reshaped_hidden_states=base.reshaped_hidden_states,
        )
        return output if as_dict else output.to_tuple()


class _Backbone(BackboneMixin, _PreTrained):
    def __init__(self, config: DinatConfig) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.num_features = [config.embed_dim] + [config.embed_dim * 2**i for i in range(len(config.depths))]
        self.hidden_states_norms = nn.ModuleDict(
            {stage: nn.LayerNorm(dim) for stage, dim in zip(self.out_features, self.channels, strict=True)}
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embeddings

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """From images ``(B, channels, H, W)`` to the normalized features ``(B, C, h, w)`` of the chosen stages."""
        attentions_wanted, hidden_wanted, as_dict = self._wanted(
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=return_dict
        )
        _, _, before, attentions = self.encoder(self.embeddings(pixel_values), attentions_wanted)
        features = tuple(
            self.hidden_states_norms[stage](x).permute(0, 3, 1, 2).contiguous()
            for stage, x in zip(self.stage_names, before, strict=True)
            if stage in self.out_features
        )
        output = BackboneOutput(
            feature_maps=features,
            hidden_states=tuple(before) if hidden_wanted else None,
            attentions=tuple(attentions) if attentions_wanted else None,
        )
        return output if as_dict else output.to_tuple()


class DinatModel(_Model):
    """DiNAT's features; arguments and outputs as in transformers."""

    config_class = DinatConfig
    base_model_prefix = "dinat"


class DinatForImageClassification(_ForImageClassification):
    """DiNAT with a classifier; arguments and outputs as in transformers."""

    config_class = DinatConfig
    base_model_prefix = "dinat"
    _base_class = DinatModel


class DinatBackbone(_Backbone):
    """DiNAT as a backbone for detection and segmentation; arguments and outputs as in transformers."""

    config_class = DinatConfig
    base_model_prefix = "dinat"


class NatModel(_Model):
    """NAT's features; arguments and outputs as in transformers up to 4.4x."""

    config_class = NatConfig
    base_model_prefix = "nat"


class NatForImageClassification(_ForImageClassification):
    """NAT with a classifier; arguments and outputs as in transformers up to 4.4x."""

    config_class = NatConfig
    base_model_prefix = "nat"
    _base_class = NatModel


class NatBackbone(_Backbone):
    """NAT as a backbone for detection and segmentation; arguments and outputs as in transformers up to 4.4x."""

    config_class = NatConfig
    base_model_prefix = "nat"
