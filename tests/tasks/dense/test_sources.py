"""Readers of annotated images, against pycocotools and what was drawn."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

from fibottention.errors import UserError
from fibottention.tasks.dense.config import DenseDataConfig
from fibottention.tasks.dense.sources import open_source
from fibottention.tasks.dense.sources.base import VOID, mask_boxes
from fibottention.tasks.dense.sources.coco import CocoInstances
from fibottention.tasks.dense.sources.coco_panoptic import CocoPanoptic
from tests.scenes import (
    STUFF,
    THINGS,
    class_map,
    draw_scenes,
    write_ade20k,
    write_cityscapes,
    write_coco,
    write_coco_panoptic,
)


@pytest.fixture
def coco(tmp_path):
    return write_coco(tmp_path / "coco", 3, 2, 48)


def change(root, edit, split="val", kind="instances"):
    """Edit the annotation file of a data set, and open it."""
    path = root / "annotations" / f"{kind}_{split}2017.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    reader = CocoInstances if kind == "instances" else CocoPanoptic
    return reader(root / f"{split}2017", path)


def test_instances_are_those_of_pycocotools(coco, capsys):
    polygon = {"segmentation": [[4.0, 4.0, 30.0, 6.5, 12.2, 40.0], [2, 2, 2, 6, 6, 6, 6, 2]], "iscrowd": 0}
    counts = {"segmentation": {"size": [48, 48], "counts": [100, 30, 18, 30, 48 * 48 - 178]}, "iscrowd": 1}

    def edit(content):
        content["images"][0].update(height=48, width=48)
        Image.new("RGB", (48, 48)).save(coco / "val2017" / content["images"][0]["file_name"])
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] != content["images"][0]["id"]]
        for number, entry in enumerate((polygon, counts), 900):
            entry = {"id": number, "image_id": content["images"][0]["id"], "category_id": 7, **entry}
            content["annotations"].append({**entry, "bbox": [1, 1, 40, 40], "area": 500})

    source = change(coco, edit)
    reference = COCO(str(coco / "annotations" / "instances_val2017.json"))
    assert source.classes == list(THINGS)
    assert source.problems == []
    for index, number in enumerate(reference.getImgIds()):
        image, scene = source.load(index)
        annotations = reference.loadAnns(reference.getAnnIds([number]))
        assert len(annotations) > 0
        assert len(scene["labels"]) == len(annotations)
        for place, annotation in enumerate(annotations):
            np.testing.assert_array_equal(scene["masks"][place].numpy(), reference.annToMask(annotation))
            name = reference.loadCats([annotation["category_id"]])[0]["name"]
            assert source.classes[scene["labels"][place]] == name
            left, top, width, height = annotation["bbox"]
            assert scene["boxes"][place].tolist() == pytest.approx([left, top, left + width, top + height])
            assert scene["crowd"][place] == bool(annotation["iscrowd"])
        assert scene["masks"].shape[1:] == (image.height, image.width)


def test_drawn_objects_are_read(coco):
    source = open_source(DenseDataConfig(root=str(coco)), train=True)
    for index, drawn in enumerate(draw_scenes(3, 48, 1)):
        image, scene = source.load(index)
        np.testing.assert_array_equal(np.asarray(image), drawn.image)
        assert [source.classes[label] for label in scene["labels"]] == [label for label, _ in drawn.objects]
        for mask, (_, true) in zip(scene["masks"], drawn.objects, strict=True):
            np.testing.assert_array_equal(mask.numpy(), true)
        torch.testing.assert_close(scene["boxes"], mask_boxes(scene["masks"]))


def first(content):
    return content["annotations"][0]


@pytest.mark.parametrize(
    ("edit", "sentence", "lost"),
    [
        (lambda c: first(c).update(bbox=[100, 100, 5, 5]), "is outside its image", 1),
        (lambda c: first(c).update(bbox=[3, 3, 0, 5]), "is empty", 1),
        (lambda c: first(c).update(bbox=[3, 3, float("nan"), 5]), "four numbers", 1),
        (lambda c: first(c).update(bbox=[-4, 2, 20, 20]), "goes beyond its image", 0),
        (lambda c: first(c).update(segmentation=[]), "no polygon of three points or more", 1),
        (lambda c: first(c).update(segmentation=[[1, 1, 5, 5]]), "no polygon of three points or more", 1),
        (lambda c: first(c).update(segmentation=[[1, 1, 5, 5], [1, 1, 9, 1, 9, 9]]), "fewer than three points", 0),
        (lambda c: first(c).pop("segmentation"), "no mask", 1),
        (lambda c: first(c)["segmentation"].update(size=[5, 5]), "its mask has size", 1),
        (lambda c: first(c).update(category_id=1), "there is no category 1", 1),
        (lambda c: first(c).update(image_id=777), "there is no image 777", 1),
        (lambda c: first(c).update(id=2), "another one has its id", 0),
        (lambda c: first(c).update(bbox=5), "its box must be four numbers, got 5", 1),
        (lambda c: first(c).update(bbox=[1, None, 3, 4]), "its box must be four numbers", 1),
        (lambda c: first(c).update(bbox="1234"), "its box must be four numbers", 1),
        (lambda c: first(c).update(category_id=[1]), r"there is no category [1]", 1),
        (lambda c: first(c).update(image_id=[1]), "there is no image None", 1),
        (lambda c: first(c).update(iscrowd="0"), "iscrowd must be 0 or 1, got '0'", 1),
        (lambda c: first(c).update(area=-5), "its area must be a number, at least 0, got -5", 1),
        (lambda c: first(c).update(area="big"), "its area must be a number", 1),
        (lambda c: first(c)["segmentation"].update(size=None), "its mask has size None", 1),
        (lambda c: first(c)["segmentation"].update(counts=[1, 2, 3]), "its mask cannot be decoded", 1),
        (lambda c: first(c)["segmentation"].update(counts="1"), "its mask cannot be decoded", 1),
        (lambda c: first(c)["segmentation"].update(counts=None), "its mask cannot be decoded", 1),
        (lambda c: first(c).update(segmentation=[[None] * 6]), "its polygon must be of numbers", 1),
        (lambda c: first(c).update(segmentation=[["a"] * 6]), "its polygon must be of numbers", 1),
        (lambda c: first(c).update(segmentation=[[1, 1, 1e12, 1, 1, 9]]), "and near its image", 1),
        (lambda c: first(c).update(segmentation=[[float("nan")] * 6]), "its polygon must be of numbers", 1),
    ],
)
def test_wrong_annotations_are_named_and_left_out_or_mended(coco, edit, sentence, lost):
    before = change(coco, lambda content: None)
    source = change(coco, edit)
    assert len(source.problems) == 1
    assert sentence in source.problems[0]
    count = [sum(len(s.scene(i)["labels"]) for i in range(len(s))) for s in (before, source)]
    assert count[0] - count[1] == lost
    boxes = torch.cat([source.scene(i)["boxes"] for i in range(len(source))])
    assert boxes.min() >= 0
    assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_images_may_be_named_by_text(coco):
    """As in the files that Mask2Former's scripts make of ADE20K."""
    before = [change(coco, lambda content: None).records(index) for index in range(2)]

    def edit(content):
        names = {image["id"]: f"ADE_val_{image['id']:08d}" for image in content["images"]}
        for image in content["images"]:
            image["id"] = names[image["id"]]
        for annotation in content["annotations"]:
            annotation["image_id"] = names[annotation["image_id"]]

    source = change(coco, edit)
    assert source.problems == []
    assert [source.records(index) for index in range(2)] == before


