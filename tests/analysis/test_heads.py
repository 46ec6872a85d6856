"""Statistics of heads: by hand, and against dense attention written out."""

import math

import numpy as np
import pytest
import timm
import torch
import transformers

from fibottention import SATA, Dense, Fibottention, Neighborhood, TopK, sparsify
from fibottention.adapters.transformers import register
from fibottention.analysis.attention_maps import captured_attention
from fibottention.analysis.heads import _diversity, _similarity, draw_diversity, draw_head_statistics, head_statistics


def model(**options):
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=3, **options
    )
    for block in vit.blocks:
        block.attn.qkv.weight.data.mul_(8)
    return vit.eval()


def images(count=3):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_diversity_by_hand():
    out = torch.zeros(2, 3, 2, 2, dtype=torch.float64)  # two images, three heads, two tokens, two features
    out[0, 1, 0, 0] = 3.0
    out[0, 2, 1, 1] = 4.0
    out[1] = 7.0  # all heads alike
    # Image 0: |Y1 - Y2| = 3, |Y1 - Y3| = 4, |Y2 - Y3| = 5, over three unordered pairs.
    assert _diversity(out).tolist() == pytest.approx([4.0, 0.0])
    assert _diversity(out[:, :1]).tolist() == [0.0, 0.0]


def test_similarity_by_hand():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 40, 6, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    out = torch.stack([a, 3 * a @ rotation + 5, b], 1)
    features = out.transpose(0, 1).flatten(1, 2)
    features = features - features.mean(1, keepdim=True)
    similarity = _similarity(torch.einsum("hnd,gne->hgde", features, features))
    # Linear CKA ignores rotation, scale and shift (Kornblith et al. 2019, section 2).
    assert similarity[0, 1].item() == pytest.approx(1)
    torch.testing.assert_close(similarity.diagonal(), torch.ones(3, dtype=torch.float64))
    x, y = (t.flatten(0, 1) - t.flatten(0, 1).mean(0) for t in (a, b))
    gram = [t @ t.T for t in (x, y)]
    expected = (gram[0] * gram[1]).sum() / (gram[0].norm() * gram[1].norm())
    assert similarity[0, 2].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("spec", [Dense(), Fibottention(), Fibottention(fill="zero"), SATA(over=Fibottention())])
def test_entropy_is_that_of_the_dense_weights(spec):
    vit = model()
    sparsify(vit, spec)
    layers = captured_attention(vit, images(), lambda layer: layer)
    for layer, result in zip(layers, head_statistics(vit, images(), batch_size=2), strict=True):
        kept = layer.module.pattern(65).mask()
        scores = (
            (layer.q @ layer.k.mT * layer.scale).double().masked_fill(~kept, 0 if spec.fill == "zero" else -math.inf)
        )
        weights = scores.softmax(-1)
        expected = torch.special.entr(weights).sum(-1).mean((0, 2)) / math.log(2)
        torch.testing.assert_close(result.entropy, expected, rtol=1e-4, atol=1e-5)
        keys = kept.sum(-1).double() if spec.fill == "-inf" else torch.full((4, 65), 65.0, dtype=torch.float64)
        torch.testing.assert_close(result.keys, keys.log().mean(-1).exp().expand(4))
        assert (result.entropy <= result.keys.log2() + 1e-9).all()
        features = layer.out.double().transpose(0, 1).flatten(1, 2)
        features = features - features.mean(1, keepdim=True)
        products = torch.einsum("hnd,gne->hgde", features, features)
        torch.testing.assert_close(result.similarity, _similarity(products))
        weights = weights if not isinstance(spec, SATA) else layer.module.transform(weights)
        out = weights @ layer.v.double()
        torch.testing.assert_close(layer.out.double(), out, rtol=1e-4, atol=1e-4)
        pairs = [(out[:, i] - out[:, j]).flatten(1).norm(dim=1) for i in range(4) for j in range(i)]
        torch.testing.assert_close(result.diversity, sum(pairs) / 6, rtol=1e-4, atol=1e-4)


def test_other_models():
    assert head_statistics(model(), images())[0].diversity.shape == (3,)  # dense, not made sparse
    rivals = model()
    sparsify(rivals, TopK())
    results = head_statistics(rivals, images())
    assert all(result.entropy is None for result in results)
    assert len(draw_head_statistics(results).axes) == 3  # two layers and the colours
    register()
    config = transformers.BeitConfig(
        image_size=32, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        use_relative_position_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    beit = transformers.BeitModel(config).eval()
    for name, parameter in beit.named_parameters():
        if "relative_position_bias" in name:
            parameter.data.normal_(std=3)
    keys = set(beit.state_dict())
    dense = head_statistics(beit, images())
    assert set(beit.state_dict()) == keys
    assert beit.config._attn_implementation == "sdpa"
    assert all((layer.entropy < 6).all() for layer in dense)  # log2(65) = 6.02, and the bias is far from even
    sparsify(beit, Neighborhood(3))
    assert len(head_statistics(beit, images())) == 2
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config={"num_hidden_layers": 1}, vision_config={
        "image_size": 32, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64}))  # fmt: skip
    with pytest.raises(ValueError, match="CLIPModel takes input_ids; give the part of it that takes images only"):
        head_statistics(clip, images())
    assert len(head_statistics(clip.vision_model, images())) == 2


def test_training_mode_of_every_part_stays():
    vit = model()
    sparsify(vit, Fibottention())
    vit.train()
    vit.blocks[0].eval()
    before = {name: module.training for name, module in vit.named_modules()}
    head_statistics(vit, images())
    assert {name: module.training for name, module in vit.named_modules()} == before


@pytest.mark.parametrize("wrong", [np.zeros((1, 3, 32, 32)), torch.zeros(3, 32, 32), torch.zeros(0, 3, 32, 32),
                                   torch.zeros(1, 3, 32, 32, dtype=torch.uint8)])  # fmt: skip
def test_images_are_checked(wrong):
    with pytest.raises(ValueError, match="images must be a tensor .B, C, H, W. of normalized numbers, got"):
        head_statistics(model(), wrong)
    with pytest.raises(ValueError, match="draw_diversity needs at least one model, and a layer of each"):
        draw_diversity({"nothing": []})


def test_pictures():
    vit = model()
    results = head_statistics(vit, images())
    axis = draw_diversity({"a": results, "b": results}).axes[0]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["1", "2"]
    figure = draw_head_statistics(results)
    assert figure.axes[-1].get_ylabel() == "entropy of weights (bits)"
