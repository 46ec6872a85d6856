import pytest
import timm
import torch
from safetensors.torch import save_file

from fibottention.errors import UserError
from fibottention.models.neighborhood_checkpoints import to_transformers
from fibottention.specs import Dense, Fibottention
from fibottention.tasks.dense.backbone import SimplePyramid, build_backbone
from fibottention.tasks.dense.config import DenseModelConfig
from tests.tasks.dense.models import BACKBONES


def config(backbone, **options):
    name, sizes, _ = BACKBONES[backbone]
    return DenseModelConfig(name=name, options=dict(sizes), **options)


@pytest.mark.parametrize(
    ("backbone", "spec", "channels", "strides"),
    [
        ("dinat", None, [16, 32, 64, 128], [4, 8, 16, 32]),
        ("swin", Fibottention(), [16, 32, 64, 128], [4, 8, 16, 32]),
        ("vit", Fibottention(), [256] * 4, [2, 4, 8, 16]),
    ],
)
@pytest.mark.parametrize("size", [(64, 64), (96, 160), (32, 64)])
def test_maps_have_the_sizes_that_are_said(backbone, spec, channels, strides, size):
    model, report = build_backbone(config(backbone), spec)
    assert (report is None) == (spec is None)
    assert (model.channels, model.strides) == (channels, strides)
    with torch.no_grad():
        maps = model.eval()(torch.randn(2, 3, *size))
    assert [tuple(m.shape) for m in maps] == [
        (2, c, size[0] // s, size[1] // s) for c, s in zip(channels, strides, strict=True)
    ]


def test_maps_are_those_of_timm():
    """A pyramid's maps, before the norms, and a plain transformer's last tokens."""
    model, _ = build_backbone(config("swin"), None)
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = model.eval().model.forward_intermediates(x, intermediates_only=True)
        for norm, found, one in zip(model.norms, model(x), expected, strict=True):
            torch.testing.assert_close(found, norm(one))
    plain, _ = build_backbone(config("vit"), None)
    with torch.no_grad():
        tokens = plain.eval().model.forward_features(x)[:, 1:].transpose(1, 2).unflatten(2, (8, 12))
        for found, one in zip(plain(x), plain.pyramid(tokens), strict=True):
            torch.testing.assert_close(found, one)


def test_dense_attention_changes_nothing():
    torch.manual_seed(0)
    model, _ = build_backbone(config("vit"), None)
    dense, _ = build_backbone(config("vit"), Dense())
    dense.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        for found, expected in zip(dense.eval()(x), model.eval()(x), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_channels_of_a_simple_pyramid():
    model, _ = build_backbone(config("vit"), None, 24)
    assert model.channels == [24] * 4
    assert model.has_simple_pyramid
    assert model(torch.randn(1, 3, 64, 64))[0].shape == (1, 24, 32, 32)


def test_simple_pyramid():
    maps = SimplePyramid(12, 8)(torch.randn(1, 12, 6, 10))
    assert [tuple(m.shape[1:]) for m in maps] == [(8, 24, 40), (8, 12, 20), (8, 6, 10), (8, 3, 5)]


def test_weights_of_a_classifier_are_taken(tmp_path):
    name, sizes, _ = BACKBONES["dinat"]
    classifier = timm.create_model(name, num_classes=7, **sizes)
    save_file({n: w.contiguous() for n, w in classifier.state_dict().items()}, tmp_path / "own.safetensors")
    torch.save({"model": to_transformers(classifier)}, tmp_path / "transformers.pth")
    x = torch.randn(1, 3, 64, 64)
    expected = classifier.eval().forward_intermediates(x, intermediates_only=True)[:3]
    for file in ("own.safetensors", "transformers.pth"):
        model, _ = build_backbone(config("dinat", backbone_checkpoint=str(tmp_path / file)), None)
        found = model.eval()(x)
        for level, one in enumerate(expected):  # the norms are those of the backbone
            norm = model.model.get_submodule(f"norm{level}")
            torch.testing.assert_close(found[level], norm(one.movedim(1, -1)).movedim(-1, 1), atol=1e-5, rtol=1e-4)
    vit = timm.create_model(BACKBONES["vit"][0], num_classes=7, **BACKBONES["vit"][1])
    torch.save(vit.state_dict(), tmp_path / "vit.pth")
    model, _ = build_backbone(config("vit", backbone_checkpoint=str(tmp_path / "vit.pth")), Fibottention())
    assert torch.equal(model.model.blocks[1].mlp.fc1.weight, vit.blocks[1].mlp.fc1.weight)


def test_pretrained_weights_are_taken(tmp_path):
    name, sizes, _ = BACKBONES["dinat"]
    classifier = timm.create_model(name, **sizes)
    torch.save(classifier.state_dict(), tmp_path / "weights.pth")
    there = {**sizes, "pretrained_cfg_overlay": {"file": str(tmp_path / "weights.pth")}}
    model, _ = build_backbone(DenseModelConfig(name=name, pretrained=True, options=there), None)
    own = model.model.state_dict()
    for key, weight in classifier.state_dict().items():
        if not key.startswith(("head.", "norm.")):
            assert torch.equal(own[key], weight)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "dinat_tny"}, "no model is named 'dinat_tny'.*dinat_tiny"),
        ({"name": "resnet18", "options": {"block": 3}}, "model resnet18 cannot be made"),
        ({"options": {"num_classes": 4}}, "model.options must not hold num_classes"),
        (
            {"name": "vit_tiny_patch16_224", "options": {"patch_size": 14, "img_size": 28}},
            "model vit_tiny_patch16_224 is no backbone: .* a multiple of 4 pixels, got 14",
        ),
        ({"backbone_checkpoint": "nowhere.pth"}, "nowhere.pth is not a file of weights"),
    ],
)
def test_what_cannot_be_a_backbone_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        build_backbone(DenseModelConfig(**{"name": "dinat_mini", **options}), None)


def test_specs_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="attention fibottention in dinat_mini: .*NAT and DiNAT have an attention"):
        build_backbone(config("dinat"), Fibottention())


def test_other_weights_are_refused(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "other.pth")
    for backbone in ("dinat", "vit"):
        with pytest.raises(UserError, match=r"do not fit \w+: .* is missing, and \d+ more"):
            build_backbone(config(backbone, backbone_checkpoint=str(tmp_path / "other.pth")), None)