def test_annotations_need_no_id(coco):
    def edit(content):
        for annotation in content["annotations"]:
            del annotation["id"]

    assert change(coco, edit).problems == []


def test_missing_boxes_and_areas_are_those_of_the_masks(coco):
    before = change(coco, lambda content: None).records(0)

    def edit(content):
        for annotation in content["annotations"]:
            del annotation["bbox"], annotation["area"]

    source = change(coco, edit)
    assert source.records(0) == before
    assert source.problems == []


def test_a_missing_image_is_named_and_left_out(coco):
    (coco / "val2017" / "000001.png").unlink()
    source = change(coco, lambda content: None)
    assert len(source) == 1
    assert "there is no file" in source.problems[0]
    assert "000001.png" in source.problems[0]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c["images"][1].update(id=c["images"][0]["id"]), "two images have the id 3"),
        (lambda c: c["categories"][1].update(id=2), "two categories have the id 2"),
        (lambda c: c["categories"].clear(), "must have categories"),
        (lambda c: c.pop("annotations"), "no list of annotations"),
        (lambda c: c["images"][0].pop("width"), "must have id, height, width"),
        (lambda c: c["images"][0].update(file_name=3), "must have id, height, width"),
        (lambda c: c["images"][0].update(id=[1]), "must have id, height, width"),
        (lambda c: c["categories"][0].update(id=[1]), "must have categories with a number as id"),
        (lambda c: [i.update(file_name="x" + i["file_name"]) for i in c["images"]], "none of the 2 images"),
    ],
)
def test_files_that_cannot_be_used_are_refused(coco, edit, sentence):
    with pytest.raises(UserError, match=sentence):
        change(coco, edit)


