"""Specs in transformers' vision models: against transformers' own attention under masks and formulas made here."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import timm
import torch
import transformers
from accelerate import cpu_offload
from transformers import AttentionInterface, AutoModel
from transformers.models.vit.modeling_vit import ViTForImageClassification

from fibottention import LSA, SATA, AttentionSpec, Dense, Fibottention, Neighborhood, sparsify
from fibottention.adapters import transformers as adapter
from fibottention.adapters.transformers import register
from fibottention.cli.options import describe_specs
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.patterns import dilated_window, neighborhood, wythoff
from fibottention.specs.base import _registry

register()

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IMAGES = {"image_size": 32, "patch_size": 4, **SIZES}
CLIPS = {"image_size": 32, "num_frames": 4, **SIZES}
WINDOWS = {"image_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
VJEPA2 = {"crop_size": 32, "patch_size": 8, "frames_per_clip": 4, "hidden_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "pred_hidden_size": 48, "pred_num_attention_heads": 2,
          "pred_num_hidden_layers": 1}  # fmt: skip

# Configuration, options, model, prefix tokens, patch tokens.
FAMILIES = {
    "vit": ("ViTConfig", IMAGES, "ViTModel", 1, 64),
    "deit": ("DeiTConfig", IMAGES, "DeiTModel", 2, 64),
    "vit_msn": ("ViTMSNConfig", IMAGES, "ViTMSNModel", 1, 64),
    "ijepa": ("IJepaConfig", IMAGES, "IJepaModel", 0, 64),
    "dinov2": ("Dinov2Config", IMAGES, "Dinov2Model", 1, 64),
    "dinov2_registers": ("Dinov2WithRegistersConfig", IMAGES, "Dinov2WithRegistersModel", 5, 64),
    "dinov3": ("DINOv3ViTConfig", {"num_register_tokens": 4, **IMAGES}, "DINOv3ViTModel", 5, 64),
    "beit": ("BeitConfig", {"use_relative_position_bias": True, **IMAGES}, "BeitModel", 1, 64),
    "clip": ("CLIPVisionConfig", IMAGES, "CLIPVisionModel", 1, 64),
    "siglip": ("SiglipVisionConfig", IMAGES, "SiglipVisionModel", 0, 64),
    "swin": ("SwinConfig", WINDOWS, "SwinModel", 0, 16),
    "videomae": ("VideoMAEConfig", {"patch_size": 8, **CLIPS}, "VideoMAEModel", 0, 32),
    "vivit": ("VivitConfig", {"tubelet_size": [2, 8, 8], **CLIPS}, "VivitModel", 1, 32),
    "vjepa2": ("VJEPA2Config", VJEPA2, "VJEPA2Model", 0, 32),
}


def make(family):
    config, options, model, _, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():  # weights at which attention is far from uniform
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(part in name for part in ("q_proj", "k_proj", "query", "key")):
                parameter.mul_(20)
            if "relative_position_bias" in name:
                parameter.normal_()
    return model


def inputs(family):
    clip = family in ("videomae", "vivit", "vjepa2")
    name = "pixel_values_videos" if family == "vjepa2" else "pixel_values"
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn((2, 4, 3, 32, 32) if clip else (2, 3, 32, 32), generator=generator)}


def features(model, family):
    with torch.no_grad():
        return model(**inputs(family))[0]


def of_transformers(model, family, change_scores=None, change_weights=None):
    """The model's features with attention written out here; layers are numbered in the order of their calls."""
    layers = []

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        if "predictor" not in names[module]:
            layers.append(module)
        scores = query @ key.mT * scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        if change_scores is not None and layers[-1] is module:
            scores = change_scores(scores, len(layers) - 1)
        weights = scores.softmax(-1)
        if change_weights is not None and layers[-1] is module:
            weights = change_weights(weights)
        return (weights @ value).transpose(1, 2), None

    names = {module: name for name, module in model.named_modules()}
    AttentionInterface.register("written_out", attend)
    model.set_attn_implementation("written_out")
    return features(model, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_are_those_of_masked_attention(family):
    model, prefix, tokens = make(family), *FAMILIES[family][3:]
    keys, dense = list(model.state_dict()), features(model, family)

    def mask(scores, layer):
        heads = scores.shape[1]
        order = Fibottention().head_order(heads, layer)
        kept = wythoff(heads, tokens, prefix_tokens=prefix, head_order=order).mask()
        return scores.masked_fill(~kept, float("-inf"))

    expected = of_transformers(model, family, change_scores=mask)
    model.set_attn_implementation("fibottention")
    torch.testing.assert_close(features(model, family), expected, rtol=1e-4, atol=1e-4)
    assert (expected - dense).abs().max() > 1e-3
    assert list(model.state_dict()) == keys
    report = sparsify(model, Dense())
    torch.testing.assert_close(features(model, family), dense, rtol=1e-4, atol=1e-4)
    assert {(layer.prefix_tokens, layer.num_tokens) for layer in report.layers} == {(prefix, tokens)}
    assert report.left_dense == (("predictor.layer.0.attention",) if family == "vjepa2" else ())


@pytest.mark.parametrize("family", FAMILIES)
def test_models_can_be_made_with_a_spec(family):
    config, options, model_class, _, _ = FAMILIES[family]
    named = getattr(transformers, config)(**options, attn_implementation="sata")
    model = getattr(transformers, model_class)(named).eval()
    layers = [m for m in model.modules() if isinstance(m, PatternAttention)]
    assert [layer.layer for layer in layers] == list(range(len(layers)))
    assert len(layers) == (4 if family == "swin" else 2)
    features(model, family)


@pytest.mark.parametrize("family", ["vit", "beit", "swin", "siglip", "vivit"])
def test_sata_is_its_formula(family):
    model = make(family)

    def twist(weights):  # arXiv 2210.12333, with t = 0.1 and s = 0.5
        trivial = weights <= 0.1 * weights.amax(-1, keepdim=True)
        small = weights * trivial
        return torch.where(trivial, 0.5 * small**2 / small.sum(-1, keepdim=True).clamp(min=1e-30), weights)

    expected, dense = of_transformers(model, family, change_weights=twist), of_transformers(model, family)
    model.set_attn_implementation("sata")
    torch.testing.assert_close(features(model, family), expected, rtol=1e-4, atol=2e-5)
    assert (expected - dense).abs().max() > 2e-4


def test_other_specs():
    model = make("vit")

    def lsa(scores, layer):
        return scores.masked_fill(torch.eye(65, dtype=torch.bool), float("-inf"))

    expected = of_transformers(model, "vit", change_scores=lsa)
    model.set_attn_implementation("lsa")
    torch.testing.assert_close(features(model, "vit"), expected, rtol=1e-4, atol=1e-4)

    def near(scores, layer):
        return scores.masked_fill(~neighborhood(1, (8, 8), 3, prefix_tokens=1).mask(), float("-inf"))

    expected = of_transformers(model, "vit", change_scores=near)
    sparsify(model, Neighborhood(3))
    torch.testing.assert_close(features(model, "vit"), expected, rtol=1e-4, atol=1e-4)
    register({"windowed": Neighborhood(3)})
    model.set_attn_implementation("windowed")
    torch.testing.assert_close(features(model, "vit"), expected, rtol=1e-4, atol=1e-4)


def test_what_specs_learn_is_trained_saved_and_loaded(tmp_path):
    config = transformers.ViTConfig(**IMAGES)
    ViTForImageClassification(config).save_pretrained(tmp_path / "dense")
    model = ViTForImageClassification.from_pretrained(tmp_path / "dense", attn_implementation="sata")
    scales = {n: p for n, p in model.named_parameters() if "sparse" in n}
    assert len(scales) == 2
    assert all(p == 0.5 for p in scales.values())  # a checkpoint without them gives the initial values
    with torch.no_grad():
        for q in (p for n, p in model.named_parameters() if "q_proj.weight" in n or "k_proj.weight" in n):
            q.mul_(20)
    model.train()(**inputs("vit")).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad != 0 for p in scales.values())
    with torch.no_grad():
        for i, p in enumerate(scales.values()):
            p.fill_(0.1 + i)
    model.save_pretrained(tmp_path / "sata")
    again = ViTForImageClassification.from_pretrained(tmp_path / "sata", attn_implementation="sata").eval()
    x = inputs("vit")
    torch.testing.assert_close(again(**x).logits, model.eval()(**x).logits)
    assert [p.item() for n, p in again.named_parameters() if "sparse" in n] == pytest.approx([0.1, 1.1])
    lsa = AutoModel.from_pretrained(tmp_path / "dense", attn_implementation="lsa")
    assert all((p == 8**-0.5).all() for n, p in lsa.named_parameters() if "temperature" in n)
    again.set_attn_implementation("sdpa")
    assert not any("sparse" in name for name in again.state_dict())


