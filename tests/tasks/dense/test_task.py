"""Training, and the recipes."""

import io
import json

import pytest
import torch
from rich.console import Console

from fibottention.analysis.report import write_report
from fibottention.errors import UserError
from fibottention.tasks.dense.config import DenseAugmentConfig, DenseConfig, DenseDataConfig, DenseModelConfig
from fibottention.tasks.dense.draw import class_colors, draw_prediction, prediction_to_dict
from fibottention.tasks.dense.model import build_model
from fibottention.tasks.dense.sources.base import encode_mask, mask_boxes
from fibottention.tasks.dense.task import DenseTask
from fibottention.tasks.options import load_recipe, make_config, shipped_recipes
from fibottention.tasks.runs import load_model, train_run
from fibottention.training.config import OptimConfig, TrainConfig
from fibottention.training.engine import Trainer, make_accelerator
from fibottention.training.run import Run
from tests.scenes import write_ade20k, write_cityscapes, write_coco, write_coco_panoptic
from tests.tasks.dense.models import HEADS, model_config

WRITERS = {"instance": ("coco", write_coco), "semantic": ("ade20k", write_ade20k)}
WRITERS["panoptic"] = ("coco_panoptic", write_coco_panoptic)


def config(head, root, counts=(24, 6), size=64, **train):
    """A run on scenes that are drawn for it."""
    made = model_config(head)
    made.data.format, write = WRITERS[made.data.target]
    if not root.exists():
        write(root, *counts, size)
    made.data.root, made.data.test_size, made.data.workers = str(root), None, 0
    made.augment = DenseAugmentConfig(sizes=[size], crop=(size, size))
    made.model.drop_path = 0.0
    made.optim = OptimConfig(lr=2e-3, schedule="cosine", warmup_epochs=0, warmup_steps=2, clip_grad=1.0)
    made.train = TrainConfig(**{"epochs": 1, "batch_size": 4, "device": "cpu", **train})
    return made


@pytest.mark.parametrize("head", HEADS)
def test_training_keeps_a_run(head, tmp_path):
    made = config(head, tmp_path / "data")
    summary = train_run(made, tmp_path / "run", command="fibottention train")
    score = {"instance": "mask_ap", "semantic": "miou", "panoptic": "pq"}[made.data.target]
    best = Run.open(tmp_path / "run").read_json("best.json")
    assert best["images"] == 6
    assert summary[score] == best[score]
    assert summary["train_images"] == 24
    assert summary["whole_model_macs"] > 0
    assert len(best["classes"]) == len(best["things"])
    model, loaded, _, _ = load_model(tmp_path / "run")
    task = DenseTask(loaded, train=False, model=model)
    accelerator = make_accelerator(loaded.train)
    with torch.no_grad():
        again = task.evaluate(model, iter(accelerator.prepare(task.val_loader)), accelerator)
    assert again.metrics == pytest.approx({name: best[name] for name in again.metrics})
    # Training images are not needed to evaluate the weights once more.
    for path in [*(tmp_path / "data").rglob("*train*.json"), *(tmp_path / "data/images").glob("training/*")]:
        path.unlink()
    made.train.epochs, made.model.checkpoint = 0, str(tmp_path / "run/best.safetensors")
    summary = train_run(made, tmp_path / "again", command="fibottention train")
    assert summary[score] == pytest.approx(best[score])
    assert "train_images" not in summary
    write_report([tmp_path / "again"], tmp_path / "report.html")


