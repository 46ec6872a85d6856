"""NAT and DiNAT in transformers: against transformers' own modules, against timm's models, inside its heads."""

import pytest
import torch
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    DinatConfig,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    MaskFormerConfig,
    MaskFormerForInstanceSegmentation,
    OneFormerConfig,
    OneFormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)
from transformers.models.dinat import modeling_dinat

from fibottention.adapters.transformers import register
from fibottention.compat.natten.functional import natten2dav, natten2dqkrpb
from fibottention.models import transformers_neighborhood as ours
from fibottention.models.neighborhood_checkpoints import convert_checkpoint, load_checkpoint, to_transformers
from tests.models.test_neighborhood_transformer import images, randomize, small

register()
register()

SIZES = {"embed_dim": 16, "depths": [1, 2, 1, 2], "num_heads": [1, 2, 4, 8], "kernel_size": 7}
DILATIONS = [[1], [1, 4], [1], [1, 1]]
STAGES = ["stage1", "stage2", "stage3", "stage4"]


def config(**options):
    return DinatConfig(**{**SIZES, "dilations": DILATIONS, "num_labels": 5, **options})


@pytest.fixture
def theirs(monkeypatch):
    """transformers' own module, with its broken attention put right by natten's old functions."""

    def forward(self, x, output_attentions=False):
        shape = (*x.shape[:-1], self.num_attention_heads, self.attention_head_size)
        q, k, v = (layer(x).view(shape).movedim(3, 1) for layer in (self.query, self.key, self.value))
        scores = natten2dqkrpb(q * shape[-1] ** -0.5, k, self.rpb, self.kernel_size, self.dilation)
        weights = scores.softmax(-1)
        out = natten2dav(weights, v, self.kernel_size, self.dilation).movedim(1, 3).flatten(3)
        return (out, weights) if output_attentions else (out,)

    monkeypatch.setattr(modeling_dinat.NeighborhoodAttention, "forward", forward)
    monkeypatch.setattr(modeling_dinat, "requires_backends", lambda *args: None)
    return modeling_dinat


@pytest.mark.parametrize("options", [{}, {"layer_scale_init_value": 1e-5}, {"qkv_bias": False, "mlp_ratio": 2.0}])
def test_same_keys_and_results_as_transformers(theirs, options):
    reference = randomize(theirs.DinatForImageClassification(config(**options)).eval())
    model = ours.DinatForImageClassification(config(**options)).eval()
    model.load_state_dict(reference.state_dict())
    labels = torch.tensor([0, 3])
    asked = {"labels": labels, "output_attentions": True, "output_hidden_states": True}
    for x in (images(96, 80), images(64, 64)):  # the second has levels smaller than the window
        wanted, got = reference(x, **asked), model(x, **asked)
        assert got.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name])
        # The fused form, without attention weights.
        torch.testing.assert_close(model(x, return_dict=False), reference(x, return_dict=False))


def test_same_features_as_transformers_backbone(theirs):
    reference = randomize(theirs.DinatBackbone(config(out_features=["stage1", "stage3", "stage4"])).eval())
    model = AutoBackbone.from_config(config(out_features=["stage1", "stage3", "stage4"])).eval()
    assert type(model) is ours.DinatBackbone
    model.load_state_dict(reference.state_dict())
    reference, model, x = reference.double(), model.double(), images(96, 80).double()
    wanted, got = reference(x, output_hidden_states=True), model(x, output_hidden_states=True)
    torch.testing.assert_close(got.feature_maps, wanted.feature_maps)
    torch.testing.assert_close(got.hidden_states, wanted.hidden_states)
    assert model.channels == reference.channels == [16, 64, 128]


@pytest.mark.parametrize("name", ["dinat_mini", "nat_base"])
def test_same_results_as_the_model_in_timm(name):
    scale = 1e-5 if name == "nat_base" else 0.0
    ratio = 2.0 if name == "nat_base" else 3.0
    model = randomize(small(name, dilations=DILATIONS))
    other = ours.DinatForImageClassification(config(layer_scale_init_value=scale, mlp_ratio=ratio)).eval()
    other.load_state_dict(to_transformers(model))
    torch.testing.assert_close(other(images(96, 80)).logits, model(images(96, 80)))
    again = small(name, dilations=DILATIONS)
    load_checkpoint(again, other.state_dict())
    torch.testing.assert_close(again(images(96, 80)), model(images(96, 80)))


def test_backbones_go_both_ways_too():
    model = randomize(small(feature_norms=True, dilations=DILATIONS))
    backbone = ours.DinatBackbone(config(out_features=STAGES)).eval()
    backbone.load_state_dict(to_transformers(model))
    features = model.forward_intermediates(images(96, 80), intermediates_only=True)
    torch.testing.assert_close(list(backbone(images(96, 80)).feature_maps), features)
    weights = convert_checkpoint(backbone.state_dict(), model)
    assert all(torch.equal(weights[n], w) for n, w in model.state_dict().items())


