"""Accumulated trivial attention against dense softmax attention, written down once more."""

import pytest
import torch

from fibottention import SATA, Dense, Fibottention, sparsify
from fibottention.analysis.trivial_attention import draw_trivial_attention, trivial_attention
from tests.adapters.test_sata import sharp
from tests.adapters.test_timm import images


@pytest.mark.parametrize("spec", [None, Dense(), SATA(0.2), Fibottention(), SATA(over=Fibottention())])
def test_equals_what_the_dense_weights_say(spec):
    model, x = sharp("vit"), images("vit")
    if spec is not None:
        sparsify(model, spec)
    layers = trivial_attention(model, x, 0.2)
    assert [layer.layer for layer in layers] == [f"blocks.{i}.attn" for i in range(3)]
    reference = sharp("vit").eval()
    with torch.no_grad():
        tokens = reference.patch_embed(x)
        tokens = torch.cat([reference.cls_token.expand(2, -1, -1), tokens], 1) + reference.pos_embed
        block = reference.blocks[0]
        q, k, _ = block.attn.qkv(block.norm1(tokens)).view(2, 17, 3, 3, 64).permute(2, 0, 3, 1, 4)
    mask = torch.ones(3, 17, 17, dtype=torch.bool)
    if spec is not None:
        mask = spec.pattern(3, 16, prefix_tokens=1, layer=0).mask()
    weights = (q @ k.mT * 64**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    trivial = (weights <= 0.2 * weights.amax(-1, keepdim=True)) & mask
    first = layers[0]
    torch.testing.assert_close(first.weights.sort()[0], weights[mask.expand(2, -1, -1, -1)].sort()[0])
    sums = (weights * trivial).sum(-1).flatten()
    torch.testing.assert_close(first.sums.sort()[0], sums.sort()[0], rtol=1e-4, atol=1e-6)
    assert first.share == pytest.approx(float(trivial.sum() / (2 * mask.sum())), abs=1e-3)


def test_layers_within_windows_are_left_out_and_the_picture_is_drawn(tmp_path):
    assert trivial_attention(sharp("swin"), images("swin")) == []
    layers = trivial_attention(sharp("vit"), images("vit"))
    draw_trivial_attention(layers).savefig(tmp_path / "trivial.png")
    assert (tmp_path / "trivial.png").stat().st_size > 5000


def test_a_bad_threshold_is_named():
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\], got 2"):
        trivial_attention(sharp("vit"), images("vit"), 2)