def test_a_resumed_run_ends_the_same(tmp_path, monkeypatch):
    made = config("mask2former_panoptic", tmp_path / "data", epochs=2)
    train_run(made, tmp_path / "whole", command="x")
    finish = Trainer._finish_epoch

    def stop(self, record, writer):
        finish(self, record, writer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_finish_epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        train_run(made, tmp_path / "stopped", command="x")
    monkeypatch.undo()
    train_run(made, tmp_path / "stopped")
    whole, stopped = (Run.open(tmp_path / name) for name in ("whole", "stopped"))
    assert [r["train_loss"] for r in whole.metrics()] == [r["train_loss"] for r in stopped.metrics()]
    for name, weight in whole.weights().items():
        assert torch.equal(weight, stopped.weights()[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "counts", "size", "words", "metric", "least"),
    [
        ("maskrcnn_dinat_cpu", (100, 16), 64, ["--train.epochs=2"], "mask_ap", 5),
        ("upernet_dinat_cpu", (64, 12), 64, ["--train.epochs=2", "--augment.crop=[64,64]"], "miou", 30),
        ("mask2former_dinat_cpu", (120, 16), 64, ["--train.epochs=4", "--augment.crop=[64,64]"], "pq", 6),
    ],
)
def test_the_small_recipes_learn(recipe, counts, size, words, metric, least, tmp_path):
    made = load_recipe(f"dense/{recipe}")
    _, write = WRITERS[made["data"]["target"]]
    write(tmp_path / "data", *counts, size)
    common = ["--data.root", str(tmp_path / "data"), f"--augment.sizes=[{size}]", "--optim.warmup_steps=5"]
    before = make_config(made, [*common, "--train.epochs=0"])
    after = make_config(made, [*common, "--train.batch_size=4", *words])
    untrained = train_run(before, tmp_path / "before", command="x")[metric]
    trained = train_run(after, tmp_path / "after", command="x")[metric]
    assert untrained < 10
    assert trained > untrained + least


def test_images_that_cannot_be_read_are_named(tmp_path):
    made = config("mask_rcnn", tmp_path / "data")
    for name in ("train2017/000003.png", "val2017/000002.png"):
        (tmp_path / "data" / name).write_bytes(b"no image")
    console = Console(width=200, record=True, file=io.StringIO())
    train_run(made, tmp_path / "run", command="x", console=console)
    text = console.export_text()
    assert "2 images could not be read" in text
    assert "train2017/000003.png" in text
    assert Run.open(tmp_path / "run").read_json("best.json")["images"] == 5


def test_wrong_annotations_are_said_and_kept(tmp_path):
    made = config("mask_rcnn", tmp_path / "data")
    path = tmp_path / "data" / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["segmentation"] = []
    path.write_text(json.dumps(content))
    task = DenseTask(made)
    assert "1 annotations or images mended or left out (the first: annotation 1 of image 3" in task.overview()
    run = Run(tmp_path / "run")
    run.create({})
    task.save_samples(run)
    assert "no polygon" in (tmp_path / "run" / "annotation_problems.txt").read_text()
    made.data.strict = True
    with pytest.raises(UserError, match="data.strict: annotation 1 of image 3: it has no polygon"):
        DenseTask(made)


def test_training_leaves_images_without_objects_out(tmp_path):
    made = config("mask_rcnn", tmp_path / "data")
    path = tmp_path / "data" / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 3]
    path.write_text(json.dumps(content))
    assert len(DenseTask(made).data.train_dataset) == 23
    content["annotations"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="no training image has an annotated object"):
        DenseTask(made)


def test_validation_images_may_be_without_objects(tmp_path):
    made = config("mask_rcnn", tmp_path / "data")
    path = tmp_path / "data" / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "annotations": []}))
    assert train_run(made, tmp_path / "run", command="x")["mask_ap"] == 0
    assert len(DenseTask(made, train=False).data.val_dataset) == 6


@pytest.mark.parametrize(("batch", "limit", "crop"), [(1, None, (64, 64)), (4, 1, (64, 64)), (4, None, None)])
def test_upernet_needs_batches_of_one_size(tmp_path, batch, limit, crop):
    made = config("upernet", tmp_path / "data", batch_size=batch)
    made.data.limit, made.augment.crop = limit, crop
    with pytest.raises(UserError, match="model.head=upernet normalizes over the batch"):
        DenseTask(made)
    DenseTask(made, train=False)  # evaluation does not


def test_upernet_needs_two_classes(tmp_path):
    made = config("upernet", tmp_path / "data")
    (tmp_path / "data" / "objectInfo150.txt").write_text("Idx\tName\n1\tsky\n")
    with pytest.raises(UserError, match="needs at least 2 classes"):
        DenseTask(made)


