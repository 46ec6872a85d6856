"""Detection and segmentation as a user runs them, in processes of their own."""

import json
import os
import subprocess
import sys

import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from fibottention.cli import main
from tests.scenes import write_ade20k, write_coco, write_coco_panoptic

COMMAND = [sys.executable, "-m", "fibottention.cli"]
SMALL = [
    "--data.workers=0",
    "--model.options.embed_dim=16",
    "--model.options.num_heads=[1,1,2,4]",
    "--train.batch_size=8",
    "--train.epochs=1",
    "--optim.warmup_steps=2",
    "--train.device=cpu",
]


def run(*words, cwd):
    return subprocess.run([*COMMAND, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600)


@pytest.fixture
def here(trained, monkeypatch, capsys):
    """The command in this process, which spares its imports, in the folder of what was trained."""

    def call(*words):
        monkeypatch.chdir(trained[0])
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A detector and a segmenter, trained by the commands on scenes that were drawn for them."""
    folder = tmp_path_factory.mktemp("dense")
    write_coco(folder / "coco", 32, 6, 64)
    write_ade20k(folder / "ade", 32, 6, 64)
    detector = run("train", "dense/maskrcnn_dinat_cpu", "--data.root=coco", *SMALL, "--train.output=boxes", cwd=folder)
    words = ["--data.root=ade", "--augment.crop=[64,64]", *SMALL, "--train.output=classes"]
    segmenter = run("train", "dense/upernet_dinat_cpu", *words, cwd=folder)
    return folder, detector, segmenter


def test_train(trained):
    folder, detector, segmenter = trained
    assert detector.returncode == 0, detector.stderr
    assert "mask_rcnn, 32 images, 3 classes" in detector.stdout
    assert "best mask AP" in detector.stdout
    assert segmenter.returncode == 0, segmenter.stderr
    assert "best mean IoU" in segmenter.stdout
    assert len(list((folder / "boxes" / "samples").iterdir())) == 6


def test_evaluate(trained, here):
    folder = trained[0]
    shown = run("evaluate", "boxes", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    for word in ("mask AP50", "box AP small", "triangle", "on 6 images"):
        assert word in shown.stdout
    best = json.loads((folder / "boxes" / "best.json").read_text())
    content = json.loads(here("evaluate", "boxes", "--json", "--batch-size", "1"))
    assert content["mask_ap"] == pytest.approx(best["mask_ap"], abs=0.5)
    assert list(content["mask_ap_by_class"]) == ["disc", "square", "triangle"]
    words = ["--json", "--batch-size", "1", "--data.test_scales", "[0.75, 1]", "--data.test_flip", "true"]
    content = json.loads(here("evaluate", "classes", *words))
    best = json.loads((folder / "classes" / "best.json").read_text())
    assert content["miou"] != best["miou"]
    assert content["images"] == 6


def test_predict(trained, here):
    folder = trained[0]
    images = [folder / "coco" / "val2017" / f"00000{number}.png" for number in range(2)]
    shown = run("predict", "boxes", *images, "--threshold", "0.01", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    content = json.loads((folder / "boxes" / "predictions" / "000001.json").read_text())
    assert content["image"] == str(images[1])
    for entry in content["objects"]:
        mask = coco_mask.decode(entry["mask"])
        assert mask.shape == (content["height"], content["width"])
        assert entry["class"] in ("disc", "square", "triangle")
    with Image.open(folder / "boxes" / "predictions" / "000001.png") as picture:
        assert picture.size == (content["width"], content["height"])
    (content,) = json.loads(here("predict", "classes", images[0], "--output", "found", "--json"))
    assert sum(entry["share"] for entry in content["classes"]) == pytest.approx(1)
    assert sorted(path.name for path in (folder / "found").iterdir()) == ["000000.json", "000000.png"]


def test_report_and_resume(trained, here):
    here("report", "boxes", "classes", "--output", "report.html")
    page = (trained[0] / "report.html").read_text()
    assert "Found in validation images" in page
    assert page.count("finds in an image") == 12
    assert "mask AP" in page
    assert "mean IoU" in page
    assert "resumed after epoch 1" in here("train", "--resume", "boxes")


@pytest.mark.parametrize(
    ("recipe", "data", "options"),
    [
        ("maskrcnn_dinat_cpu", "coco", ["--augment.sizes=[48,64]"]),
        (
            "mask2former_dinat_cpu",
            "panoptic",
            ["--augment.jitter=null", "--augment.crop=null", "--augment.sizes=[48,64]"],
        ),
    ],
)
def test_two_processes_with_images_of_other_sizes(trained, recipe, data, options):
    """One may have more sizes in a batch than the other, so none may wait for the other within a step."""
    folder = trained[0]
    if not (folder / "panoptic").exists():
        write_coco_panoptic(folder / "panoptic", 16, 5, 64)
    words = [f"--data.root={data}", *SMALL, "--train.batch_size=4", "--data.limit=16", "--optim.warmup_steps=1"]
    words.append(f"--train.output=two_{data}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    result = subprocess.run(
        [*launch, "fibottention.cli", "train", f"dense/{recipe}", *words, *options],
        cwd=folder, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 x cpu" in result.stdout
    best = json.loads((folder / f"two_{data}" / "best.json").read_text())
    assert best["images"] == 2  # a sixth of the limit, each counted once


def test_a_vision_transformer_with_another_spec(here):
    words = ["--data.root=coco", "--data.workers=0", "--data.limit=12", "--train.epochs=1", "--train.batch_size=4"]
    words += ["--model.options.depth=2", "--train.output=vit", "--attention.name=longformer", "--optim.warmup_steps=1"]
    shown = here("train", "dense/maskrcnn_vit_cpu", *words, "--train.device=cpu")
    assert "attention" in shown
    assert "12 images" in shown
    assert "with dense attention" in here("evaluate", "vit", "--attention.name", "dense")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "dense/maskrcnn_dinat_cpu"], "data.root must name the folder of the data set"),
        (["train", "dense/maskrcnn_dinat_cpu", "--data.root=no"], "data.root: the folder no does not exist"),
        (["train", "dense/maskrcnn_dinat_cpu", "--data.root=ade"], "data.val_images: the folder ade/val2017 does not"),
        (["train", "dense/maskrcnn_dinat_cpu", "--data.root=coco", "--model.head=yolo"], "model.head must be one of"),
        (["train", "dense/maskrcnn_dinat_cpu", "--data.root=coco", "--model.name=dinat_mni"], "dinat_mini"),
        (["train", "dense/maskrcnn_dinat_coco"], "no recipe 'dense/maskrcnn_dinat_coco'"),
        (["evaluate", "boxes", "--root", "ade"], "data.val_images: the folder ade/val2017 does not exist"),
        (["evaluate", "boxes", "--data.target", "semantic"], "--data.target cannot be changed"),
        (["evaluate", "boxes", "--attention.name", "fibottention"], "NAT and DiNAT have an attention of their own"),
        (["predict", "boxes", "nothing.png"], "cannot read nothing.png: no such file"),
        (["predict", "boxes", "coco"], "cannot read coco: a folder, not an image"),
        (["predict", "boxes", "boxes/config.yaml"], "cannot read boxes/config.yaml: not an image"),
        (["predict", "boxes", "a/x.png", "b/x.png"], "two images are named x"),
        (
            ["predict", "boxes", "coco/val2017/000000.png", "--output", "coco/val2017"],
            "would be written over the image",
        ),
        (["predict", "boxes", "x.png", "--threshold", "2"], "--threshold must be in 0 .. 1, got 2"),
        (["analyze", "boxes"], "boxes is a dense run, which cannot be analyzed"),
    ],
)
def test_bad_input(trained, words, sentence, monkeypatch, capsys):
    monkeypatch.chdir(trained[0])
    before = sorted(trained[0].rglob("*"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert sentence in " ".join(captured.err.split())
    assert captured.err.count("\n") == 1
    assert sorted(trained[0].rglob("*")) == before


def test_bad_input_has_no_traceback(trained):
    result = run("train", "dense/maskrcnn_dinat_cpu", "--data.root=no", cwd=trained[0])
    assert result.returncode == 2
    assert result.stderr == "fibottention: data.root: the folder no does not exist\n"
