"""Models for small images against the published sizes (facts on SATA)."""

import pytest
import timm
import torch
import torch.nn.functional as F

from fibottention import SATA, sparsify
from fibottention.models.small_data import ShiftedPatches

FAMILIES = ["vit", "pit", "swin", "cait"]


def test_parameters_as_published():
    for size, count in ((32, 2_709_796), (64, 2_756_744)):
        model = timm.create_model(f"vit_small_data_{size}", num_classes=100 if size == 32 else 200)
        assert sum(p.numel() for p in model.parameters()) == count
        assert model.patch_embed.num_patches + 1 == 65


def test_sizes_as_published():
    pit = timm.create_model("pit_small_data_32")
    assert pit.patch_embed.grid_size == (16, 16)
    blocks = [[(b.attn.num_heads, b.attn.qkv.in_features, b.mlp.fc1.out_features) for b in t.blocks]
              for t in pit.transformers]  # fmt: skip
    assert blocks == [[(2, 96, 192)] * 2, [(4, 192, 384)] * 6, [(8, 384, 768)] * 4]
    tokens = [layer.num_tokens for layer in sparsify(pit, SATA()).layers]
    assert tokens == [256] * 2 + [64] * 6 + [16] * 4
    swin = timm.create_model("swin_small_data_64")
    assert [len(stage.blocks) for stage in swin.layers] == [2, 6, 4]
    assert [stage.blocks[0].attn.num_heads for stage in swin.layers] == [3, 6, 12]
    assert {stage.blocks[0].window_size for stage in swin.layers} == {(4, 4)}
    cait = timm.create_model("cait_small_data_32")
    assert (len(cait.blocks), len(cait.blocks_token_only), cait.blocks[0].attn.num_heads) == (24, 2, 4)
    assert {block.mlp.fc1.out_features for block in (*cait.blocks, *cait.blocks_token_only)} == {2 * 192}


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains(family, size, shifted):
    options = {"depth": 2} if family in ("vit", "cait") else {}
    torch.manual_seed(0)
    model = timm.create_model(f"{family}_small_data_{size}", num_classes=7, shifted_patches=shifted, **options)
    if family != "cait":
        sparsify(model, SATA())
    x = torch.randn(2, 3, size, size)
    out = model(x)
    assert out.shape == (2, 7)
    out.square().sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert missing == []


def test_shifted_patches_by_hand():
    torch.manual_seed(0)
    layer = ShiftedPatches(2, 6, 4).double()
    x = torch.randn(1, 2, 8, 12, dtype=torch.float64)
    padded = F.pad(x, (2, 2, 2, 2))
    views = [x] + [padded[:, :, y : y + 8, z : z + 12] for y in (0, 4) for z in (0, 4)]
    stack = torch.cat(views, 1)
    for row, column in ((0, 0), (1, 2)):
        patch = stack[0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].reshape(-1)
        expected = layer.linear(layer.norm(patch))
        torch.testing.assert_close(layer(x)[0, :, row, column], expected)


def test_images_with_one_channel():
    model = timm.create_model("vit_small_data_32", in_chans=1, shifted_patches=True, depth=1)
    assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 100)
