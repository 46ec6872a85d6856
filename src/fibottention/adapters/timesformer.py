"""transformers' TimeSformer: attention specs in space, in time, or over both at once."""

from typing import Any, cast

from torch import Tensor, nn
from transformers.models.timesformer.modeling_timesformer import TimesformerModel, TimesformerSelfAttention

from fibottention.adapters.first_forward import FirstForward
from fibottention.adapters.report import LayerReport, SparsifyReport, check_layer
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.layers.sparse_attention import split_qkv
from fibottention.ops.attention import Backend
from fibottention.specs import AttentionSpec

__all__ = ["holds_timesformer", "sparsify"]


class SparseTimesformerSelfAttention(TimesformerSelfAttention):
    """TimeSformer's attention over the pattern; parameters and state-dict keys stay."""

    sparse: PatternAttention

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Attend among tokens ``(B, N, C)``."""
        if output_attentions:
            raise ValueError("output_attentions=True is not supported with an attention spec")
        q, k, v = split_qkv(self.qkv(hidden_states), self.num_heads)
        dropout_p = self.attn_drop.p if self.training else 0.0
        out = self.sparse(q, k, v, scale=self.scale, dropout_p=dropout_p)
        return (out.transpose(1, 2).flatten(2),)


def holds_timesformer(model: nn.Module) -> bool:
    """Whether a module is or holds a TimeSformer."""
    return any(isinstance(module, TimesformerModel) for module in model.modules())


def sparsify(
    model: nn.Module,
    spec: AttentionSpec | None,
    *,
    temporal: AttentionSpec | None = None,
    backend: Backend = "auto",
) -> SparsifyReport:
    """Make a TimeSformer of transformers attend as specs say, in place.

    With ``attention_type="divided_space_time"`` and ``"space_only"`` the spec is that of each frame's patches and CLS
    (in arXiv 2406.19391 the only one that is sparse); with ``"joint_space_time"`` it is that of all patches of the clip
    and CLS, whose order is patch by patch, the frames of a patch one after the other.

    Args:
        model: ``TimesformerModel``, ``TimesformerForVideoClassification``, or a module that holds one.
        spec: How to attend in space, or in space and time; None leaves it as it is.
        temporal: How each patch attends over the frames, with divided space-time attention; None leaves it as it is.
        backend: As in `fibottention.sparse_attention`.

    Returns:
        A report of every layer, which prints as a table.

    Raises:
        ValueError: If there is no TimeSformer, nothing to change, or a layer that cannot take its spec.
        TypeError: If a spec is not one.
    """
    for name, given in (("spec", spec), ("temporal", temporal)):
        if given is not None and not isinstance(given, AttentionSpec):
            raise TypeError(f"{name} must be an AttentionSpec such as Fibottention(), got {type(given).__name__}")
    if spec is None and temporal is None:
        raise ValueError("spec or temporal must be given: without both the model would stay as it is")
    parts = [(path, module) for path, module in model.named_modules() if isinstance(module, TimesformerModel)]
    if not parts:
        raise ValueError(f"{type(model).__name__} holds no TimeSformer of transformers")
    changes: list[tuple[TimesformerSelfAttention, PatternAttention]] = []
    reports: list[LayerReport] = []
    left: list[str] = []
    for path, part in parts:
        config = part.config
        if temporal is not None and config.attention_type != "divided_space_time":
            raise ValueError(
                f"temporal is for attention_type='divided_space_time', got {config.attention_type!r}, which has no "
                "temporal attention of its own"
            )
        side = cast(int, config.image_size) // cast(int, config.patch_size)
        grid = (side, side)
        patches, frames = grid[0] * grid[1], config.num_frames
        joint = config.attention_type == "joint_space_time"
        for number, layer in enumerate(cast(Any, part.encoder.layer)):
            prefix = f"{path}.encoder.layer.{number}".lstrip(".")
            attention = layer.attention.attention
            where = f"{prefix}.attention.attention"
            if spec is None:
                left.append(where)
            elif joint:
                _plan(changes, reports, attention, where, spec, backend, number, patches * frames, 1, None, 1)
            else:
                _plan(changes, reports, attention, where, spec, backend, number, patches, 1, grid, frames)
            if config.attention_type == "divided_space_time":
                attention, where = layer.temporal_attention.attention, f"{prefix}.temporal_attention.attention"
                if temporal is None:
                    left.append(where)
                else:
                    _plan(changes, reports, attention, where, temporal, backend, number, frames, 0, None, patches)
    for attention, sparse in changes:
        attention.__class__ = SparseTimesformerSelfAttention
        attention.sparse = sparse  # pyright: ignore[reportAttributeAccessIssue]
    for path, part in parts:
        FirstForward.forget(part)
        own = {f"{path}.{name}".lstrip("."): module for name, module in part.named_modules()}
        transformed: dict[str, nn.Module] = {
            n: m for n, m in own.items() if isinstance(m, PatternAttention) and m.transform is not None
        }
        if transformed:
            FirstForward.watch(part, transformed)
    return SparsifyReport(type(model).__name__, cast(AttentionSpec, spec or temporal), tuple(reports), tuple(left))


def _plan(
    changes: list[tuple[TimesformerSelfAttention, PatternAttention]],
    reports: list[LayerReport],
    attention: TimesformerSelfAttention,
    path: str,
    spec: AttentionSpec,
    backend: Backend,
    layer: int,
    num_tokens: int,
    prefix_tokens: int,
    grid_size: tuple[int, int] | None,
    sequences: int,
) -> None:
    """Make the sparse part of a layer, without putting it in yet."""
    where = f"{type(attention).__name__} at {path}"
    if spec.needs_grid and grid_size is None:
        raise ValueError(f"{spec.name} needs tokens in two dimensions, but those of {where} are in time")
    check_layer(spec, where, has_bias=False, dropout=attention.attn_drop.p)
    head_dim = attention.qkv.in_features // attention.num_heads
    weight = attention.qkv.weight
    sparse = PatternAttention(
        spec,
        attention.num_heads,
        prefix_tokens=prefix_tokens,
        layer=layer,
        backend=backend,
        grid_size=grid_size,
        head_dim=head_dim,
        sequence_length=prefix_tokens + num_tokens,
        device=weight.device,
        dtype=weight.dtype,
    )
    changes.append((attention, sparse))
    reports.append(
        LayerReport.of(
            sparse.cost(prefix_tokens + num_tokens, head_dim),
            path=path,
            attention_class="TimesformerSelfAttention",
            num_heads=attention.num_heads,
            head_dim=head_dim,
            sequences=sequences,
            num_tokens=num_tokens,
            prefix_tokens=prefix_tokens,
        )
    )
