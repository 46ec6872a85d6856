"""Weights of runs, and of transformers' models."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DinatConfig,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    OneFormerConfig,
    OneFormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from fibottention.adapters.transformers import register
from fibottention.errors import UserError
from fibottention.models.transformers_neighborhood import NatConfig
from fibottention.tasks.dense.checkpoints import load_checkpoint
from fibottention.tasks.dense.config import DenseConfig, DenseDataConfig, DenseModelConfig
from fibottention.tasks.dense.model import build_model
from fibottention.training.config import TrainConfig
from tests.tasks.dense.models import (
    BACKBONES,
    CLASSES,
    MASK2FORMER,
    ONEFORMER,
    THINGS,
    image,
    make,
    model_config,
    scene,
)

register()

TEXTS = {"text_encoder_width": 64, "text_encoder_num_layers": 1, "text_encoder_n_ctx": 4, "is_training": True}
# "the task is panoptic" by the tokenizer of openai/CLIP, which OneFormerProcessor pads with zeros.
TASKS = {
    "panoptic": [49406, 518, 10549, 533, 1072, 24755, 49407],
    "instance": [49406, 518, 10549, 533, 34572, 49407],
    "semantic": [49406, 518, 10549, 533, 29119, 1550, 49407],
}


def run_theirs(reference, pixels, target):
    """The outputs of a model of transformers, for OneFormer without its texts."""
    if reference.config.model_type != "oneformer":
        return reference(pixels)
    # With is_training, some layers of transformers' OneFormer drop out in evaluation, too.
    config = OneFormerConfig.from_dict({**reference.config.to_dict(), "is_training": False})
    weights, reference = reference.state_dict(), OneFormerForUniversalSegmentation(config).eval()
    assert not reference.load_state_dict(weights, strict=False).missing_keys
    tokens = torch.zeros(len(pixels), 77, dtype=torch.int64)
    tokens[:, : len(TASKS[target])] = torch.tensor(TASKS[target])
    return reference(pixels, task_inputs=tokens)


def theirs(head, names=CLASSES):
    options = BACKBONES["dinat"][1]
    stages = ["stage1", "stage2", "stage3", "stage4"]
    sizes = ("embed_dim", "depths", "num_heads", "kernel_size", "dilations")
    backbone = DinatConfig(**{n: options[n] for n in sizes}, out_features=stages)
    torch.manual_seed(1)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if head.startswith("oneformer"):
        config = OneFormerConfig(backbone_config=backbone, **labels, **ONEFORMER, **TEXTS)
        model = OneFormerForUniversalSegmentation(config)
    elif head == "upernet":
        config = UperNetConfig(
            backbone_config=backbone, hidden_size=16, auxiliary_channels=8, auxiliary_in_channels=64, **labels
        )
        model = UperNetForSemanticSegmentation(config)
    else:
        model = Mask2FormerForUniversalSegmentation(
            Mask2FormerConfig(backbone_config=backbone, **labels, **MASK2FORMER)
        )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("head", ["upernet", "mask2former_panoptic", "oneformer_panoptic"])
def test_transformers_layout_gives_the_same_results(head, tmp_path):
    reference, model = theirs(head), make(head).eval()
    reference.save_pretrained(tmp_path)
    load_checkpoint(model, tmp_path)
    pixels = model._prepared([image(64, 96)])
    with torch.no_grad():
        expected = run_theirs(reference, pixels, "panoptic")
        found = model.head._run(model.backbone(pixels), pixels)
    key = "logits" if head == "upernet" else "masks_queries_logits"
    torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-4)
    assert expected[key].std() > 1e-3


@pytest.mark.parametrize("head", ["mask_rcnn", "cascade", "upernet", "mask2former_semantic", "oneformer_panoptic"])
def test_other_classes_begin_anew_and_all_else_is_kept(head, tmp_path):
    source = make(head, seed=5)
    save_file({n: w.contiguous().clone() for n, w in source.state_dict().items()}, tmp_path / "best.safetensors")
    config = model_config(head)
    config.model.checkpoint = str(tmp_path / "best.safetensors")
    model, _ = build_model(config, list("abcdef"), [True] * 6)
    own, before = model.state_dict(), source.state_dict()
    kept = [name for name in own if own[name].shape == before[name].shape]
    assert len(own) - len(kept) in range(1, 13)
    for name in kept:
        assert torch.equal(own[name], before[name])


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="has neither model.safetensors nor pytorch_model.bin"):
        load_checkpoint(make("upernet"), tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="are neither of a run nor of UperNet, Mask2Former or OneFormer"):
        load_checkpoint(make("upernet"), tmp_path)
    theirs("upernet").save_pretrained(tmp_path / "upernet")
    with pytest.raises(UserError, match="need a NAT or DiNAT backbone, not VisionTransformer"):
        load_checkpoint(make("upernet", "vit"), tmp_path / "upernet")
    with pytest.raises(UserError, match="do not fit DenseModel"):
        load_checkpoint(make("mask2former_panoptic"), tmp_path / "upernet")


def config_of(folder, head, target, epochs=1, **options):
    model = DenseModelConfig(head=head, checkpoint=str(folder), **options)
    data = DenseDataConfig(target=target, test_size=None)
    return DenseConfig(data=data, model=model, attention={"name": "none"}, train=TrainConfig(epochs=epochs))


def reopened(config, classes, things, model):
    """The model of a run, from its configuration and weights alone."""
    config = DenseConfig(
        data=config.data,
        model=DenseModelConfig(**{**vars(config.model), "checkpoint": None}),
        attention=config.attention,
    )
    again = build_model(config, classes, things)[0]
    again.load_state_dict(model.state_dict())
    return again.eval()


@pytest.mark.parametrize("head", ["upernet", "mask2former", "oneformer"])
def test_a_folder_says_what_its_model_is(head, tmp_path):
    reference = theirs(head)
    reference.save_pretrained(tmp_path / "published")
    target = "semantic" if head == "upernet" else "panoptic"
    config = config_of(tmp_path / "published", head, target, epochs=0)
    model = build_model(config, CLASSES, THINGS)[0].eval()
    assert config.model.options["kernel_size"] == 3
    assert config.model.options["dilations"] == [[2], [1], [1, 2], [1]]
    assert not {"num_labels", "id2label", "is_training", "architectures"} & set(config.model.head_options)
    again = reopened(config, CLASSES, THINGS, model)
    pixels = model._prepared([image(64, 96)])
    with torch.no_grad():
        expected = run_theirs(reference, pixels, target)
        for found in (m.head._run(m.backbone(pixels), pixels) for m in (model, again)):
            for key in ("logits",) if head == "upernet" else ("masks_queries_logits", "class_queries_logits"):
                torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-4)
    smaller = config_of(tmp_path / "published", head, target, options={"dilations": [[1], [1], [1, 1], [1]]})
    build_model(smaller, CLASSES, THINGS)
    assert smaller.model.options["dilations"] == [[1], [1], [1, 1], [1]]


def test_classes_of_upernet_are_found_by_name(tmp_path):
    reference = theirs("upernet", ["sky", "ground", "square", "water", "disc"])
    reference.save_pretrained(tmp_path / "published")
    config = config_of(tmp_path / "published", "upernet", "semantic", epochs=0)
    model = build_model(config, CLASSES, THINGS)[0].eval()
    pixels = model._prepared([image(64, 96)])
    with torch.no_grad():
        expected = reference(pixels).logits.softmax(1)[0, [4, 2, 1]]
        found = model.head.predict(model.backbone(pixels), pixels, (64, 96), (64, 96))[0]["scores"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    seen, own = [], model.head._run
    model.head._run = lambda features, pixels, labels: seen.append(labels) or own(features, pixels, labels=labels)
    marked = scene("upernet", 64, 96)
    model.train()([image(64, 96)] * 2, [marked] * 2)
    table = torch.tensor([4, 2, 1] + [-100] * 253)
    assert torch.equal(seen[0][0], table[marked["map"]])


@pytest.mark.parametrize("target", ["instance", "semantic", "panoptic"])
@pytest.mark.parametrize("head", ["mask2former", "oneformer"])
def test_classes_that_are_among_more_are_found_by_name(head, target, tmp_path):
    names = ["sky", "Ground", "big_disc", "water", "square"]
    reference = theirs(head, names)
    reference.save_pretrained(tmp_path / "published")
    classes = {"instance": ["square", "big disc"]}.get(target, ["ground", "square", "big disc"])
    things = [name != "ground" for name in classes]
    config = config_of(tmp_path / "published", head, target, epochs=0)
    model = build_model(config, classes, things)[0].eval()
    assert config.model.head_classes == [
        "sky",
        "ground" if "ground" in classes else "Ground",
        "big disc",
        "water",
        "square",
    ]
    pixels = model._prepared([image(64, 96)])
    seen = []
    read = f"_{target}s" if target == "instance" else f"_{target}"
    setattr(model.head, read, lambda scores, masks: seen.append(scores) or {})
    with torch.no_grad():
        expected = run_theirs(reference, pixels, target).class_queries_logits[0].softmax(-1)
        model.head.predict(model.backbone(pixels), pixels, (64, 96), (64, 96))
    places = [{"ground": 1, "square": 4, "big disc": 2}[name] for name in classes]
    torch.testing.assert_close(seen[0], expected[:, [*places, 5]], atol=1e-5, rtol=1e-4)
    again = reopened(config, classes, things, model).train()
    marked = scene(f"mask2former_{target}", 64, 96)
    labels = []
    again.head.net.criterion.register_forward_pre_hook(
        lambda module, inputs, named: labels.append(named.get("class_labels", inputs[-2] if inputs else None)),
        with_kwargs=True,
    )
    again([image(64, 96)], [marked])
    found = again.head._masks(marked)[1]
    assert labels[0][0].tolist() == [places[label] for label in found.tolist()]


def test_as_many_classes_of_other_names_are_taken_in_their_order(tmp_path):
    reference = theirs("oneformer", ["wall", "building", "tree"])
    reference.save_pretrained(tmp_path / "published")
    config = config_of(tmp_path / "published", "oneformer", "semantic", epochs=0)
    model = build_model(config, CLASSES, THINGS)[0]
    assert config.model.head_classes is None
    own = model.state_dict()["head.net.model.transformer_module.decoder.class_embed.weight"]
    assert torch.equal(own, reference.state_dict()["model.transformer_module.decoder.class_embed.weight"])


def test_the_same_classes_in_another_order_are_found_and_a_part_of_them_is_refused(tmp_path):
    theirs("mask2former", ["ground", "disc", "square"]).save_pretrained(tmp_path / "order")
    config = config_of(tmp_path / "order", "mask2former", "panoptic", epochs=0)
    build_model(config, CLASSES, THINGS)
    assert config.model.head_classes == ["ground", "disc", "square"]
    theirs("mask2former", ["ground", "disc", "thing"]).save_pretrained(tmp_path / "part")
    with pytest.raises(UserError, match="has the class disc at another place than the data and lacks square; say"):
        build_model(config_of(tmp_path / "part", "mask2former", "panoptic", epochs=0), CLASSES, THINGS)
    told = config_of(tmp_path / "part", "mask2former", "panoptic", 0, head_classes=["ground", "disc", "square"])
    build_model(told, CLASSES, THINGS)
    more = config_of(tmp_path / "part", "mask2former", "panoptic", 1)
    model, _ = build_model(more, [*CLASSES, "boat"], [*THINGS, True])
    assert model.has_new_classes
    assert more.model.head_classes is None
    alike = config_of(tmp_path / "part", "mask2former", "panoptic", 1)
    with pytest.raises(UserError, match="or of the data have one name; say which is which with model.head_classes"):
        build_model(alike, ["a b", "a_b", "c"], THINGS)


@pytest.mark.parametrize(("kind", "scale"), [("nat", 0.0), ("dinat", 0.1)])
def test_nat_layer_scales_and_weights_in_parts(kind, scale, tmp_path):
    options = BACKBONES["dinat"][1]
    sizes = {name: options[name] for name in ("embed_dim", "depths", "num_heads", "kernel_size")}
    if kind == "dinat":
        sizes["dilations"] = options["dilations"]
    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = {"nat": NatConfig, "dinat": DinatConfig}[kind](
        **sizes, layer_scale_init_value=scale, out_features=stages
    )
    reference = Mask2FormerForUniversalSegmentation(
        Mask2FormerConfig(backbone_config=backbone, num_labels=3, **MASK2FORMER)
    ).eval()
    reference.save_pretrained(tmp_path / "published", max_shard_size="100KB")
    assert (tmp_path / "published/model.safetensors.index.json").is_file()
    content = json.loads((tmp_path / "published/config.json").read_text())
    content["use_auxiliary_loss"] = content["backbone_config"]["mlp_ratio"] = None  # as left out
    (tmp_path / "published/config.json").write_text(json.dumps(content))
    config = config_of(tmp_path / "published", "mask2former", "panoptic", epochs=0)
    model = build_model(config, CLASSES, THINGS)[0].eval()
    assert config.model.name == f"{kind}_tiny"
    pixels = model._prepared([image(64, 96)])
    with torch.no_grad():
        expected, found = reference(pixels), model.head._run(model.backbone(pixels), pixels)
    torch.testing.assert_close(found.masks_queries_logits, expected.masks_queries_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"id2label": {"first": "disc"}}, "id2label must be names by number"),
        ({"id2label": {"0": None}}, "id2label must be names by number"),
        ({"backbone_config": {"model_type": "nat", "depths": 3}}, "depths, num_heads and dilations must be lists"),
        ({"backbone_config": {"model_type": "dinat", "hidden_act": "relu"}}, "has hidden_act=relu; .* here has gelu"),
        ({"backbone_config": {"model_type": "dinat", "layer_norm_eps": 1e-3}}, "has layer_norm_eps=0.001"),
        ({"task_seq_len": 5}, "task_seq_len must be at least 7, got 5"),
    ],
)
def test_damaged_configurations_are_named(change, sentence, tmp_path):
    theirs("oneformer").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(UserError, match=sentence):
        build_model(config_of(tmp_path, "oneformer", "panoptic"), CLASSES, THINGS)


def test_folders_of_other_models_are_refused(tmp_path):
    def build(config, classes=CLASSES):
        return build_model(config, classes, [True] * len(classes))

    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"there is no .*empty/config\.json"):
        build(config_of(tmp_path / "empty", "oneformer", "panoptic"))
    for text in ("{", "[1]"):
        (tmp_path / "empty" / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"empty/config\.json is damaged"):
            build(config_of(tmp_path / "empty", "oneformer", "panoptic"))
    theirs("mask2former").save_pretrained(tmp_path / "published")
    with pytest.raises(UserError, match="is a model of type mask2former, but model.head=oneformer"):
        build(config_of(tmp_path / "published", "oneformer", "panoptic"))
    with pytest.raises(UserError, match=r"are for other classes .* has 4 rows, not 3\), and with train.epochs=0"):
        build(config_of(tmp_path / "published", "mask2former", "panoptic", epochs=0), ["car", "bus"])
    model, _ = build(config_of(tmp_path / "published", "mask2former", "panoptic"), ["car", "bus"])
    assert len(model.head.things) == 2
    path = tmp_path / "published" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model_type": "detr"}))
    with pytest.raises(UserError, match="of type detr; model.checkpoint takes those of upernet, mask2former, onef"):
        build(config_of(tmp_path / "published", "mask2former", "panoptic"))
    path.write_text(json.dumps({**content, "backbone_config": {"model_type": "swin"}}))
    with pytest.raises(UserError, match="the backbone of .* must be a NAT or DiNAT"):
        build(config_of(tmp_path / "published", "mask2former", "panoptic"))
    config = model_config("mask2former_panoptic")
    config.model.head_classes = ["disc", "square"]
    with pytest.raises(UserError, match="model.head_classes lacks the class ground of the data"):
        build(config)
    config.model.head_classes = ["disc", "disc", "ground"]
    with pytest.raises(UserError, match="model.head_classes must be different names, got disc twice"):
        config.check()
    config.model.head, config.data.target = "mask_rcnn", "instance"
    with pytest.raises(UserError, match="is for upernet, mask2former and oneformer, got model.head=mask_rcnn"):
        config.check()
    swin = config_of(tmp_path / "published", "mask2former", "panoptic", name="swin_tiny_patch4_window7_224")
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is a dinat, but model.name=swin_tiny_patch4_window7_224"):
        build(swin)