def test_a_run_does_not_need_what_its_weights_began_from(tmp_path):
    made = config("mask_rcnn", tmp_path / "data")
    backbone = DenseTask(made).model.backbone.model
    torch.save(backbone.state_dict(), tmp_path / "backbone.pth")
    made.model.backbone_checkpoint = str(tmp_path / "backbone.pth")
    train_run(made, tmp_path / "run", command="x")
    (tmp_path / "backbone.pth").unlink()
    load_model(tmp_path / "run")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c["categories"][1].update(name="triangle"), "two classes are named triangle"),
        (
            lambda c: c["categories"].pop(),
            "3 classes, the validation data 2; number 3 is triangle in the training data and none in",
        ),
        (lambda c: c["categories"][2].update(name="star"), "number 3 is triangle in the training data and star in"),
    ],
)
def test_classes_must_be_the_same(tmp_path, edit, sentence):
    made = config("mask_rcnn", tmp_path / "data")
    for split in ("train", "val") if "two classes" in sentence else ("val",):
        path = tmp_path / "data" / "annotations" / f"instances_{split}2017.json"
        content = json.loads(path.read_text())
        edit(content)
        content["annotations"] = [a for a in content["annotations"] if a["category_id"] == 2]
        path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=sentence):
        DenseTask(made)


def test_moving_averages_and_accumulated_gradients(tmp_path):
    made = config("mask2former_panoptic", tmp_path / "data", gradient_accumulation=2)
    made.optim.ema_decay = 0.9
    assert train_run(made, tmp_path / "run", command="x")["epochs"] == 1


def test_limits_are_spread_evenly(tmp_path):
    made = config("mask_rcnn", tmp_path / "data")
    made.data.limit = 12
    data = DenseTask(made).data
    assert (len(data.train_dataset), len(data.val_dataset)) == (12, 2)
    assert data.train_dataset.source.indices[:2] == [0, 2]
    assert data.train_dataset.source.indices[-1] == 23


def test_cityscapes_trains(tmp_path):
    root = write_cityscapes(tmp_path / "city", 8, 2, 64)
    made = model_config("mask2former_panoptic")
    made.data = DenseDataConfig(format="cityscapes", root=str(root), target="panoptic", test_size=None, workers=0)
    made.augment = DenseAugmentConfig(sizes=[64], crop=(48, 64), color=True)
    made.train = TrainConfig(epochs=1, batch_size=4, device="cpu")
    made.optim.warmup_steps, made.optim.schedule = 0, "cosine"
    summary = train_run(made, tmp_path / "run", command="x")
    assert len(summary["classes"]) == 19


def test_the_backbone_has_a_learning_rate_of_its_own(tmp_path):
    made = config("upernet", tmp_path / "data")
    made.optim.backbone_lr = 1e-4
    task = DenseTask(made)
    trainer = Trainer(task, Run(tmp_path / "run"), made.optim, made.train, make_accelerator(made.train))
    rates, decays = {}, {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates[id(parameter)] = group["initial_lr"]
            decays[id(parameter)] = group["weight_decay"]
    for name, parameter in task.model.named_parameters():
        assert rates[id(parameter)] == (1e-4 if name.startswith("backbone.") else 2e-3), name
        assert (decays[id(parameter)] == 0) == (parameter.ndim == 1 or name.endswith(".rpb")), name
    made.optim.backbone_lr = None
    whole = Trainer(task, Run(tmp_path / "run"), made.optim, made.train, make_accelerator(made.train))
    assert {group["initial_lr"] for group in whole.optimizer.param_groups} == {2e-3}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": DenseModelConfig(head="upernet")}, "data.target=instance cannot be learned by model.head=upernet"),
        ({"data": DenseDataConfig(target="semantic")}, "by model.head=mask_rcnn, which is for instance"),
        ({"data": DenseDataConfig(test_scales=[])}, "data.test_scales must be numbers above 0"),
        ({"data": DenseDataConfig(test_flip=True)}, "data.test_flip are for data.target=semantic"),
        ({"augment": DenseAugmentConfig(sizes=[0])}, "augment.sizes must be numbers above 0"),
        ({"augment": DenseAugmentConfig(jitter=(0.5, 2))}, "augment.jitter needs augment.crop"),
        ({"augment": DenseAugmentConfig(jitter=(2, 1), crop=(8, 8))}, "two numbers 0 < low <= high"),
        ({"augment": DenseAugmentConfig(crop=(0, 8))}, "augment.crop must be two numbers from 1 on"),
        ({"augment": DenseAugmentConfig(max_class_share=0.5)}, "augment.max_class_share needs augment.crop"),
        (
            {
                "data": DenseDataConfig(format="cityscapes", val_images="x"),
                "model": DenseModelConfig(head="mask_rcnn"),
            },
            "data.val_images is for data.format=coco",
        ),
    ],
)
def test_wrong_options(options, sentence):
    with pytest.raises(UserError, match=sentence):
        DenseConfig(**options).check()


