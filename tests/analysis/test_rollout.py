"""Attention rollout, against products of dense matrices."""

import math

import pytest
import timm
import torch

from fibottention import LSA, SATA, Dense, EfficientAttention, Fibottention, Longformer, sparsify
from fibottention.analysis.attention_maps import attention_maps, captured_attention
from fibottention.analysis.rollout import attention_rollout, draw_attention_maps
from tests.analysis.test_heads import images, model


def by_matrices(vit, x):
    """arXiv 2005.00928: the product of (A + I) / 2 over the layers, A the mean over the heads."""
    product = None
    for layer in captured_attention(vit, x, lambda layer: layer):
        kept = layer.module.pattern(layer.q.shape[2]).mask()
        fill = 0 if layer.module.spec.fill == "zero" else -math.inf
        weights = (layer.q @ layer.k.mT * layer.scale).double().masked_fill(~kept, fill).softmax(-1).mean(1)
        step = 0.5 * (weights + torch.eye(weights.shape[-1], dtype=torch.float64))
        product = step if product is None else step @ product
    return product


@pytest.mark.parametrize(
    "spec", [None, Dense(), Fibottention(), Fibottention(fill="zero"), Longformer(), SATA(over=Longformer()), LSA()]
)
def test_equals_products_of_matrices(spec):
    vit = model()
    if spec is not None:
        sparsify(vit, spec)
    expected = by_matrices(vit, images())[:, 0, 1:]
    torch.testing.assert_close(attention_rollout(vit, images()), expected, rtol=1e-4, atol=1e-7)


def test_without_prefix_tokens_it_is_the_mean_over_queries():
    vit = model(class_token=False, global_pool="avg")
    sparsify(vit, Fibottention())
    expected = by_matrices(vit, images()).mean(1)
    torch.testing.assert_close(attention_rollout(vit, images()), expected, rtol=1e-4, atol=1e-7)


def test_layers_over_other_tokens_are_refused():
    pit = timm.create_model("pit_ti_224", img_size=64, num_classes=2)
    with pytest.raises(ValueError, match="needs layers that attend over the same tokens"):
        attention_rollout(pit, torch.zeros(1, 3, 64, 64))


def test_a_spec_without_weights_of_pairs_is_refused():
    vit = model()
    sparsify(vit, EfficientAttention())
    with pytest.raises(ValueError, match="attention_rollout needs weights of pairs, which efficient_attention has not"):
        attention_rollout(vit, images())


def test_picture():
    vit, x = model(), images()
    figure = draw_attention_maps(
        [image.permute(1, 2, 0).clamp(0, 1).double().numpy() for image in x],
        attention_maps(vit, x)[-1],
        attention_rollout(vit, x),
    )
    titles = [axis.get_title() for axis in figure.axes[:6]]
    assert titles == ["image", "head 1", "head 2", "head 3", "head 4", "rollout"]
    assert len(figure.axes) == 18
