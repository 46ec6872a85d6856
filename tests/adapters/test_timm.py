"""`sparsify` on every family of timm models."""

import copy

import pytest
import timm
import torch
from torch import nn

import fibottention as fib
from fibottention import Dense, Fibottention, Longformer, Neighborhood, na2d, patterns, sparsify
from fibottention.layers import PatternAttention, attention_layer

# name, options, another image size, prefix tokens of each layer
FAMILIES = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 3}, 96, 1),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 64, "depth": 2}, 96, 2),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56, "depth": 2}, 84, 5),
    "registers_gap": ("vit_medium_patch16_reg4_gap_256", {"img_size": 64, "depth": 2}, 96, 4),
    "gap": ("vit_base_patch16_siglip_gap_224", {"img_size": 64, "depth": 1}, 96, 0),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 112}, 224, 0),
    "convit": ("convit_tiny", {"img_size": 64}, 96, None),
    "pit": ("pit_ti_224", {"img_size": 96}, 128, 1),
    "pit_distilled": ("pit_ti_distilled_224", {"img_size": 96}, 128, 2),
    "cait": ("cait_xxs24_224", {"img_size": 64, "depth": 3}, 96, 0),
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 2}, 84, 1),
    "dinov3": ("vit_small_patch16_dinov3", {"img_size": 64, "depth": 2}, 96, 5),
    "dinov3_qkvb": ("vit_small_patch16_dinov3_qkvb", {"img_size": 64, "depth": 2}, 96, 5),
    "eva_rope_mixed": ("vit_small_patch16_rope_mixed_224", {"img_size": 64, "depth": 2}, 96, 1),
}


def build(family: str, img_size: int | None = None) -> nn.Module:
    name, options, _, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **{**options, **({"img_size": img_size} if img_size else {})})
    for module in model.modules():  # initial values that would hide a mistake
        if hasattr(module, "gating_param"):
            nn.init.normal_(module.gating_param)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)
    return model