UNSUPPORTED = {
    "swinv2": ("Swinv2Config", WINDOWS, "Swinv2Model"),
    "hiera": ("HieraConfig", {"image_size": [32, 32], "depths": [1, 1, 1, 1], "embed_dim": 16}, "HieraModel"),
}


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_models_that_would_stay_dense_are_refused(family):
    config, options, model_class = UNSUPPORTED[family]
    config, model_class = getattr(transformers, config)(**options), getattr(transformers, model_class)
    message = f"does not support {model_class.__name__}, whose attention does not go through transformers' interface"
    model = model_class(config)
    for spec in (Fibottention(), SATA()):
        with pytest.raises(ValueError, match=message):
            sparsify(model, spec)
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(spec.name)
    assert model.config._attn_implementation not in adapter._named
    named = type(config)(**options, attn_implementation="fibottention")
    with pytest.raises(ValueError, match=message):
        model_class(named)


def test_timesformer_takes_no_attention_by_name():
    config = transformers.TimesformerConfig(patch_size=8, **CLIPS)
    model = transformers.TimesformerModel(config)
    message = "TimesformerModel takes no attention by name; use fibottention.sparsify"
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("fibottention")
    named = transformers.TimesformerConfig(patch_size=8, attn_implementation="fibottention", **CLIPS)
    with pytest.raises(ValueError, match=message):
        transformers.TimesformerModel(named)


