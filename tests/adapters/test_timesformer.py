import copy

import pytest
import torch
from torch import nn
from transformers import TimesformerConfig, TimesformerForVideoClassification, TimesformerModel

import fibottention
from fibottention import Dense, Fibottention, Longformer
from fibottention.adapters import timesformer
from fibottention.analysis.attention_maps import attention_maps
from fibottention.specs import SATA, Linformer, Neighborhood, TopK

HEADS, FRAMES, SIDE = 3, 4, 5
KINDS = ("divided_space_time", "space_only", "joint_space_time")


def make(kind="divided_space_time", **options):
    torch.manual_seed(0)
    config = TimesformerConfig(
        image_size=8 * SIDE,
        patch_size=8,
        num_frames=FRAMES,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=48,
        attention_type=kind,
        num_labels=3,
        initializer_range=0.2,
        **options,
    )
    return TimesformerForVideoClassification(config).eval()


def clips(batch=2):
    shape = (batch, FRAMES, 3, 8 * SIDE, 8 * SIDE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def masked(model, masks, fill):
    """The model with transformers' own attention under masks ``(H, T, T)`` by kind of layer and its number."""
    model = copy.deepcopy(model)

    def forward_of(attention, mask):
        def forward(hidden_states, output_attentions=False):
            batch, length, width = hidden_states.shape
            qkv = attention.qkv(hidden_states).reshape(batch, length, 3, HEADS, width // HEADS)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-2, -1)) * attention.scale
            scores = scores.masked_fill(~mask, float("-inf") if fill == "-inf" else 0.0)
            return ((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width),)

        return forward

    for number, layer in enumerate(model.timesformer.encoder.layer):
        if "space" in masks:
            layer.attention.attention.forward = forward_of(layer.attention.attention, masks["space"][number])
        if "time" in masks:
            layer.temporal_attention.attention.forward = forward_of(
                layer.temporal_attention.attention, masks["time"][number]
            )
    return model


def masks_of(spec, tokens, prefix):
    return [spec.pattern(HEADS, tokens, prefix_tokens=prefix, layer=n).mask() for n in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_dense_is_transformers_own_attention(kind):
    model = make(kind)
    expected = model(clips()).logits
    names = set(model.state_dict())
    report = fibottention.sparsify(model, Dense())
    assert report.density == 1
    assert set(model.state_dict()) == names
    torch.testing.assert_close(model(clips()).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fill", ["-inf", "zero"])
def test_a_spec_is_attention_under_its_masks(kind, fill):
    model, spec = make(kind), Fibottention(w_min=2, w_max=8, fill=fill)
    tokens = SIDE**2 * (FRAMES if kind == "joint_space_time" else 1)
    expected = masked(model, {"space": masks_of(spec, tokens, 1)}, fill)(clips()).logits
    report = fibottention.sparsify(model, spec)
    assert [layer.num_tokens for layer in report.layers] == [tokens, tokens]
    assert [layer.sequences for layer in report.layers] == [1 if kind == "joint_space_time" else FRAMES] * 2
    assert len(report.left_dense) == (2 if kind == "divided_space_time" else 0)
    assert report.density < 0.6
    torch.testing.assert_close(model(clips()).logits, expected, atol=1e-5, rtol=1e-4)


def test_space_and_time_each_have_a_spec():
    model, space, time = make(), Longformer(window=3), Fibottention(w_min=2, w_max=3)
    masks = {"space": masks_of(space, SIDE**2, 1), "time": masks_of(time, FRAMES, 0)}
    both = masked(model, masks, "-inf")(clips()).logits
    one = masked(model, {"time": masks["time"]}, "-inf")(clips()).logits
    changed = copy.deepcopy(model)
    report = timesformer.sparsify(changed, space, temporal=time)
    assert [layer.prefix_tokens for layer in report.layers] == [1, 0, 1, 0]
    torch.testing.assert_close(changed(clips()).logits, both, atol=1e-5, rtol=1e-4)
    report = timesformer.sparsify(model, None, temporal=time)
    assert all("temporal" in layer.path for layer in report.layers)
    torch.testing.assert_close(model(clips()).logits, one, atol=1e-5, rtol=1e-4)


def test_gradients_are_those_of_masked_attention():
    model, spec = make().train(), Fibottention(w_min=2, w_max=8)
    reference = masked(model, {"space": masks_of(spec, SIDE**2, 1)}, "-inf")
    fibottention.sparsify(model, spec)
    for one in (model, reference):
        one(clips()).logits.square().sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    "spec", [Neighborhood(kernel_size=3), SATA(), TopK(4), Linformer(projection=4)], ids=lambda s: s.name
)
def test_other_specs_train_save_and_load(spec, tmp_path):
    model = make()
    fibottention.sparsify(model, spec)
    model(clips()).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    expected = model(clips()).logits
    again = make()
    fibottention.sparsify(again, spec)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(clips()).logits, expected)


def test_a_saved_model_is_transformers_own_again(tmp_path):
    model = make()
    expected = model(clips()).logits
    fibottention.sparsify(model, Fibottention(w_min=2, w_max=8))
    model.save_pretrained(tmp_path)
    loaded = TimesformerForVideoClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(clips()).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_transform_that_is_not_called_is_noticed_in_the_first_forward_pass():
    model = make()
    timesformer.sparsify(model, SATA())
    copied = copy.deepcopy(model)
    model(clips())
    attention = copied.timesformer.encoder.layer[1].attention.attention
    attention.forward = lambda hidden_states, *_, **__: (hidden_states,)
    with pytest.raises(RuntimeError, match=r"1 attention layers were not used .* such as timesformer.encoder.layer.1"):
        copied(clips())


def test_inside_another_module_and_without_a_head():
    model = make()
    wrapper = nn.ModuleDict({"video": model.timesformer})
    report = fibottention.sparsify(wrapper, Fibottention(w_min=2, w_max=8))
    assert report.layers[0].path == "video.encoder.layer.0.attention.attention"
    assert isinstance(wrapper["video"], TimesformerModel)


def test_attention_maps_are_those_of_each_frame():
    model = make()
    maps = attention_maps(model, clips())
    assert [tuple(layer.values.shape) for layer in maps] == [(2 * FRAMES, HEADS, SIDE**2)] * 2
    fibottention.sparsify(model, Dense())
    again = attention_maps(model, clips())
    torch.testing.assert_close(maps[1].values, again[1].values)


JOINT = "joint_space_time"
IN_TIME = "neighborhood needs tokens in two dimensions"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: timesformer.sparsify(m, None), "spec or temporal must be given"),
        (lambda m: timesformer.sparsify(nn.Linear(2, 2), Dense()), "Linear holds no TimeSformer"),
        (lambda m: timesformer.sparsify(make(JOINT), Dense(), temporal=Dense()), "temporal is for attention_type"),
        (lambda m: timesformer.sparsify(make(JOINT), Neighborhood(3)), IN_TIME),
        (lambda m: timesformer.sparsify(m, None, temporal=Neighborhood(3)), IN_TIME),
        (
            lambda m: fibottention.sparsify(make(attention_probs_dropout_prob=0.1), Fibottention(fill="zero")),
            "dropout of 0, got 0.1",
        ),
    ],
)
def test_what_cannot_be_says_so_and_changes_nothing(change, message):
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        change(model)
    assert [type(module) for module in model.modules()] == before
    with pytest.raises(TypeError, match="spec must be an AttentionSpec"):
        timesformer.sparsify(model, "fibottention")  # type: ignore[arg-type]


def test_weights_of_pairs_are_not_returned():
    model = make()
    fibottention.sparsify(model, Dense())
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        model(clips(), output_attentions=True)