def images(family: str, img_size: int | None = None) -> torch.Tensor:
    size = img_size or FAMILIES[family][1]["img_size"]
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_gives_the_logits_of_the_original(family):
    model, x = build(family).eval(), images(family)
    with torch.no_grad():
        expected = model(x)
        sparsify(model, Dense())
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_fill_of_a_dense_pattern_gives_the_logits_of_the_original(family):
    # All pairs kept, through the pair operations: Wythoff rows cannot do that, a full window can.
    model, x = build(family).eval(), images(family)

    class Everything(Fibottention):
        name = "test_everything"

        def pattern(self, num_heads, num_tokens, *, prefix_tokens=0, layer=0, grid_size=None):
            return patterns.dense(num_heads, num_tokens, prefix_tokens=prefix_tokens)

    with torch.no_grad():
        expected = model(x)
        sparsify(model, Everything(fill="zero"), backend="gather")
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fill", ["-inf", "zero"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_with_fibottention(family, fill):
    model, x = build(family), images(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = sparsify(model, Fibottention(fill=fill))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    out = model.train()(x)
    loss = sum(o.square().mean() for o in (out if isinstance(out, tuple) else (out,)))
    loss.backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    assert all(p.grad.isfinite().all() for p in model.parameters())
    untouched = {n for n, p in model.named_parameters() if not p.grad.any()}
    # With fill="-inf", a bias that shifts all scores of a row alike has no effect, in the original as here.
    shifts = {n for n in untouched if n.endswith(("pos_proj.bias", "proj_l.bias"))}
    assert untouched == shifts
    assert report.macs < report.dense_macs


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_load_both_ways(family):
    plain, sparse = build(family), build(family)
    sparsify(sparse, Fibottention())
    plain.load_state_dict(sparse.state_dict())
    sparse.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_size_works(family):
    size = FAMILIES[family][2]
    model = build(family, size)
    report = sparsify(model, Fibottention())
    assert model(images(family, size)).shape == (2, 7)
    for layer in report.layers:
        module = model.get_submodule(layer.path)
        lengths = [length for length, _ in module.sparse._patterns]
        assert lengths == [layer.prefix_tokens + layer.num_tokens], "the report's token count is the one that is met"
    if hasattr(model, "set_input_size"):
        resized = build(family)
        sparsify(resized, Fibottention())
        resized.set_input_size(img_size=size)
        assert resized(images(family, size)).shape == (2, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_knows_its_prefix_tokens_and_number(family):
    model = build(family)
    report = sparsify(model, Fibottention())
    expected = FAMILIES[family][3]
    modules = [m for m in model.modules() if isinstance(m, PatternAttention)]
    assert [m.layer for m in modules] == list(range(len(report.layers)))
    for layer, module in zip(report.layers, modules, strict=True):
        if expected is not None:
            assert layer.prefix_tokens == module.prefix_tokens == expected
        else:  # ConViT: the class token joins after the GPSA blocks
            assert layer.prefix_tokens == (0 if layer.attention_class == "GPSA" else 1)


def test_vit_attends_as_the_pattern_says():
    """The whole model against timm's own attention under the mask, layer by layer."""
    model, x = build("vit").eval(), images("vit")
    reference = copy.deepcopy(model)
    sparsify(model, Fibottention())
    for i, block in enumerate(reference.blocks):
        mask = Fibottention().pattern(3, 16, prefix_tokens=1, layer=i).mask()
        attend = block.attn.forward
        block.attn.forward = lambda x, attn_mask=None, is_causal=False, attend=attend, mask=mask: attend(x, mask[None])
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-5)


def test_swin_keeps_relative_bias_and_shift_mask():
    model, x = build("swin").eval(), images("swin")
    reference = copy.deepcopy(model)
    sparsify(model, Longformer(window=4))
    index = 0
    for stage in reference.layers:
        for block in stage.blocks:
            attention = block.attn
            attention.fused_attn = False
            mask = Longformer(window=4).pattern(attention.num_heads, attention.window_area, layer=index).mask()
            bias = attention._get_rel_pos_bias
            attention._get_rel_pos_bias = lambda bias=bias, mask=mask: bias().masked_fill(~mask, float("-inf"))
            index += 1
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fill", ["-inf", "zero"])
def test_convit_masks_content_and_position(fill):
    from timm.models.convit import GPSA

    torch.manual_seed(0)
    gpsa = GPSA(24, 4, qkv_bias=True).double()
    nn.init.normal_(gpsa.gating_param)
    x = torch.randn(2, 25, 24, dtype=torch.float64)
    holder = build("convit")
    holder.blocks[0].attn = gpsa
    pattern = Fibottention().pattern(4, 25)
    sparsify(holder, Fibottention(fill=fill))
    out = holder.blocks[0].attn(x)
    q, k = gpsa.qk(x).reshape(2, 25, 2, 4, 6).permute(2, 0, 3, 1, 4)
    v = gpsa.v(x).reshape(2, 25, 4, 6).transpose(1, 2)
    position = gpsa.pos_proj(gpsa.get_rel_indices(25)).permute(0, 3, 1, 2)
    hidden = 0.0 if fill == "zero" else float("-inf")
    content = (q @ k.mT * gpsa.scale).masked_fill(~pattern.mask(), hidden).softmax(-1)
    position = position.masked_fill(~pattern.mask(), hidden).softmax(-1)
    gate = gpsa.gating_param.sigmoid().view(1, -1, 1, 1)
    expected = gpsa.proj((((1 - gate) * content + gate * position) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("fill", ["-inf", "zero"])
def test_cait_masks_each_mixed_head(fill):
    torch.manual_seed(0)
    model = build("cait").double()
    attention = model.blocks[0].attn
    x = torch.randn(2, 16, 192, dtype=torch.float64)
    pattern = Fibottention().pattern(4, 16)
    sparsify(model, Fibottention(fill=fill))
    out = model.blocks[0].attn(x)
    q, k, v = attention.qkv(x).reshape(2, 16, 3, 4, 48).permute(2, 0, 3, 1, 4)
    scores = attention.proj_l((q @ k.mT * attention.scale).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    weights = scores.masked_fill(~pattern.mask(), 0.0 if fill == "zero" else float("-inf")).softmax(-1)
    mixed = attention.proj_w(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    if fill == "-inf":
        mixed = mixed * pattern.union().mask()
    expected = attention.proj((mixed @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected)


def test_a_sparse_model_takes_another_spec():
    model, x = build("vit").eval(), images("vit")
    with torch.no_grad():
        expected = model(x)
        sparsify(model, Fibottention())
        assert not torch.allclose(model(x), expected)
        sparsify(model, Dense())
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_a_model_built_with_attn_layer_takes_another_spec():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, attn_layer=attention_layer(Fibottention()))
    report = sparsify(model, Longformer())
    assert report.layers[0].attention_class == "Attention"
    assert model.blocks[1].attn.sparse.spec == Longformer()


def test_nested_models_are_found():
    model = nn.Sequential(build("vit"), nn.Flatten())
    assert sparsify(model, Longformer()).layers[0].path == "0.blocks.0.attn"
    features = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, features_only=True, out_indices=[0])
    assert sparsify(features, Longformer()).layers[0].path == "model.blocks.0.attn"


def test_report_of_vit_b_agrees_with_the_paper():
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    report = sparsify(model, Fibottention())
    # Facts, section 4.
    assert report.dense_macs == 2 * 197**2 * 768 * 12
    assert report.macs == pytest.approx(0.0214e9, rel=5e-3)
    text = str(report)
    assert "blocks.11.attn  Attention     12        64   1+196    2.99%      59.61 M      1.78 M" in text
    assert text.splitlines()[-1].split() == ["total", "2.99%", "715.33", "M", "21.36", "M"]


def test_report_counts_the_windows_of_swin():
    report = sparsify(build("swin", 224), Dense())
    first = report.layers[0]
    assert (first.num_tokens, first.sequences, first.num_heads) == (49, 64, 3)
    assert first.dense_macs == first.macs == 2 * 64 * 49**2 * 96
    assert "0+49 x 64" in str(report)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {}, "sparsify does not support ResNet; it supports timm's Cait, ConVit, Eva"),
        ("swinv2_tiny_window8_256", {}, "does not support SwinTransformerV2"),
        ("hiera_tiny_224", {}, "does not support Hiera"),
        ("levit_128", {}, "does not support LevitDistilled|does not support Levit"),
        ("vit_tiny_patch16_224", {"depth": 1, "attn_layer": "diff"}, "does not support DiffAttention"),
        ("vit_base_patch16_rpn_224", {"depth": 1}, None),
        ("vit_tiny_patch16_224", {"depth": 1, "patch_drop_rate": 0.5}, "patch_drop_rate=0"),
    ],
)
def test_unsupported_models_are_refused_by_name(name, options, message):
    model = timm.create_model(name, **options)
    state = [type(m) for m in model.modules()]
    if message is None:
        sparsify(model, Fibottention())
        return
    with pytest.raises(ValueError, match=message):
        sparsify(model, Fibottention())
    assert [type(m) for m in model.modules()] == state, "a refused model is not changed"


def test_a_spec_that_does_not_fit_changes_nothing():
    model = build("swin")
    with pytest.raises(ValueError, match="has no term within its window"):
        sparsify(model, Fibottention(on_empty="error"))
    assert not any(isinstance(m, PatternAttention) for m in model.modules())
    with pytest.raises(TypeError, match=r"spec must be an AttentionSpec such as Fibottention\(\), got str"):
        sparsify(model, "fibottention")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        sparsify("vit", Dense())


def test_fused_qkv_free_models_and_masks():
    model = build("vit").eval()
    sparsify(model, Longformer())
    x = torch.randn(1, 17, 192)
    mask = torch.ones(1, 1, 17, 17, dtype=torch.bool)
    mask[..., 5] = False
    out = model.blocks[0](x, attn_mask=mask)
    x[:, 5] += 10.0
    changed = model.blocks[0](x, attn_mask=mask)
    others = [i for i in range(17) if i != 5]
    torch.testing.assert_close(out[:, others], changed[:, others])
    assert fib.sparsify is sparsify


NEEDS_GRID = ["vit", "deit_distilled", "registers", "gap", "swin", "convit", "pit", "cait", "eva02", "dinov3"]


@pytest.mark.parametrize("family", NEEDS_GRID)
def test_neighborhoods_on_the_grid_of_patches(family):
    """Each patch sees its 3x3 neighbourhood in the grid, and the prefix tokens; checked on the masks of all layers."""
    name, options, _, _ = FAMILIES[family]
    square = family in ("swin", "pit", "convit")  # these take no other images
    if not square:
        size = options["img_size"]
        options = {**options, "img_size": (size, size * 2)}
    model = timm.create_model(name, num_classes=7, **options)
    report = sparsify(model, Neighborhood(3))
    for layer in report.layers:
        module = model.get_submodule(layer.path).sparse
        height, width = module.grid_size
        assert height * width == layer.num_tokens
        assert square or width == 2 * height
        pattern = module.pattern(layer.prefix_tokens + layer.num_tokens)
        mask = pattern.mask()[0][layer.prefix_tokens :, layer.prefix_tokens :].view(height, width, height, width)
        rows = torch.arange(height).clamp(1, height - 2)
        for y, x in ((0, 0), (1, 1), (height - 1, width - 1)):
            seen = torch.zeros(height, width, dtype=torch.bool)
            top, left = rows[y] - 1, min(max(x, 1), width - 2) - 1
            seen[top : top + 3, left : left + 3] = True
            assert torch.equal(mask[y, x], seen)
    shape = options["img_size"] if isinstance(options["img_size"], tuple) else (options["img_size"],) * 2
    assert model(torch.zeros(1, 3, *shape)).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("vit_tiny_patch16_224", False), ("vit_small_patch16_dinov3", False), ("vit_tiny_patch16_224", True)],
)
def test_the_grid_is_that_of_each_image(name, compiled):
    """Images of another shape with as many tokens, or with another square number of them."""
    torch._dynamo.reset()
    options = {"img_size": 64, "dynamic_img_size": True, "num_classes": 7, "depth": 2}
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    sparsify(model, Neighborhood(3))
    sparsify(model, Neighborhood(2))
    assert len(model.patch_embed._forward_pre_hooks) == 1
    run = torch.compile(copy.deepcopy(model), backend="aot_eager", dynamic=False) if compiled else copy.deepcopy(model)
    for height, width in ((64, 64), (32, 128), (144, 64), *([] if compiled else [(128, 128), (64, 256)])):
        x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
        fixed = timm.create_model(name, **{**options, "img_size": (height, width), "dynamic_img_size": False}).eval()
        weights = {k: v for k, v in model.state_dict().items() if k != "pos_embed"}
        fixed.load_state_dict(weights, strict=False)
        if getattr(model, "pos_embed", None) is not None:
            with torch.no_grad():
                fixed.pos_embed.copy_(timm.layers.resample_abs_pos_embed(
                    model.pos_embed, (height // 16, width // 16), num_prefix_tokens=1))  # fmt: skip
        sparsify(fixed, Neighborhood(2))
        torch.testing.assert_close(run(x), fixed(x), rtol=1e-4, atol=1e-5)


def test_the_grid_follows_set_input_size():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=7)
    sparsify(model, Neighborhood(2))
    model.set_input_size((32, 128))
    model(torch.zeros(1, 3, 32, 128))
    assert model.blocks[0].attn.sparse.grid_size == (2, 8)
    layer = model.blocks[0].attn.sparse
    layer.grid_size = (3, 5)
    with pytest.raises(ValueError, match="the sequence has 16 patch tokens, but the grid is 3 x 5"):
        layer.pattern(17)


def test_dilations_alternate_over_the_layers():
    model = build("vit")
    sparsify(model, Neighborhood(1, dilation=(1, 2)))
    sparsify(model, Neighborhood(2, dilation=(1, 2)))
    first, second, third = (b.attn.sparse.pattern(17) for b in model.blocks)
    assert first is third
    assert first is patterns.neighborhood(3, (4, 4), 2, prefix_tokens=1)
    assert second is patterns.neighborhood(3, (4, 4), 2, dilation=2, prefix_tokens=1)


@pytest.mark.parametrize("family", ["vit", "eva02", "dinov3", "pit"])
def test_a_relative_bias_is_learned(family):
    model, x = build(family), images(family)
    keys = set(model.state_dict())
    plain = copy.deepcopy(model)
    sparsify(model, Neighborhood(3, rel_pos_bias=True))
    sparsify(plain, Neighborhood(3))
    added = set(model.state_dict()) - keys
    attentions = [m for m in model.modules() if isinstance(m, PatternAttention)]
    assert len(added) == len(attentions)
    assert all(key.endswith("attn.sparse.rpb") for key in added)
    model.eval(), plain.eval()
    torch.testing.assert_close(model(x), plain(x))  # the tables start at zero
    model(x).square().sum().backward()
    # The last layer's patches do not reach the class token any more.
    assert all(m.rpb.grad.abs().sum() > 0 for m in attentions[:-1])
    for m in attentions:
        nn.init.normal_(m.rpb)
    assert not torch.equal(model(x), plain(x))


def test_the_relative_bias_is_that_of_na2d():
    torch.manual_seed(0)
    layer = fib.SparseAttention(24, 3, spec=Neighborhood(3, rel_pos_bias=True), prefix_tokens=0)
    layer.sparse.grid_size = (4, 6)
    nn.init.normal_(layer.sparse.rpb)
    x = torch.randn(2, 24, 24)
    q, k, v = layer.qkv(x).view(2, 4, 6, 3, 3, 8).unbind(3)
    expected = layer.proj(na2d(q, k, v, 3, rpb=layer.sparse.rpb.view(3, 5, 5)).flatten(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected)
    # With a mask on top, which the dense form shows.
    mask = torch.zeros(24, 24).masked_fill(torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) < 0.2, -9.0)
    scores = q.flatten(1, 2).transpose(1, 2) @ k.flatten(1, 2).permute(0, 2, 3, 1) * 8**-0.5 + mask
    pattern = layer.sparse.pattern(24)
    _, query, key = pattern.pairs()
    scores[:, :, query, key] += layer.sparse.rpb[:, pattern.relation.tolist()]
    weights = scores.masked_fill(~pattern.mask(), -torch.inf).softmax(-1)
    out = (weights @ v.flatten(1, 2).transpose(1, 2)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, attn_mask=mask), layer.proj(out))


@pytest.mark.parametrize("family", ["swin", "convit", "cait"])
def test_a_relative_bias_is_refused_where_there_is_one_already(family):
    model = build(family)
    keys = set(model.state_dict())
    with pytest.raises(ValueError, match="(rel_pos_bias=True|neighborhood) is not supported by"):
        sparsify(model, Neighborhood(3, rel_pos_bias=True))
    assert set(model.state_dict()) == keys


def test_a_window_larger_than_the_grid_is_refused():
    with pytest.raises(ValueError, match=r"kernel_size \* dilation must be at most the length of the axis \(4\)"):
        sparsify(build("vit"), Neighborhood(7))