def test_parts_of_a_model():
    config = transformers.CLIPConfig(text_config=SIZES, vision_config=IMAGES)
    model = transformers.CLIPModel(config).eval()
    x = {**inputs("vit"), "input_ids": torch.arange(5)[None].expand(2, -1)}
    before = model(**x)
    with pytest.raises(ValueError, match="supports in CLIPTextModel .* a dictionary names one part"):
        model.set_attn_implementation("fibottention")
    assert model.config.vision_config._attn_implementation == "sdpa"
    model.set_attn_implementation({"vision_config": "fibottention"})
    after = model(**x)
    assert torch.equal(after.text_embeds, before.text_embeds)
    assert (after.image_embeds - before.image_embeds).abs().max() > 1e-4
    other = transformers.CLIPModel(config).eval()
    assert len(sparsify(other, Fibottention()).layers) == 2
    assert other.config.text_config._attn_implementation == "sdpa"


def test_errors():
    model = make("vit")
    with pytest.raises(ValueError, match="the name 'sdpa' is that of an attention implementation of transformers"):
        register({"sdpa": SATA()})
    with pytest.raises(TypeError, match="spec must be an AttentionSpec such as Fibottention\\(\\), got str"):
        sparsify(model, "fibottention")
    with pytest.raises(ValueError, match="neighborhood needs tokens in two dimensions, but those of VideoMAESelfAtt"):
        sparsify(make("videomae"), Neighborhood(3))
    with pytest.raises(ValueError, match="rel_pos_bias=True is not supported by SwinAttention"):
        sparsify(make("swin"), Neighborhood(3, rel_pos_bias=True))
    with pytest.raises(ValueError, match="does not support VideoMAEForPreTraining"):
        sparsify(transformers.VideoMAEForPreTraining(transformers.VideoMAEConfig(patch_size=8, **CLIPS)), SATA())
    dropping = transformers.ViTModel(transformers.ViTConfig(attention_probs_dropout_prob=0.1, **IMAGES))
    with pytest.raises(
        ValueError, match="needs an attention dropout of 0, got 0.1 in ViTAttention at layers.0.attention"
    ):
        sparsify(dropping, Fibottention(fill="zero"))
    model.config._attn_implementation = "sata"  # behind the back of the adapter
    with pytest.raises(RuntimeError, match="ViTAttention has no attention spec although its configuration names one"):
        features(model, "vit")
    with pytest.raises(ValueError, match="found no attention that it supports in BertModel .model_type 'bert'"):
        sparsify(transformers.BertModel(transformers.BertConfig(vocab_size=10, **SIZES)), SATA())