def test_other_files_are_refused(coco):
    path = coco / "annotations" / "instances_val2017.json"
    path.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        CocoInstances(coco / "val2017", path)
    path.write_text("[1]")
    with pytest.raises(UserError, match="no list of images"):
        CocoInstances(coco / "val2017", path)


def test_an_image_of_another_size_than_its_annotations_is_refused(coco):
    source = change(coco, lambda content: None)
    path = source.path(0)
    Image.new("RGB", (20, 30)).save(path)
    with pytest.raises(ValueError, match="the image has 30 x 20 pixels"):
        source.load(0)


def test_panoptic(tmp_path):
    root = write_coco_panoptic(tmp_path / "panoptic", 2, 2, 48)
    source = open_source(DenseDataConfig(format="coco_panoptic", root=str(root), target="panoptic"), train=True)
    assert source.classes == [*THINGS, *STUFF]
    assert source.things == [True] * 3 + [False] * 2
    for index, drawn in enumerate(draw_scenes(2, 48, 1)):
        _, scene = source.load(index)
        masks = {source.classes[label]: [] for label in scene["labels"].tolist()}
        for place, label in enumerate(scene["labels"].tolist(), 1):
            masks[source.classes[label]].append((scene["map"] == place).numpy())
        for number, name in enumerate(STUFF):
            np.testing.assert_array_equal(masks[name][0], drawn.stuff == number)
        for label, mask in drawn.objects:
            assert any(np.array_equal(mask, found) for found in masks[label])
        hidden = drawn.stuff == -1
        for _, mask in drawn.objects:
            hidden &= ~mask
        np.testing.assert_array_equal((scene["map"] == 0).numpy(), hidden)
    classes = open_source(DenseDataConfig(format="coco_panoptic", root=str(root), target="semantic"), train=True)
    for index, drawn in enumerate(draw_scenes(2, 48, 1)):
        true = class_map(drawn, (*THINGS, *STUFF), VOID)
        np.testing.assert_array_equal(classes.scene(index)["map"].numpy(), true)


def test_wrong_panoptic_annotations(tmp_path):
    root = write_coco_panoptic(tmp_path / "panoptic", 1, 3, 48)
    count = len(change(root, lambda content: None, kind="panoptic").scene(0)["labels"])

    def edit(content):
        content["annotations"][0]["segments_info"][0]["category_id"] = 1
        del content["annotations"][1]

    (root / "annotations" / "panoptic_val2017" / "000002.png").unlink()
    source = change(root, edit, kind="panoptic")
    assert len(source) == 1
    words = ("category 1", "no annotation", "no file")
    assert all(sum(word in problem for problem in source.problems) == 1 for word in words)
    assert len(source.problems) == 3
    scene = source.scene(0)
    assert len(scene["labels"]) == count - 1
    assert (scene["map"] == 0).any()
    (root / "annotations" / "panoptic_val2017").rename(root / "gone")
    with pytest.raises(UserError, match="panoptic_val2017.json are in neither"):
        change(root, lambda content: None, kind="panoptic")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda a: a["segments_info"][0].pop("id"), "its id must be a number"),
        (lambda a: a["segments_info"][0].update(id=a["segments_info"][1]["id"]), "another one has its id"),
        (lambda a: a["segments_info"][0].update(category_id=[3]), "there is no category"),
        (lambda a: a.update(segments_info=None), "a list of segments_info"),
        (lambda a: a.update(segments_info=[3]), "a list of segments_info"),
        (lambda a: a.update(file_name=3), "must have image_id, file_name"),
        (lambda a: a.update(image_id=[3]), "must have image_id, file_name"),
    ],
)
def test_other_wrong_panoptic_annotations(tmp_path, edit, sentence):
    root = write_coco_panoptic(tmp_path / "panoptic", 1, 2, 48)
    try:
        found = change(root, lambda content: edit(content["annotations"][0]), kind="panoptic").problems
    except UserError as error:
        found = [str(error)]
    assert len(found) == 1
    assert sentence in found[0]


def test_images_of_16_bits(coco):
    source = change(coco, lambda content: None)
    shape = (source.images[0]["height"], source.images[0]["width"])
    Image.fromarray(np.full(shape, 257 * 100, np.uint16)).save(source.path(0))
    assert source.load(0)[0].getpixel((3, 3)) == (100, 100, 100)


