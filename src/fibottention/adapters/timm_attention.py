"""Sparse versions of timm's attention classes: same parameters and state-dict keys, another forward pass."""

# timm's modules set attributes that nn.Module does not declare, and some that may be None:
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportOptionalCall=false

import torch
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.cait import TalkingHeadAttn
from timm.models.convit import GPSA, MHSA
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from fibottention.layers.pattern_attention import PatternAttention
from fibottention.layers.sparse_attention import SparseAttention, additive_mask, split_qkv
from fibottention.ops.constants import kept_of_union, pair_indices
from fibottention.ops.gather import apply_weights
from fibottention.ops.pairs import pair_dot, pair_softmax

__all__ = ["SPARSE_CLASSES", "adopt"]


class SparseWindowAttention(WindowAttention):
    """Swin's window attention over the pattern within each window; relative bias and shift mask kept."""

    sparse: PatternAttention

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows ``(windows * B, N, C)``, with an additive mask ``(windows, N, N)``."""
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = bias + mask.unsqueeze(1)
        dropout_p = self.attn_drop.p if self.training else 0.0
        self.sparse.grid_size = self.window_size  # set_input_size may have changed it
        x = self.sparse(q, k, v, bias=bias, scale=self.scale, dropout_p=dropout_p)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class SparseMHSA(MHSA):
    """ConViT's self-attention over the pattern."""

    sparse: PatternAttention

    def forward(self, x: Tensor) -> Tensor:
        """Attend among tokens ``(B, N, C)``."""
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        dropout_p = self.attn_drop.p if self.training else 0.0
        x = self.sparse(q, k, v, scale=self.scale, dropout_p=dropout_p)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class SparseGPSA(GPSA):
    """ConViT's gated positional self-attention: content and position each attend over the pattern."""

    sparse: PatternAttention

    def forward(self, x: Tensor) -> Tensor:
        """Attend among tokens ``(B, N, C)``."""
        batch, length, _ = x.shape
        if self.rel_indices is None or self.rel_indices.shape[1] != length:
            self.rel_indices = self.get_rel_indices(length)
        pattern = self.sparse.pattern(length)
        zero_fill = self.sparse.spec.fill == "zero"
        q, k = self.qk(x).reshape(batch, length, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).reshape(batch, length, self.num_heads, -1).transpose(1, 2)

        head, query, key = pair_indices(pattern, x.device)
        relation = self.rel_indices[0, query, key]
        if pattern.stored_heads == 1:
            position = self.pos_proj(relation).t()
        else:
            weight, bias = self.pos_proj.weight[head], self.pos_proj.bias[head]
            position = ((relation * weight).sum(-1) + bias).unsqueeze(0)
        content = pair_dot(q, k, pattern.key) * self.scale
        content_weights, content_outside = pair_softmax(content, pattern.key, zero_fill)
        position_weights, position_outside = pair_softmax(
            position.unsqueeze(0).to(content.dtype), pattern.key, zero_fill
        )
        gate = torch.sigmoid(self.gating_param)
        pair_gate = gate.view(1, -1, 1) if pattern.stored_heads == 1 else gate[head]
        weights = (1 - pair_gate) * content_weights + pair_gate * position_weights
        outside = None
        if zero_fill:
            outside = (1 - gate.view(1, -1, 1)) * content_outside + gate.view(1, -1, 1) * position_outside
        out = apply_weights(self.attn_drop(weights), outside, v, pattern)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class SparseTalkingHeadAttention(TalkingHeadAttn):
    """CaiT's talking heads: every head's scores are mixed, so the union of the heads' pairs is computed.

    Each mixed head keeps its own pattern in its softmax. The mixing after the softmax, with its bias, acts on the
    union; with ``fill="zero"`` it acts on all pairs, as in the dense form.
    """

    sparse: PatternAttention

    def forward(self, x: Tensor) -> Tensor:
        """Attend among tokens ``(B, N, C)``."""
        pattern = self.sparse.pattern(x.shape[1])
        union = pattern.union()
        zero_fill = self.sparse.spec.fill == "zero"
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        scores = pair_dot(q, k, union.key) * self.scale
        mixed = self.proj_l(scores.transpose(1, 2).to(x.dtype)).transpose(1, 2)
        if pattern is not union:
            kept = kept_of_union(pattern, x.device)
            mixed = mixed.masked_fill(~kept, 0.0 if zero_fill else float("-inf"))
        weights, outside = pair_softmax(mixed.to(scores.dtype), union.key, zero_fill)
        weights = self.proj_w(weights.transpose(1, 2).to(x.dtype)).transpose(1, 2)
        rest = None
        if zero_fill:
            rest = self.proj_w(outside.transpose(1, 2).to(x.dtype)).transpose(1, 2)
        out = apply_weights(self.attn_drop(weights), rest, v, union)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


