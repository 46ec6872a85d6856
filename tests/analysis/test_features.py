"""Features of a model with another attention: by hand and against the model's own outputs."""

import pytest
import timm
import torch
import transformers

from fibottention import Dense, Fibottention, TopK, sparsify
from fibottention.analysis.features import (
    compare_features,
    draw_features,
    layer_features,
    linear_cka,
    nearest_neighbour_accuracy,
)
from tests.analysis.test_heads import images, model


def test_features_are_the_outputs_of_the_blocks():
    vit, x = model(), images()
    vit.train()
    first, last = layer_features(vit, x, batch_size=2)
    assert vit.training
    vit.eval()
    with torch.no_grad():
        torch.testing.assert_close(vit.norm(last), vit.forward_features(x)[:, 0])
        torch.testing.assert_close(first, vit.blocks[0](vit.norm_pre(vit._pos_embed(vit.patch_embed(x))))[:, 0])
    pooled = model(class_token=False, global_pool="avg")
    with torch.no_grad():
        expected = pooled.blocks(pooled._pos_embed(pooled.patch_embed(x))).mean(1)
    torch.testing.assert_close(layer_features(pooled, x)[-1], expected)
    with pytest.raises(ValueError, match="SwinTransformer has no layer that attends over whole images"):
        layer_features(
            timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1), num_heads=(3, 6)),
            torch.zeros(1, 3, 224, 224),
        )


def test_features_of_transformers():
    config = transformers.ViTConfig(
        image_size=32, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    vit = transformers.ViTModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        expected = vit(images(), output_hidden_states=True).hidden_states
    for own, theirs in zip(layer_features(vit, images()), expected[1:], strict=True):
        torch.testing.assert_close(own, theirs[:, 0])


@pytest.mark.parametrize("samples", [5, 40])
def test_cka_by_hand(samples):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, samples, 8, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]
    assert linear_cka(a, 2 * a @ rotation - 3) == pytest.approx(1)
    x, y = a - a.mean(0), b - b.mean(0)
    expected = ((x @ x.T) * (y @ y.T)).sum() / ((x @ x.T).norm() * (y @ y.T).norm())
    assert linear_cka(a, b) == pytest.approx(expected.item())


def test_nearest_neighbours_by_hand():
    features = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0], [1.0, 0.2]])
    # By angle: 0 and 1 are near each other, 2 and 3 too, and 4 is nearest to 1.
    assert nearest_neighbour_accuracy(features, torch.tensor([0, 0, 1, 1, 0])) == 1.0
    assert nearest_neighbour_accuracy(features, torch.tensor([0, 0, 1, 1, 1])) == pytest.approx(0.8)


def test_comparison_leaves_the_model_alone():
    vit, x = model(), images(6)
    before = layer_features(vit, x)
    results = compare_features(
        vit, {"dense": Dense(), "fibottention": Fibottention(), "topk": TopK()}, x, torch.tensor([0, 1, 0, 1, 0, 1])
    )
    torch.testing.assert_close(layer_features(vit, x), before, rtol=0, atol=0)
    assert list(results) == ["as it is", "dense", "fibottention", "topk"]
    assert results["dense"].similarity == pytest.approx([1, 1])
    assert results["dense"].accuracy == results["as it is"].accuracy
    first, last = results["fibottention"].similarity
    assert first == pytest.approx(1)  # CLS sees all tokens of the first layer
    assert 0 < last < 1 - 1e-6
    sparse = model()
    sparsify(sparse, Fibottention())
    expected = [linear_cka(a, b) for a, b in zip(before, layer_features(sparse, x), strict=True)]
    assert results["fibottention"].similarity == pytest.approx(expected)
    assert len(draw_features(results).axes) == 2
    assert len(draw_features(compare_features(vit, {}, x)).axes) == 1