def test_ade20k(tmp_path):
    root = write_ade20k(tmp_path / "ade", 2, 1, 48)
    source = open_source(DenseDataConfig(format="ade20k", root=str(root), target="semantic"), train=True)
    assert source.classes == [*STUFF, *THINGS]
    for index, drawn in enumerate(draw_scenes(2, 48, 1)):
        true = class_map(drawn, (*STUFF, *THINGS), VOID)
        np.testing.assert_array_equal(source.load(index)[1]["map"].numpy(), true)
    (root / "annotations" / "training" / "ADE_training_00000000.png").unlink()
    (root / "objectInfo150.txt").unlink()
    source = open_source(DenseDataConfig(format="ade20k", root=str(root), target="semantic"), train=True)
    assert (len(source), len(source.problems), len(source.classes)) == (1, 1, 150)
    (root / "objectInfo150.txt").write_text("Idx\n")
    with pytest.raises(UserError, match="must have a line per class"):
        open_source(DenseDataConfig(format="ade20k", root=str(root), target="semantic"), train=True)


@pytest.mark.parametrize("target", ["instance", "semantic", "panoptic"])
def test_cityscapes(tmp_path, target):
    root = write_cityscapes(tmp_path / "city", 2, 1, 48)
    source = open_source(DenseDataConfig(format="cityscapes", root=str(root), target=target), train=True)
    assert len(source.classes) == (8 if target == "instance" else 19)
    names = {"sky": "sky", "ground": "road", "disc": "car", "square": "person", "triangle": "bicycle"}
    for index, drawn in enumerate(draw_scenes(2, 48, 1)):
        _, scene = source.load(index)
        if target == "semantic":
            true = class_map(drawn, (*STUFF, *THINGS), -1)
            for number, name in enumerate((*STUFF, *THINGS)):
                found = scene["map"] == source.classes.index(names[name])
                np.testing.assert_array_equal(found.numpy(), true == number)
            np.testing.assert_array_equal((scene["map"] == VOID).numpy(), true == -1)
            continue
        masks = (
            scene["masks"]
            if target == "instance"
            else scene["map"] == torch.arange(1, len(scene["labels"]) + 1)[:, None, None]
        )
        found = [(source.classes[k], m, c) for k, m, c in zip(scene["labels"], masks, scene["crowd"], strict=True)]
        wanted = [(names[label], mask, place == 0) for place, (label, mask) in enumerate(drawn.objects)]
        if target == "panoptic":
            wanted += [(names[name], drawn.stuff == number, False) for number, name in enumerate(STUFF)]
        assert len(found) == len(wanted)
        for label, mask, crowd in wanted:
            assert any(k == label and bool(c) == crowd and np.array_equal(m.numpy(), mask) for k, m, c in found)


def test_boxes_around_masks():
    masks = torch.zeros(2, 6, 9, dtype=torch.bool)
    masks[0, 2, 3] = True
    masks[1, 0, 0] = masks[1, 5, 8] = True
    assert mask_boxes(masks).tolist() == [[3, 2, 4, 3], [0, 0, 9, 6]]
    assert mask_boxes(masks[:0]).shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"root": None}, "data.root must name"),
        ({"root": "nowhere"}, "nowhere does not exist"),
        ({"val_images": "gone"}, "data.val_images: the folder .*gone does not exist"),
        ({"val_annotations": "gone.json"}, "data.val_annotations: the file .*gone.json does not exist"),
        ({"target": "semantic"}, "data.target=semantic is not in these data"),
        ({"format": "ade20k", "target": "semantic"}, "images/validation does not exist"),
        ({"format": "cityscapes"}, "leftImg8bit/val does not exist"),
    ],
)
def test_wrong_places(coco, options, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(DenseDataConfig(**{"root": str(coco), **options}), train=False)


@pytest.mark.parametrize("turned", [True, False])
def test_photographs_are_turned_as_they_were_annotated(coco, turned):
    """With EXIF orientation 6: most tools annotate the upright image, some the stored one."""
    stored = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    height, width = (60, 40) if turned else (40, 60)

    def edit(content):
        entry = content["images"][0]
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(stored).save(coco / "val2017" / entry["file_name"], exif=exif)
        entry.update(height=height, width=width)
        content["annotations"] = [
            {
                "id": 1,
                "image_id": entry["id"],
                "category_id": 7,
                "segmentation": [[1, 1, 9, 1, 9, 9]],
                "bbox": [1, 1, 8, 8],
            }
        ]

    image, scene = change(coco, edit).load(0)
    expected = np.rot90(stored, -1) if turned else stored
    assert np.array_equal(np.asarray(image), expected)
    assert scene["masks"].shape[-2:] == (height, width)