def _rotate(module: nn.Module, x: Tensor, rope: Tensor) -> Tensor:
    prefix = module.num_prefix_tokens
    rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(module, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], rotated], dim=2)


def _rope_attention(
    module: "SparseEvaAttention | SparseRopeAttention",
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    rope: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """What EVA's and timm's rotary attention share, from the projected queries, keys and values on."""
    if is_causal:
        raise ValueError("is_causal=True is not supported with a sparse pattern")
    q, k, v = qkv
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        q, k = _rotate(module, q, rope).type_as(v), _rotate(module, k, rope).type_as(v)
    bias = None if attn_mask is None else additive_mask(attn_mask, q)
    dropout_p = module.attn_drop.p if module.training else 0.0
    out = module.sparse(q, k, v, bias=bias, scale=module.scale, dropout_p=dropout_p)
    out = module.norm(out.transpose(1, 2).flatten(2))
    if module.gate is not None:
        out = out * module.gate(x).sigmoid()
    return module.proj_drop(module.proj(out))


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


class SparseEvaAttention(EvaAttention):
    """EVA's and DINOv3's attention over the pattern, with rotary position embedding."""

    sparse: PatternAttention

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend among tokens ``(B, N, C)``."""
        if self.qkv is not None:
            projected = self.qkv(x)
            if self.q_bias is not None:
                projected = projected + torch.cat((self.q_bias, self.k_bias, self.v_bias))
            qkv = split_qkv(projected, self.num_heads)
        else:
            qkv = tuple(_split_heads(p(x), self.num_heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        return _rope_attention(self, x, qkv, rope, attn_mask, is_causal)


class SparseRopeAttention(AttentionRope):
    """timm's rotary attention over the pattern; grouped queries too."""

    sparse: PatternAttention

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend among tokens ``(B, N, C)``."""
        if self.qkv is not None:
            qkv = split_qkv(self.qkv(x), self.num_heads)
        else:
            q = _split_heads(self.q_proj(x), self.num_heads)
            k, v = (
                _split_heads(p(x), self.num_kv_heads).repeat_interleave(self.num_kv_groups, dim=1)
                for p in (self.k_proj, self.v_proj)
            )
            qkv = (q, k, v)
        return _rope_attention(self, x, qkv, rope, attn_mask, is_causal)


SPARSE_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Attention: SparseAttention,
    AttentionRope: SparseRopeAttention,
    EvaAttention: SparseEvaAttention,
    WindowAttention: SparseWindowAttention,
    MHSA: SparseMHSA,
    GPSA: SparseGPSA,
    TalkingHeadAttn: SparseTalkingHeadAttention,
}


def adopt(module: nn.Module, sparse: PatternAttention) -> nn.Module:
    """A sparse module that shares the parameters, buffers and submodules of a timm attention module."""
    adopted = object.__new__(SPARSE_CLASSES[type(module)])
    # nn.Module keeps parameters, buffers and children in dictionaries of its own: share their entries, not them.
    adopted.__dict__.update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in module.__dict__.items()}
    )
    adopted.sparse = sparse
    return adopted
