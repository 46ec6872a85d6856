"""Inside-to-inside attention, by hand and against dense attention written out."""

import math

import pytest
import timm
import torch

from fibottention import LSA, SATA, Dense, Fibottention, TopK, sparsify
from fibottention.analysis.attention_maps import captured_attention, patch_grid
from fibottention.analysis.localisation import draw_localisation, localisation, patch_masks
from tests.analysis.test_heads import images, model


def object_masks():
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[0, :8, :8] = True
    masks[1, 12:30, 5:20] = True
    masks[2, :, 16:] = True
    return masks


def test_patches_of_a_mask():
    masks = torch.zeros(1, 8, 8, dtype=torch.bool)
    masks[0, :4, :6] = True  # half of the second patch of the first row
    assert patch_masks(masks, (2, 2)).tolist() == [[True, True, False, False]]
    for value, what in ((False, "no patch"), (True, "every patch")):
        with pytest.raises(ValueError, match=f"mask 0 covers {what} of the 2 x 2"):
            patch_masks(torch.full((1, 8, 8), value), (2, 2))


@pytest.mark.parametrize("spec", [None, Dense(), Fibottention(), Fibottention(fill="zero"), SATA(), LSA()])
def test_numbers_are_those_of_dense_weights(spec):
    vit, x, masks = model(), images(), object_masks()
    if spec is not None:
        sparsify(vit, spec)
    inside = patch_masks(masks, (8, 8))
    layers = captured_attention(vit, x, lambda layer: layer)
    for layer, result in zip(layers, localisation(vit, x, masks, batch_size=2), strict=True):
        kept = layer.module.pattern(65).mask()
        fill = 0 if spec is not None and spec.fill == "zero" else -math.inf
        weights = (layer.q @ layer.k.mT * layer.scale).double().masked_fill(~kept, fill).softmax(-1)
        if isinstance(spec, SATA):
            weights = layer.module.transform(weights)
        patches = weights[:, :, 1:, 1:]
        for image in range(3):
            of_object = patches[image][:, inside[image]]
            both = of_object[:, :, inside[image]].flatten(1)
            torch.testing.assert_close(result.mean[image], both.mean(1), rtol=1e-4, atol=1e-8)
            torch.testing.assert_close(result.variance[image], both.var(1, correction=0), rtol=1e-3, atol=1e-9)
            share = both.sum(1) / of_object.sum((1, 2))
            torch.testing.assert_close(result.share[image], share, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(result.area, inside.double().mean(1))
    assert len(draw_localisation(localisation(vit, x, masks)).axes) == 2


@pytest.mark.parametrize("make", [lambda m: m.to(torch.uint8) * 255, lambda m: m.float() * 255, lambda m: m.long()])
def test_masks_of_any_kind(make):
    vit, x, masks = model(), images(), object_masks()
    for own, other in zip(localisation(vit, x, masks), localisation(vit, x, make(masks)), strict=True):
        assert torch.equal(own.area, other.area)
        assert torch.equal(own.share, other.share)


def test_the_grid_is_that_of_the_image():
    assert patch_grid(36, (64, 144)) == (4, 9)
    assert patch_grid(64, (32, 32)) == (8, 8)
    with pytest.raises(ValueError, match="37 patches form no grid of squares on an image of 64 x 144"):
        patch_grid(37, (64, 144))
    wide = timm.create_model("vit_tiny_patch16_224", img_size=(64, 144), embed_dim=32, depth=1, num_heads=2).eval()
    sparsify(wide, Fibottention())
    masks = torch.zeros(1, 64, 144, dtype=torch.bool)
    masks[0, :16, :64] = True  # one row of four patches
    (layer,) = localisation(wide, torch.zeros(1, 3, 64, 144), masks)
    assert layer.area.item() == pytest.approx(4 / 36)
    with pytest.raises(ValueError, match="images must be"):
        localisation(wide, torch.zeros(1, 3, 64, 144), masks[:, :32])
    sparsify(wide, TopK())
    assert localisation(wide, torch.zeros(1, 3, 64, 144), masks) == []
