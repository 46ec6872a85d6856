"""Published layouts of weights, each written down here once more, against the models."""

import re

import pytest
import torch
from safetensors.torch import save_file
from timm.models import build_model_with_cfg  # noqa: F401  (timm is what loads pretrained weights)

from fibottention.models.neighborhood_checkpoints import (
    convert_checkpoint,
    load_checkpoint,
    resize_bias_table,
    to_transformers,
)
from tests.models.test_neighborhood_transformer import images, randomize, small


def same_output(a, b, size=(64, 64)):
    torch.testing.assert_close(a(images(*size)), b(images(*size)))


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
@pytest.mark.parametrize("name", ["nat_base", "dinat_mini"])
def test_the_papers_checkpoints_of_nat_and_dinat(name, wrapper):
    source = randomize(small(name))
    weights = source.state_dict()
    # Facts on neighborhood attention, section 4: the official keys.
    expected = {
        r"patch_embed\.proj\.[01]\.(weight|bias)",
        r"patch_embed\.norm\.(weight|bias)",
        r"levels\.\d\.blocks\.\d\.(norm1|attn\.qkv|attn\.proj|norm2|mlp\.fc1|mlp\.fc2)\.(weight|bias)",
        r"levels\.\d\.blocks\.\d\.attn\.rpb",
        r"levels\.\d\.downsample\.(reduction\.weight|norm\.(weight|bias))",
        r"(norm|head)\.(weight|bias)",
    } | ({r"levels\.\d\.blocks\.\d\.gamma[12]"} if name == "nat_base" else set())
    assert [n for n in weights if not any(re.fullmatch(e, n) for e in expected)] == []
    assert all(any(re.fullmatch(e, n) for n in weights) for e in expected)
    target = small(name)
    load_checkpoint(target, weights if wrapper is None else {wrapper: weights})
    same_output(source, target)


def test_the_papers_checkpoints_of_dinat_s():
    source = randomize(small("dinat_s_tiny"))
    weights = {n.replace("levels.", "layers."): w for n, w in source.state_dict().items()}
    target = small("dinat_s_tiny")
    load_checkpoint(target, weights)
    same_output(source, target)


def test_the_papers_checkpoints_of_isotropic_models():
    options = {"depths": (3,), "num_heads": (2,), "embed_dim": 32}
    source = randomize(small("dinat_isotropic_small", **options))
    weights = {n.replace("levels.0.blocks.", "layers."): w for n, w in source.state_dict().items()}
    assert "layers.2.attn.rpb" in weights
    target = small("dinat_isotropic_small", **options)
    load_checkpoint(target, {**weights, "layers.0.attn.relative_position_index": torch.zeros(4, 4)})
    same_output(source, target, (128, 128))


def test_backbones_of_detectors():
    source = randomize(small(feature_norms=True))
    assert {"norm0.weight", "norm3.bias"} <= set(source.state_dict())
    assert not {"norm.weight", "head.weight"} & set(source.state_dict())
    detector = {f"backbone.{n}": w for n, w in source.state_dict().items()} | {"rpn_head.weight": torch.zeros(2)}
    for weights in (source.state_dict(), {"state_dict": detector}):
        target = small(feature_norms=True)
        load_checkpoint(target, weights)
        for a, b in zip(*(m.forward_intermediates(images(64, 64), intermediates_only=True) for m in (source, target))):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(a.mean(1), torch.nn.functional.layer_norm(
        a.permute(0, 2, 3, 1), (128,), source.norm3.weight, source.norm3.bias).mean(-1), rtol=10, atol=10)  # fmt: skip


def test_the_bias_table_is_resized_for_another_kernel_size():
    source, target = randomize(small("nat_mini", kernel_size=7)), small("nat_mini", kernel_size=11)
    load_checkpoint(target, source.state_dict())
    table = target.levels[1].blocks[0].attn.rpb
    assert table.shape == (2, 21, 21)
    small_table = source.levels[1].blocks[0].attn.rpb
    torch.testing.assert_close(resize_bias_table(small_table, 7), small_table)
    # Interpolation keeps what is constant, and nearly what is linear, but for the borders.
    torch.testing.assert_close(resize_bias_table(torch.full((1, 13, 13), 3.0), 11), torch.full((1, 21, 21), 3.0))
    line = torch.arange(13.0).expand(1, 13, 13)
    resized = resize_bias_table(line, 11)[0]
    expected = (torch.arange(21) + 0.5) * 13 / 21 - 0.5
    torch.testing.assert_close(resized[10, 4:17], expected[4:17], rtol=0, atol=0.06)
    assert resize_bias_table(line.half(), 11).dtype == torch.float16


