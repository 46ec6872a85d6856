import copy

import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn

from fibottention import Dense, Fibottention, Longformer, SparseAttention, sparse_attention
from fibottention.layers import PatternAttention, attention_layer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "qk_norm": True, "norm_layer": nn.LayerNorm},
        {"attn_head_dim": 12, "dim_out": 20, "proj_bias": False},
        {"scale_norm": True, "norm_layer": nn.LayerNorm, "gated": True},
    ],
)
def test_is_interchangeable_with_timms_attention(options):
    torch.manual_seed(0)
    theirs = Attention(24, 4, **options)
    ours = SparseAttention(24, 4, **options, spec=Dense(), prefix_tokens=1)
    shapes = [[(k, v.shape) for k, v in module.state_dict().items()] for module in (ours, theirs)]
    assert shapes[0] == shapes[1]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(ours(x), theirs(x))
    mask = torch.rand(2, 1, 11, 11) > 0.4
    mask |= torch.eye(11, dtype=torch.bool)
    torch.testing.assert_close(ours(x, attn_mask=mask), theirs(x, attn_mask=mask))
    additive = torch.randn(11, 11)
    torch.testing.assert_close(ours(x, attn_mask=additive), theirs(x, attn_mask=additive))


def test_attends_over_the_pattern_of_each_token_count():
    layer = SparseAttention(24, 4, spec=Fibottention(), prefix_tokens=1, layer=2)
    for tokens in (16, 25):
        x = torch.randn(1, tokens + 1, 24)
        q, k, v = layer.qkv(x).reshape(1, tokens + 1, 3, 4, 6).permute(2, 0, 3, 1, 4)
        pattern = Fibottention().pattern(4, tokens, prefix_tokens=1, layer=2)
        expected = layer.proj(sparse_attention(q, k, v, pattern, backend="reference").transpose(1, 2).flatten(2))
        torch.testing.assert_close(layer(x), expected)


def test_fill_of_the_spec_is_used():
    torch.manual_seed(0)
    x = torch.randn(1, 17, 24)
    a = SparseAttention(24, 4, spec=Fibottention())
    b = SparseAttention(24, 4, spec=Fibottention(fill="zero"))
    b.load_state_dict(a.state_dict())
    assert not torch.allclose(a(x), b(x))


def test_dropout_acts_in_training_only():
    layer = SparseAttention(24, 4, attn_drop=0.5, spec=Longformer())
    x = torch.randn(1, 17, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_attn_layer_of_timm():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=3, attn_layer=attention_layer(Fibottention()), dynamic_img_size=True
    )
    assert copy.deepcopy(model).blocks[2].attn.sparse.layer == 2
    assert [block.attn.sparse.layer for block in model.blocks] == [0, 1, 2]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 1000)
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 1000)
    plain = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3)
    plain.load_state_dict(model.state_dict())


def test_compiles_from_scratch():
    torch.manual_seed(0)
    layer = SparseAttention(24, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 17, 24)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SparseAttention(25, 4), "dim must be divisible by num_heads, got dim=25 and num_heads=4"),
        (lambda: SparseAttention(24, 4, qk_norm=True), "norm_layer must be given"),
        (lambda: SparseAttention(24, 4)(torch.randn(1, 17, 24), is_causal=True), "is_causal=True is not supported"),
        (lambda: PatternAttention(Dense(), 4, prefix_tokens=2).pattern(2), "longer than its 2 prefix tokens, got 2"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