@pytest.mark.parametrize("family", ["dinat", "nat"])
def test_auto_classes_save_and_load(tmp_path, family):
    made = AutoConfig.for_model(family, **SIZES, num_labels=5, drop_path_rate=0.0,
                                **({"dilations": DILATIONS} if family == "dinat" else {}))  # fmt: skip
    model = randomize(AutoModelForImageClassification.from_config(made).eval())
    assert type(model).__module__ == ours.__name__
    assert next(iter(model.state_dict())).startswith(f"{family}.")
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert again.config.dilations == (DILATIONS if family == "dinat" else [[1], [1, 1], [1], [1, 1]])
    torch.testing.assert_close(again(images(64, 64)).logits, model(images(64, 64)).logits, rtol=0, atol=0)
    features = AutoModel.from_pretrained(tmp_path).eval()(images(64, 64))
    torch.testing.assert_close(again.classifier(features.pooler_output), model(images(64, 64)).logits)


def test_weights_that_a_checkpoint_lacks_are_initialized(tmp_path):
    model = ours.DinatForImageClassification(config(layer_scale_init_value=1e-5))
    model.save_pretrained(tmp_path)
    backbone = AutoBackbone.from_config(config(layer_scale_init_value=1e-5))
    backbone.save_pretrained(tmp_path)
    loaded = ours.DinatForImageClassification.from_pretrained(tmp_path)
    assert all(p.isfinite().all() for p in loaded.parameters())
    layer = loaded.dinat.encoder.levels[1].layers[0]
    assert (layer.attention.self.rpb == 0).all()
    assert (layer.layer_scale_parameters == 1e-5).all()


HEADS = {
    "mask2former": (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        {
            "feature_size": 32,
            "mask_feature_size": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "num_attention_heads": 2,
            "dim_feedforward": 32,
            "num_queries": 5,
        },
        {"mask_labels": "masks", "class_labels": "classes"},
    ),
    "maskformer": (
        MaskFormerConfig,
        MaskFormerForInstanceSegmentation,
        {"fpn_feature_size": 32, "mask_feature_size": 32},
        {"mask_labels": "masks", "class_labels": "classes"},
    ),
    "oneformer": (
        OneFormerConfig,
        OneFormerForUniversalSegmentation,
        {
            "hidden_dim": 32,
            "mask_dim": 32,
            "conv_dim": 32,
            "encoder_feedforward_dim": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "dim_feedforward": 32,
            "num_attention_heads": 2,
            "num_queries": 5,
            "query_dec_layers": 1,
            "is_training": False,
        },
        {"task_inputs": "task"},
    ),
    "upernet": (
        UperNetConfig,
        UperNetForSemanticSegmentation,
        {"hidden_size": 16, "auxiliary_in_channels": 64, "num_labels": 3},
        {"labels": "segments"},
    ),
}


@pytest.mark.parametrize("family", ["dinat", "nat"])
@pytest.mark.parametrize("name", HEADS)
def test_segmentation_heads_run_train_save_and_reload(name, family, tmp_path):
    config_class, model_class, sizes, needed = HEADS[name]
    backbone = AutoConfig.for_model(family, **SIZES, out_features=STAGES)
    torch.manual_seed(0)
    model = model_class(config_class(backbone_config=backbone, **sizes))
    assert any(type(m).__module__ == ours.__name__ and "Backbone" in type(m).__name__ for m in model.modules())
    generator = torch.Generator().manual_seed(0)
    have = {
        "masks": [torch.randint(2, (2, 64, 96), generator=generator).float() for _ in range(2)],
        "classes": [torch.tensor([0, 1]), torch.tensor([1, 1])],
        "task": torch.zeros(2, 77, dtype=torch.long),
        "segments": torch.randint(3, (2, 64, 96), generator=generator),
    }
    x = images(64, 96)
    out = model.train()(pixel_values=x, **{argument: have[what] for argument, what in needed.items()})
    score = out.loss if name != "oneformer" else out.masks_queries_logits.square().mean()
    score.sum().backward()
    inside = [p for n, p in model.named_parameters() if n.endswith("attention.self.rpb")]
    assert inside
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in inside)
    model.eval().save_pretrained(tmp_path)
    again = model_class.from_pretrained(tmp_path).eval()
    given = {"task_inputs": have["task"]} if name == "oneformer" else {}
    with torch.no_grad():
        first, second = model(pixel_values=x, **given), again(pixel_values=x, **given)
    key = "logits" if name == "upernet" else "masks_queries_logits"
    torch.testing.assert_close(first[key], second[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dilations": [[1], [1], [1], [1]]}, r"dilations must hold one number per layer of depths=\[1, 2, 1, 2\]"),
        ({"patch_size": 8}, "patch_size must be 4, got 8"),
        ({"num_heads": [3, 3, 3, 3]}, r"must be divisible by its num_heads, got 3"),
    ],
)
def test_bad_configurations_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ours.DinatModel(config(**options))


def test_nat_has_no_dilations():
    with pytest.raises(ValueError, match=r"NAT has no dilations but 1, got \[\[1, 4\]\]"):
        ours.NatConfig(depths=[2], num_heads=[2], dilations=[[1, 4]])


def test_the_number_of_channels_is_checked():
    with pytest.raises(ValueError, match="pixel_values must have 3 channels, got 1"):
        ours.DinatModel(config())(torch.zeros(1, 1, 64, 64))