def test_a_second_spec_takes_the_place_of_the_first():
    model = make("vit")
    sparsify(model, SATA())
    sparsify(model, LSA())  # before any forward pass
    modules = [m for m in model.modules() if isinstance(m, PatternAttention)]
    assert len(modules) == 2
    assert all(m.transform is None and m.temperature is not None for m in modules)
    features(model, "vit")


def scales(model):
    return [p for name, p in model.named_parameters() if name.endswith("transform.scale")]


class PairConfig(transformers.PreTrainedConfig):
    model_type = "pair"
    sub_configs = {"first_config": transformers.ViTConfig, "second_config": transformers.VideoMAEConfig}  # noqa: RUF012


class Pair(transformers.PreTrainedModel):
    """Two vision models, each with a configuration of its own."""

    config_class = PairConfig

    def __init__(self, first, second):
        config = PairConfig()
        config.first_config, config.second_config = first.config, second.config
        super().__init__(config)
        self.first, self.second = first, second


def test_each_part_gets_the_spec_that_is_asked_for():
    pair = Pair(make("vit"), make("videomae"))
    pair.set_attn_implementation({"first_config": "sata", "second_config": "fibottention"})
    specs = [{type(m.spec) for m in part.modules() if isinstance(m, PatternAttention)} for part in pair.children()]
    assert specs == [{SATA}, {Fibottention}]
    register({"near": Neighborhood(3)})
    pair.set_attn_implementation({"first_config": "near"})  # which the second could not take
    with pytest.raises(ValueError, match="needs tokens in two dimensions"):
        pair.set_attn_implementation({"second_config": "near"})
    assert pair.second.config._attn_implementation == "fibottention"
    features(pair.first, "vit"), features(pair.second, "videomae")


def test_what_was_learned_stays_when_another_part_changes():
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=SIZES, vision_config=IMAGES))
    sparsify(clip, SATA(0.05))
    for scale in scales(clip):
        scale.data.fill_(0.9)
    before = [id(p) for p in scales(clip)]
    clip.set_attn_implementation({"text_config": "eager"})
    assert [id(p) for p in scales(clip)] == before
    with pytest.raises(ValueError, match="found no attention that it supports in CLIPTextModel"):
        clip.set_attn_implementation({"text_config": "sata"})
    with pytest.raises(ValueError, match="does not support Swinv2Model"):
        transformers.Swinv2Model(transformers.Swinv2Config(**WINDOWS)).set_attn_implementation({"": "sata"})


def test_a_spec_with_other_settings_is_another_one():
    model = make("vit")
    sparsify(model, SATA(0.05))
    model.set_attn_implementation("sata")
    assert {m.spec for m in model.modules() if isinstance(m, PatternAttention)} == {SATA()}
    sparsify(model, SATA(0.05))
    again = transformers.ViTModel(model.config)
    assert {m.spec for m in again.modules() if isinstance(m, PatternAttention)} == {SATA(0.05)}


def test_models_that_share_a_configuration():
    config = transformers.ViTConfig(**IMAGES)
    first, second = transformers.ViTModel(config).eval(), transformers.ViTModel(config).eval()
    dense = features(second, "vit")
    sparsify(first, Fibottention())
    torch.testing.assert_close(features(second, "vit"), dense, rtol=0, atol=0)
    sparse = features(first, "vit")
    second.set_attn_implementation("eager")
    torch.testing.assert_close(features(first, "vit"), sparse, rtol=0, atol=0)


