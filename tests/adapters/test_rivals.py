"""Specs without a pattern in timm's models: against timm's own attention with the formula put into it."""

import pytest
import timm
import torch
from torch import nn

from fibottention import Dense, EfficientAttention, Linformer, SparseAttention, TopK, sparsify
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.layers.sparse_attention import attention_layer
from tests.adapters.test_sata import build, images, sharp


class KeepLargest(nn.Module):
    """In the place of timm's dropout of the weights: the k largest of each row, normalized again."""

    def forward(self, weights):
        kept = weights >= weights.topk(3, -1).values[..., -1:]
        return (weights * kept) / (weights * kept).sum(-1, keepdim=True)


@pytest.mark.parametrize("family", ["vit", "dinov3", "swin", "pit"])
def test_topk_is_timms_attention_with_the_largest_weights(family):
    # In float64, since which weights are the largest may hang on the last digit.
    model, reference, x = sharp(family).eval().double(), sharp(family).eval().double(), images(family).double()
    keys = set(model.state_dict())
    for module in reference.modules():
        if hasattr(module, "attn_drop"):
            module.fused_attn = False
            module.attn_drop = KeepLargest()
    report = sparsify(model, TopK())
    torch.testing.assert_close(model(x), reference(x), rtol=1e-6, atol=1e-6)
    assert set(model.state_dict()) == keys
    layer = report.layers[0]
    assert layer.density == pytest.approx(3 / (layer.num_tokens + layer.prefix_tokens))
    assert report.density == 1  # computed in full
    assert report.pairs < 0.2


@pytest.mark.parametrize("spec", [Linformer(8), EfficientAttention()])
@pytest.mark.parametrize("family", ["vit", "dinov3", "pit"])
def test_linear_rivals_train(family, spec):
    model, x = sharp(family), images(family)
    keys = set(model.state_dict())
    sparsify(model, spec)
    model(x).square().sum().backward()
    layers = [m for m in model.modules() if isinstance(m, PatternAttention)]
    added = set(model.state_dict()) - keys
    assert len(added) == (2 * len(layers) if isinstance(spec, Linformer) else 0)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for layer in layers for p in layer.parameters())
    sparsify(model, Dense())
    assert set(model.state_dict()) == keys


@pytest.mark.parametrize("spec", [Linformer(), EfficientAttention()])
def test_linear_rivals_are_refused_where_there_is_a_bias(spec):
    with pytest.raises(ValueError, match=f"{spec.name} is not supported by WindowAttention at .* bias could go"):
        sparsify(build("swin"), spec)
    with pytest.raises(ValueError, match=f"{spec.name} is not supported by (GPSA|TalkingHeadAttn)"):
        sparsify(build("convit"), spec)


def test_other_refusals():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=1, attn_drop_rate=0.1)
    with pytest.raises(ValueError, match="no weights to drop, so it needs an attention dropout of 0, got 0.1"):
        sparsify(model, EfficientAttention())
    fixed = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=1, dynamic_img_size=True)
    sparsify(fixed, Linformer())
    with pytest.raises(ValueError, match="linformer was made for 65 tokens, prefix tokens included, got 17"):
        fixed(torch.zeros(1, 3, 16, 16))
    with pytest.raises(ValueError, match="sequence_length must be given for linformer"):
        SparseAttention(24, 3, spec=Linformer())
    assert SparseAttention(24, 3, spec=Linformer(), sequence_length=10)(torch.zeros(2, 10, 24)).shape == (2, 10, 24)
    layer = attention_layer(Linformer(), sequence_length=65)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=1, attn_layer=layer)
    assert vit(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