def test_a_mismatch_is_listed_key_by_key():
    model = small()
    weights = model.state_dict()
    weights["levels.9.extra"] = torch.zeros(3)
    del weights["norm.weight"], weights["levels.0.blocks.0.mlp.fc1.bias"]
    weights["head.bias"] = torch.zeros(9)
    before = model.state_dict()["head.weight"].clone()
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_checkpoint(model, weights)
    assert str(error.value).splitlines() == [
        "4 of the weights do not fit the model:",
        "  missing: levels.0.blocks.0.mlp.fc1.bias (48,)",
        "  missing: norm.weight (128,)",
        "  of another shape: head.bias (9,), the model has (5,)",
        "  unexpected: levels.9.extra (3,)",
    ]
    assert torch.equal(model.state_dict()["head.weight"], before)


def test_what_is_not_a_checkpoint_is_named():
    with pytest.raises(ValueError, match="must hold tensors by name, but 'model_state' is none"):
        load_checkpoint(small(), {"model_state": {}, "epoch": 3})
    source, target = randomize(small()), small()
    load_checkpoint(target, {f"module.{n}": w for n, w in source.state_dict().items()})
    same_output(source, target)
    weights = to_transformers(source)
    del weights["dinat.encoder.levels.0.layers.0.attention.self.key.weight"]
    with pytest.raises(ValueError, match="missing: levels.0.blocks.0.attn.qkv.weight") as error:
        load_checkpoint(target, weights)
    assert "unexpected: levels.0.blocks.attention.self" not in str(error.value)
    assert "unexpected: levels.0.blocks.0.attention.self.query.weight" in str(error.value)


def test_models_of_features_take_what_they_need():
    source = randomize(small())
    features = small(features_only=True, out_indices=(0, 2))
    load_checkpoint(features, source.state_dict())
    wanted = source.forward_intermediates(images(64, 64), [0, 2], intermediates_only=True)
    torch.testing.assert_close(features(images(64, 64)), wanted)
    with pytest.raises(TypeError, match="model must be a NAT or DiNAT .* got Linear"):
        load_checkpoint(torch.nn.Linear(2, 2), source.state_dict())


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file of weights .*nofile.pth"):
        load_checkpoint(small(), tmp_path / "nofile.pth")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ValueError, match=r"text.pth is not a file of weights: "):
        load_checkpoint(small(), tmp_path / "text.pth")


def test_another_classifier_on_the_same_features():
    source, target = randomize(small()), small(num_classes=3)
    with pytest.raises(ValueError, match="(?s)head.weight.*new_classifier=True keeps the model's own classifier"):
        load_checkpoint(target, source.state_dict())
    load_checkpoint(target, source.state_dict(), new_classifier=True)
    torch.testing.assert_close(target.forward_features(images(64, 64)), source.forward_features(images(64, 64)))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_from_a_file_also_through_timm(tmp_path, suffix):
    import timm

    from tests.models.test_neighborhood_transformer import SMALL

    source = randomize(small("dinat_s_tiny"))
    weights = {n.replace("levels.", "layers."): w for n, w in source.state_dict().items()}
    file = tmp_path / f"weights{suffix}"
    save_file(weights, file) if suffix == ".safetensors" else torch.save(weights, file)
    target = small("dinat_s_tiny")
    load_checkpoint(target, file)
    same_output(source, target)
    overlay = {"file": str(file), "num_classes": 5}
    through_timm = timm.create_model(
        "dinat_s_tiny", pretrained=True, pretrained_cfg_overlay=overlay, **SMALL, num_classes=5
    )
    same_output(source, through_timm.eval())


def test_there_and_back_through_the_layout_of_transformers():
    for options in ({}, {"feature_norms": True}):
        source = randomize(small("dinat_base", **options))
        weights = convert_checkpoint(to_transformers(source), source)
        assert weights.keys() == source.state_dict().keys()
        assert all(torch.equal(weights[n], w) for n, w in source.state_dict().items())


def test_models_without_a_counterpart_are_refused():
    with pytest.raises(ValueError, match="only NAT and DiNAT"):
        to_transformers(small("dinat_s_tiny"))