def test_the_grid_is_that_of_each_image():
    model = make("dinov2")
    sparsify(model, Neighborhood(3))
    for size in ((16, 64), (32, 64), (64, 32), (32, 32)):
        grid = (size[0] // 4, size[1] // 4)
        x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
        kept = neighborhood(1, grid, 3, prefix_tokens=1).mask()

        def attend(module, query, key, value, mask, scaling=None, kept=kept, **kwargs):
            scores = (query @ key.mT * scaling).masked_fill(~kept, float("-inf"))
            return (scores.softmax(-1) @ value).transpose(1, 2), None

        AttentionInterface.register("of_the_grid", attend)
        other = make("dinov2")
        other.set_attn_implementation("of_the_grid")
        with torch.no_grad():
            torch.testing.assert_close(model(x)[0], other(x)[0], rtol=1e-4, atol=1e-4)


class Wrapper(torch.nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder


def test_models_inside_other_modules():
    report = sparsify(Wrapper(make("vjepa2")), SATA())
    assert report.left_dense == ("encoder.predictor.layer.0.attention",)
    assert [layer.path for layer in report.layers] == [f"encoder.encoder.layer.{i}.attention" for i in (0, 1)]
    timm_model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=1)
    both = Wrapper(make("vit"))
    assert len(sparsify(both, Fibottention()).layers) == 2
    wrapped = transformers.TimmWrapperModel(transformers.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224", model_args={"depth": 1}))  # fmt: skip
    assert len(sparsify(wrapped, Fibottention()).layers) == 1
    assert len(sparsify(Wrapper(timm_model), Fibottention()).layers) == 1
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        sparsify("vit", Fibottention())


def test_a_part_that_is_not_used_is_no_mistake():
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=SIZES, vision_config=IMAGES)).eval()
    sparsify(clip, SATA())
    clip.get_text_features(input_ids=torch.arange(5)[None])
    clip.get_image_features(**inputs("vit"))


def test_offloaded_weights():
    model = cpu_offload(make("vit"), execution_device=torch.device("cpu"))
    sparsify(model, SATA())
    assert {p.device.type for p in scales(model)} == {"cpu"}
    features(model, "vit")


def test_register_keeps_and_checks_names():
    register({"mine": SATA(0.03)})
    register()
    assert adapter._named["mine"] == SATA(0.03)
    register({"dense": Dense()})
    with pytest.raises(ValueError, match="the name 'dense' is that of a spec with its default settings"):
        register({"dense": Dense(temperature=2.0)})
    with pytest.raises(TypeError, match="specs must be a mapping of names to specs, got list"):
        register([Fibottention()])
    with pytest.raises(TypeError, match="specs must hold attention specs, got str for 'bad'"):
        register({"bad": "sata"})


def test_vjepa2_with_its_other_layers_dense():
    config = transformers.VJEPA2Config(**VJEPA2, attn_implementation="fibottention")
    model = transformers.VJEPA2ForVideoClassification(config).eval()
    model.set_attn_implementation("fibottention")
    model.vjepa2.set_attn_implementation("fibottention")
    model(**inputs("vjepa2"))
    assert sum(isinstance(m, PatternAttention) for m in model.modules()) == 2


def test_a_spec_of_the_users_own_without_defaults():
    @dataclass(frozen=True)
    class Step(AttentionSpec):
        name: ClassVar[str] = "step_without_default"
        step: int

        def pattern(self, num_heads, num_tokens, *, prefix_tokens=0, layer=0, grid_size=None):
            return dilated_window(num_heads, num_tokens, num_tokens, self.step, prefix_tokens=prefix_tokens)

    try:
        sparsify(make("vit"), Fibottention())
        model = make("vit")
        sparsify(model, Step(2))
        features(model, "vit")
        assert "step_without_default" in describe_specs()
    finally:
        del _registry["step_without_default"]