def recipes():
    return [name for name in shipped_recipes("dense") if not name.startswith("_")]


@pytest.mark.parametrize("name", recipes())
def test_recipes_are_valid(name):
    made = make_config(load_recipe(f"dense/{name}"))
    made.check()
    if name.endswith("cpu"):
        assert sum(p.numel() for p in build_model(made, ["a", "b"], [True, False])[0].parameters()) < 1e7
    elif not name.startswith("mask2former") or "instance" in name:
        made.model.pretrained, made.model.backbone_checkpoint = False, None
        with torch.device("meta"):
            model, report = build_model(made, [str(i) for i in range(150)], [True] * 150)
        assert (report is not None) == ("fibottention" in name)
        assert model.backbone.strides == [4, 8, 16, 32]
    text = shipped_recipes("dense")[name].read_text()
    assert text.startswith("#")
    assert ("Published" in text) == ("nat_" in name and not name.endswith("cpu"))


# Facts on NAT and DiNAT, section 4: dilations and results.
COCO = [[1, 28, 1], [1, 7, 1, 14], [1, 3, 1, 5, 1, 7], [1, 3, 1, 3, 1]]
ADE = [[1, 16, 1], [1, 4, 1, 8], [1, 2, 1, 3, 1, 4], [1, 2, 1, 2, 1]]
ELEVEN = [[1, 14, 1], [1, 4, 1, 7], [1, 2, 1, 3] * 4 + [1, 3], [1] * 5]


@pytest.mark.parametrize(
    ("name", "dilations", "results"),
    [
        ("maskrcnn_nat_mini_coco", None, ("46.5", "41.7")),
        ("maskrcnn_nat_tiny_coco", None, ("47.7", "42.6")),
        ("maskrcnn_nat_small_coco", None, ("48.4", "43.2")),
        ("cascade_nat_mini_coco", None, ("50.3", "43.6")),
        ("cascade_nat_base_coco", None, ("52.3", "45.1")),
        ("upernet_nat_mini_ade20k", None, ("45.1", "46.4")),
        ("upernet_nat_base_ade20k", None, ("48.5", "49.7")),
        ("maskrcnn_dinat_mini_coco", COCO, ("47.2", "42.5")),
        ("maskrcnn_dinat_tiny_coco", COCO, ("48.6", "43.5")),
        ("maskrcnn_dinat_small_coco", COCO, ("49.3", "44.0")),
        ("cascade_dinat_mini_coco", COCO, ("51.2", "44.4")),
        ("cascade_dinat_base_coco", COCO, ("53.4", "46.2")),
        ("cascade_dinat_large_coco", COCO, ("55.3", "47.8")),
        ("upernet_dinat_mini_ade20k", ADE, ("45.8", "47.2")),
        ("upernet_dinat_base_ade20k", ADE, ("49.6", "50.4")),
        ("upernet_dinat_large_ade20k", None, ("54.0", "54.9")),  # at 640 pixels, for which the facts have no dilations
        ("mask2former_dinat_large_coco_instance", ELEVEN, ("50.8",)),
        ("mask2former_dinat_large_coco_panoptic", ELEVEN, ("58.5",)),
        ("mask2former_dinat_large_ade20k_instance", ELEVEN, ("35.4",)),
        ("mask2former_dinat_large_ade20k_semantic", ELEVEN, ("58.1",)),
        ("mask2former_dinat_large_ade20k_panoptic", ELEVEN, ("49.4",)),
        ("mask2former_dinat_large_cityscapes_instance", ELEVEN, ("45.1",)),
        ("mask2former_dinat_large_cityscapes_semantic", ELEVEN, ("84.5",)),
        ("mask2former_dinat_large_cityscapes_panoptic", ELEVEN, ("67.2",)),
    ],
)
def test_recipes_have_the_published_settings(name, dilations, results):
    made = make_config(load_recipe(f"dense/{name}"))
    text = shipped_recipes("dense")[name].read_text()
    assert all(result in text for result in results)
    if dilations is not None:
        wanted = [list(level) for level in dilations]
        if dilations is not ELEVEN and "mini" not in name:
            wanted[2] = wanted[2] * 3
        assert made.model.options["dilations"] == wanted
    if name.startswith(("maskrcnn", "cascade")):
        assert (made.train.epochs, made.optim.milestones, made.optim.weight_decay) == (36, [27, 33], 0.05)
        assert (made.augment.sizes[0], made.augment.sizes[-1], made.data.max_size) == (480, 800, 1333)
        assert made.augment.crop_first
        assert made.model.head_options == ({"train_proposals": 2000} if name.startswith("cascade") else {})
    elif name.startswith("upernet"):
        assert (made.optim.lr, made.optim.weight_decay, made.optim.decay_rate) == (6e-5, 0.01, 1.0)
        assert 159_000 < made.train.epochs * 20_210 / 16 < 161_000
        assert made.augment.crop == ((640, 640) if "large" in name else (512, 512))
        assert (made.data.test_size, made.augment.max_class_share) == (made.augment.crop[0], 0.75)
    else:
        assert made.model.options["kernel_size"] == 11
        assert (made.optim.lr, made.optim.backbone_lr, made.optim.clip_grad) == (1e-4, 1e-5, 0.01)
        assert made.model.head_options["num_queries"] == (100 if name.endswith("semantic") else 200)
        assert made.train.mixed_precision == "no"
    if "_nat_" in name:  # as DiNAT, without dilations
        other = make_config(load_recipe(f"dense/{name.replace('_nat_', '_dinat_')}"))
        assert (made.optim, made.train, made.augment) == (other.optim, other.train, other.augment)
        assert (made.model.drop_path, made.model.head_options) == (other.model.drop_path, other.model.head_options)
        assert made.model.options == {}
    if "large" in name:  # from ImageNet-22k alone, which the hub's weights are not
        assert not made.model.pretrained
        assert made.model.backbone_checkpoint == "dinat_large_in22k_224.pth"
        with pytest.raises(UserError, match="dinat_large_in22k_224.pth is not a file of weights"), torch.device("meta"):
            build_model(made, ["a", "b", "c"], [True] * 3)


