"""Metrics against pycocotools, torchmetrics and hand-made cases."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchmetrics.detection import PanopticQuality
from torchmetrics.functional.classification import multiclass_jaccard_index

from fibottention.tasks.dense.config import DenseDataConfig
from fibottention.tasks.dense.metrics import make_metric
from fibottention.tasks.dense.sources import open_source
from fibottention.tasks.dense.sources.base import VOID, encode_mask, mask_boxes, scene_records
from tests.scenes import write_ade20k, write_cityscapes, write_coco, write_coco_panoptic


def disturbed(scene, seed):
    """Predictions that are wrong in many ways: shifted, doubled, of other classes, made up, missing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (), generator=generator))

    masks, labels = [], []
    for mask, label in zip(scene["masks"], scene["labels"].tolist(), strict=True):
        for _ in range(draw(3)):
            shifted = mask.roll((draw(5) - 2, draw(5) - 2), (0, 1))
            if shifted.any():
                masks.append(shifted)
                labels.append(label if draw(4) else draw(3))
    stray = torch.zeros_like(masks[0] if masks else scene["masks"][0])
    stray[:9, :7] = True
    masks, labels = torch.stack([*masks, stray]), torch.tensor([*labels, 1])
    scores = torch.rand(len(labels), generator=generator)
    return {"boxes": mask_boxes(masks), "labels": labels, "masks": masks, "scores": scores}


@pytest.mark.parametrize("form", ["segm", "bbox"])
def test_average_precision_is_that_of_pycocotools(tmp_path, form):
    root = write_coco(tmp_path / "coco", 1, 30, 64)
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"][::7]:
        annotation["iscrowd"] = 1
    path.write_text(json.dumps(content))
    source = open_source(DenseDataConfig(root=str(root)), train=False)
    metric = make_metric(source)
    records, results = {}, []
    ids = [category["id"] for category in content["categories"]]
    for index in range(len(source)):
        scene = source.scene(index)
        found = disturbed(scene, index)
        records[index] = metric.record(found, scene)
        for place in range(len(found["labels"])):
            left, top, right, bottom = found["boxes"][place].tolist()
            entry = {
                "image_id": source.images[index]["id"],
                "category_id": ids[found["labels"][place]],
                "score": float(found["scores"][place]),
            }
            if form == "bbox":
                entry["bbox"] = [left, top, right - left, bottom - top]
            else:  # with a box, its area would count as that of the mask
                entry["segmentation"] = encode_mask(found["masks"][place])
            results.append(entry)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(path))
        evaluation = COCOeval(truth, truth.loadRes(results), form)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    metrics, details = metric.summarize(records)
    name = {"segm": "mask", "bbox": "box"}[form]
    ours = [metrics[f"{name}_{kind}"] for kind in ("ap", "ap50", "ap75")]
    ours += [details[f"{name}_ap_{size}"] for size in ("small", "medium", "large")]
    expected = [None if value < 0 else 100 * value for value in evaluation.stats[:6]]
    assert ours == pytest.approx(expected, abs=1e-9)
    assert 5 < ours[0] < 95
    by_class = evaluation.eval["precision"][:, :, :, 0, -1]
    for number, label in enumerate(source.classes):
        assert details[f"{name}_ap_by_class"][label] == pytest.approx(100 * by_class[:, :, number].mean())


def test_average_precision_of_the_truth_and_of_nothing(tmp_path):
    source = open_source(DenseDataConfig(root=str(write_coco(tmp_path / "coco", 1, 3, 64))), train=False)
    metric = make_metric(source)
    perfect, nothing = {}, {}
    for index in range(len(source)):
        scene = source.scene(index)
        found = {name: scene[name] for name in ("boxes", "labels", "masks")}
        found["scores"] = torch.ones(len(scene["labels"]))
        perfect[index] = metric.record(found, scene)
        nothing[index] = metric.record({name: value[:0] for name, value in found.items()}, scene)
    assert metric.summarize(perfect)[0]["mask_ap"] == pytest.approx(100)
    assert metric.summarize(perfect)[0]["box_ap"] == pytest.approx(100)
    assert metric.summarize(nothing)[0]["mask_ap"] == 0


def test_instances_of_cityscapes_have_the_areas_of_their_masks(tmp_path):
    root = write_cityscapes(tmp_path / "city", 1, 3, 64)
    source = open_source(DenseDataConfig(format="cityscapes", root=str(root)), train=False)
    metric = make_metric(source)
    records = {}
    for index in range(len(source)):
        scene = source.scene(index)
        assert source.records(index) is None
        entries = scene_records(scene)
        assert [entry["area"] for entry in entries] == scene["masks"].flatten(1).sum(1).tolist()
        found = {name: scene[name][~scene["crowd"]] for name in ("boxes", "labels", "masks")}
        found["scores"] = torch.ones(len(found["labels"]))
        records[index] = metric.record(found, scene)
    assert metric.summarize(records)[0]["mask_ap"] == pytest.approx(100)  # groups are not asked for