def test_predictions_as_plain_data_and_drawn():
    masks = torch.zeros(2, 10, 12, dtype=torch.bool)
    masks[0, 2:5, 3:9] = masks[1, 6:, :2] = True
    found = {
        "boxes": mask_boxes(masks),
        "labels": torch.tensor([1, 0]),
        "scores": torch.tensor([0.9, 0.3]),
        "masks": masks,
    }
    plain = prediction_to_dict(found, ["cat", "dog"])
    assert plain == {
        "objects": [{"class": "dog", "score": pytest.approx(0.9), "box": [3, 2, 6, 3], "mask": encode_mask(masks[0])}]
    }
    black = torch.zeros(3, 10, 12, dtype=torch.uint8)
    drawn = draw_prediction(black, found, ["cat", "dog"])
    assert drawn[:, 3, 5].sum() > 0
    assert drawn[:, 8, 0].sum() == 0
    assert torch.equal(draw_prediction(black, found, ["cat", "dog"], 0.95), black)
    twice = {name: torch.cat([value, value]) for name, value in found.items()}
    assert drawn[:, 3, 5].float().norm() < draw_prediction(black, twice, ["cat", "dog"])[:, 3, 5].float().norm()
    pixels = torch.zeros(10, 12, dtype=torch.int64)
    pixels[:, 6:] = 1
    plain = prediction_to_dict({"map": pixels}, ["cat", "dog", "cow"])
    assert [(entry["class"], entry["share"]) for entry in plain["classes"]] == [("cat", 0.5), ("dog", 0.5)]
    segments = {"map": pixels, "labels": torch.tensor([2]), "scores": torch.tensor([0.8])}
    plain = prediction_to_dict(segments, ["cat", "dog", "cow"])
    assert plain["segments"][0]["class"] == "cow"
    assert plain["segments"][0]["mask"] == encode_mask(pixels == 1)
    for prediction in ({"map": pixels}, segments):
        assert draw_prediction(black, prediction, ["cat", "dog", "cow"]).sum() > 0
    assert len(set(class_colors(150))) > 100