def test_mean_iou_is_that_of_torchmetrics(tmp_path):
    root = write_ade20k(tmp_path / "ade", 1, 4, 64)
    source = open_source(DenseDataConfig(format="ade20k", root=str(root), target="semantic"), train=False)
    metric = make_metric(source)
    generator = torch.Generator().manual_seed(0)
    records, found, true = {}, [], []
    for index in range(len(source)):
        scene = source.scene(index)
        scene["map"][:3] = VOID
        guess = torch.randint(5, scene["map"].shape, generator=generator)
        kept = torch.rand(guess.shape, generator=generator) < 0.6
        guess = torch.where(kept & (scene["map"] != VOID), scene["map"], guess)
        records[index] = metric.record({"map": guess}, scene)
        found.append(guess.flatten())
        true.append(scene["map"].flatten())
    found, true = torch.cat(found), torch.cat(true)
    assert (true == VOID).any()
    known = true != VOID
    expected = multiclass_jaccard_index(found[known], true[known], 5, average="none")
    metrics, details = metric.summarize(records)
    assert list(details["iou_by_class"].values()) == pytest.approx((100 * expected).tolist(), abs=1e-4)
    assert metrics["miou"] == pytest.approx(100 * float(expected.mean()), abs=1e-4)
    assert metrics["pixel_accuracy"] == pytest.approx(100 * float((found == true)[known].float().mean()), abs=1e-4)


def test_classes_that_nowhere_occur_do_not_count(tmp_path):
    root = write_ade20k(tmp_path / "ade", 1, 1, 64)
    source = open_source(DenseDataConfig(format="ade20k", root=str(root), target="semantic"), train=False)
    metric = make_metric(source)
    scene = {"map": torch.tensor([[0, 0, 1, VOID]])}
    record = metric.record({"map": torch.tensor([[0, 1, 1, 4]])}, scene)
    metrics, details = metric.summarize({0: record})
    assert metrics["miou"] == pytest.approx(50)
    assert details["iou_by_class"] == {"sky": 50, "ground": 50, "disc": None, "square": None, "triangle": None}
    assert details["mean_accuracy"] == pytest.approx(75)


@pytest.fixture
def panoptic(tmp_path):
    root = write_coco_panoptic(tmp_path / "panoptic", 1, 6, 64)
    return open_source(DenseDataConfig(format="coco_panoptic", root=str(root), target="panoptic"), train=False)


def test_panoptic_quality_is_that_of_torchmetrics(panoptic):
    metric = make_metric(panoptic)
    things = [number for number, thing in enumerate(panoptic.things) if thing]
    stuffs = [number for number, thing in enumerate(panoptic.things) if not thing]
    reference = PanopticQuality(things, stuffs, allow_unknown_preds_category=True, return_per_class=True)
    records = {}
    for index in range(len(panoptic)):
        scene = panoptic.scene(index)
        shift = index % 4
        guess = scene["map"].roll(shift, 1)
        # Of what was predicted as void torchmetrics takes the true segments' share off, and COCO's tool does not.
        guess[guess == 0] = 1
        labels = scene["labels"].clone()
        if index % 2:
            labels[-1] = (labels[-1] + 1) % 3
        records[index] = metric.record({"map": guess, "labels": labels}, scene)
        # torchmetrics wants pairs of class and number; class 99 is void.
        pairs = []
        for pixels, of_segment in ((guess, labels), (scene["map"], scene["labels"])):
            table = torch.cat([torch.tensor([99]), of_segment])
            pairs.append(torch.stack([table[pixels], torch.where(pixels == 0, 0, pixels)], -1)[None])
        reference.update(*pairs)
    metrics, details = metric.summarize(records)
    expected = 100 * reference.compute().flatten()
    order = [*things, *stuffs]
    for place, number in enumerate(order):
        assert details["pq_by_class"][panoptic.classes[number]] == pytest.approx(float(expected[place]), abs=1e-3)
    assert 5 < metrics["pq"] < 95


def test_panoptic_quality_by_hand(panoptic):
    """One row of 20 pixels: a matched disc, a missed square, a triangle that is mostly void, one mostly a crowd."""
    metric = make_metric(panoptic)
    disc, square, triangle, sky, _ = range(5)
    true = torch.tensor([[1] * 4 + [2] * 3 + [0] * 3 + [3] * 4 + [4] * 6])
    scene = {
        "map": true,
        "labels": torch.tensor([disc, square, triangle, sky]),
        "crowd": torch.tensor([False, False, True, False]),
    }
    # The disc has 3 of its 4 pixels and one more (3 / 5); void 2 of 3; of the crowd 3 of 4; the sky all 6.
    found = torch.tensor([[1, 1, 1, 0, 1, 0, 0] + [2, 2, 0] + [3, 3, 3, 0] + [4] * 6])
    guess = {"map": found, "labels": torch.tensor([disc, square, triangle, sky])}
    stats = np.array(metric.record(guess, scene))
    np.testing.assert_allclose(stats[disc], [0.6, 1, 0, 0])
    np.testing.assert_allclose(stats[square], [0, 0, 0, 1])  # missed; what was found in the void is ignored
    np.testing.assert_allclose(stats[triangle], [0, 0, 0, 0])  # within the crowd
    np.testing.assert_allclose(stats[sky], [1, 1, 0, 0])
    metrics, details = metric.summarize({0: stats.tolist()})
    assert details["pq_by_class"]["disc"] == pytest.approx(60)
    assert details["pq_by_class"]["triangle"] is None
    assert metrics["pq"] == pytest.approx((60 + 0 + 100) / 3)
    assert details["pq_things"] == pytest.approx(30)
    wrong = {"map": found, "labels": torch.tensor([square, square, disc, sky])}
    stats = np.array(metric.record(wrong, scene))
    np.testing.assert_allclose(stats[disc], [0, 0, 1, 1])  # a crowd of another class excuses nothing
    np.testing.assert_allclose(stats[square], [0, 0, 1, 1])
