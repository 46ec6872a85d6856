"""``fibottention analyze`` on runs made here."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from fibottention.analysis.report import write_report
from fibottention.cli import main
from fibottention.tasks.runs import train_run
from tests.pictures import photo_folder
from tests.tiny import sparse_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fibottention", "dense"):
        config = sparse_config(1)
        config.attention = {"name": name}
        train_run(config, folder / name, command="none")
    return folder


def test_analyses_of_two_runs(runs, capsys, tmp_path):
    words = [
        "analyze",
        str(runs / "fibottention"),
        str(runs / "dense"),
        "--count",
        "8",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert "8 images; written to" in out
    assert (tmp_path / "out" / "diversity.png").is_file()
    for name in ("fibottention", "dense"):
        folder = runs / name / "analysis"
        assert sorted(p.name for p in folder.iterdir()) == [
            "coverage.json", "coverage.png", "diversity.png", "heads.json", "heads.png", "maps.png",
        ]  # fmt: skip
        layers = json.loads((folder / "heads.json").read_text())
        assert [layer["layer"] for layer in layers] == ["blocks.0.attn", "blocks.1.attn"]
        assert all(layer["diversity"]["mean"] > 0 for layer in layers)
        assert all(len(layer["entropy_bits"]) == 4 for layer in layers)
        reach = json.loads((folder / "coverage.json").read_text())
        assert reach["reached_with_prefix"][-1] == 1
        assert (reach["layers_to_all"] == 1) == (name == "dense")
    html = write_report([runs / "fibottention"], tmp_path / "report.html").read_text()
    assert "<h2>Analyses</h2>" in html
    assert "Which tokens heads and layers reach" in html
    assert not re.findall(r'(?:src|href)="(?!data:)', html)


def test_features_with_other_attention(runs, capsys):
    words = ["analyze", str(runs / "dense"), "--count", "12", "--specs", "dense", "longformer:window=3"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "features of the last layer" in out
    content = json.loads((runs / "dense" / "analysis" / "features.json").read_text())
    assert list(content) == ["as it is", "dense", "longformer:window=3"]
    assert content["dense"]["similarity"] == pytest.approx([1, 1])
    assert all(len(result["accuracy"]) == 2 for result in content.values())
    assert main([*words[:2], "--specs", "longformr"]) == 2
    assert "--specs: no attention spec is named 'longformr'; did you mean 'longformer'" in capsys.readouterr().err


def test_masks_of_objects(runs, tmp_path, capsys):
    root = photo_folder(tmp_path / "data", train=0, val=2)
    masks = tmp_path / "masks"
    masks.mkdir()
    mask = np.zeros((48, 48), np.uint8)
    mask[10:30, 5:40] = 255
    Image.fromarray(mask).save(masks / "0.png")
    folder = str(root / "val" / "cat")
    words = ["analyze", str(runs / "fibottention"), "--count", "4", "--images", folder, "--masks", str(masks)]
    assert main(words) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert "1 images; written to" in out
    assert "1 images have no mask in" in out
    layers = json.loads((runs / "fibottention" / "analysis" / "localisation.json").read_text())
    # 48 pixels become 28, patches are 2 pixels: rows 3 to 8 or 9 and columns 1 or 2 to 11 of 14.
    assert layers[0]["area"] == pytest.approx(20 * 35 / 48**2, rel=0.1)
    assert all(0 <= share <= 1 for share in layers[0]["share"])
    palette = Image.fromarray((mask > 0).astype(np.uint8), mode="P")
    palette.putpalette([255, 255, 255, 0, 0, 0])  # number 0, the outside, is white
    palette.save(masks / "0.png")
    assert main(words) == 0
    again = json.loads((runs / "fibottention" / "analysis" / "localisation.json").read_text())
    assert again[0]["area"] == layers[0]["area"]
    (root / "val" / "cat" / "broken.jpg").write_text("no image")
    assert main(words[:-2]) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert "broken.jpg cannot be read as an image" in out
    assert "2 images; written to" in out
    assert not (runs / "fibottention" / "analysis" / "localisation.json").exists()  # of other images
    (tmp_path / "voc").mkdir()
    box = "<bndbox><xmin>9</xmin><ymin>5</ymin><xmax>20</xmax><ymax>24</ymax></bndbox>"
    (tmp_path / "voc/0.xml").write_text(f"<annotation><object><name>shirt</name>{box}</object></annotation>")
    photo = next((root / "val" / "cat").glob("0.*")).name
    polygon = [[8, 4, 20, 4, 20, 24, 8, 24]]
    content = {
        "images": [{"id": 1, "file_name": photo, "height": 48, "width": 48}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "segmentation": polygon, "bbox": [8, 4, 12, 20]}],
        "categories": [{"id": 1, "name": "shirt"}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    found = []
    for masks_given in (tmp_path / "voc", tmp_path / "coco.json"):
        assert main([*words[:-1], str(masks_given)]) == 0
        found.append(json.loads((runs / "fibottention/analysis/localisation.json").read_text()))
    assert found[0] == found[1]
    assert 0 < found[0][0]["area"] < 1
    (tmp_path / "voc/0.xml").write_text(f"<annotation><object>{box.replace('>20<', '>60<')}</object></annotation>")
    assert main([*words[:-1], str(tmp_path / "voc")]) == 2
    assert "has a box beyond" in capsys.readouterr().err
    (tmp_path / "voc/0.xml").write_text("<annotation>")
    assert main([*words[:-1], str(tmp_path / "voc")]) == 2
    assert "is not an annotation of PASCAL VOC" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "nothing")]) == 2
    assert "is neither a folder nor a JSON file" in capsys.readouterr().err
    Image.fromarray(mask[:20]).save(masks / "0.png")
    assert main(words) == 2
    assert "is 48 x 20 pixels, the image 48 x 48" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "1"], "--count must be at least 2, got 1"),
        (["--masks", "m"], "--masks needs --images"),
        (["--output", "out"], "--output is for the comparison of several runs"),
        (["--root", "there"], "--root has no meaning"),
        (["--images", "nowhere"], "--images: nowhere is not a folder"),
        (["--images", "."], "--images: . holds no images"),
    ],
)
def test_mistakes_are_named(runs, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", str(runs / "dense"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_such_layers(tmp_path, capsys):
    config = sparse_config(1)
    config.attention = {"name": "none"}
    config.model.name, config.model.options = "resnet18", {}
    train_run(config, tmp_path / "run", command="none")
    assert main(["analyze", str(tmp_path / "run"), "--count", "2"]) == 2
    assert "sparsify does not support ResNet" in capsys.readouterr().err
    config.model.name, config.model.options = (
        "dinat_s_tiny",
        {"patch_size": 2, "embed_dim": 32, "depths": [1], "num_heads": [1], "dilations": [[3]]},
    )
    train_run(config, tmp_path / "dinat", command="none")
    assert main(["analyze", str(tmp_path / "dinat"), "--count", "2"]) == 2
    assert "has no layer that attends over whole images" in capsys.readouterr().err
    assert not (tmp_path / "run" / "analysis").exists()


def test_a_run_with_another_attention(runs, capsys):
    assert main(["evaluate", str(runs / "dense"), "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)
    assert dense["attention"] == {"name": "dense", "temperature": 1.0}
    twice = []
    for _ in range(2):
        assert main(["evaluate", str(runs / "dense"), "--json", "--attention.name=linformer"]) == 0
        captured = capsys.readouterr()
        assert "4 tensors that linformer learns have their initial values" in captured.err
        twice.append(json.loads(captured.out))
    assert twice[0] == twice[1]
    assert twice[0]["attention"] == {"name": "linformer", "projection": 4}
    assert main(["evaluate", str(runs / "dense"), "--json", "--attention.name", "dense"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == pytest.approx(dense["val_loss"], rel=1e-5)
    assert main(["evaluate", str(runs / "dense"), "--json", "--attention.name=longformer", "--attention.window=3"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] != dense["val_loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention.window=3"], "--attention.name must be given with other options of --attention"),
        (["--attention.name=none"], "--attention.name=none changes nothing"),
        (["--attention.name=longformr"], "did you mean 'longformer'"),
        (["--attention.name=grid_attention", "--attention.size=99"], "attention grid_attention: size must be in 1..14"),
        (["--dilations=gradual"], "--dilations is for NAT and DiNAT, and this run has a VisionTransformer"),
    ],
)
def test_mistakes_about_another_attention(runs, capsys, words, message):
    assert main(["evaluate", str(runs / "dense"), *words]) == 2
    assert message in capsys.readouterr().err


def test_other_dilations_at_test_time(tmp_path, capsys):
    config = sparse_config(1)
    config.attention = {"name": "none"}
    config.model.name = "dinat_s_tiny"
    config.model.options = {"patch_size": 2, "embed_dim": 32, "depths": [2], "num_heads": [1], "kernel_size": 3}
    config.model.options["dilations"] = [[1, 1]]
    train_run(config, tmp_path / "run", command="none")
    losses = {}
    for dilations in ("null", "gradual", "[4]", "[[1,1]]"):
        assert main(["evaluate", str(tmp_path / "run"), "--json", f"--dilations={dilations}"]) == 0
        losses[dilations] = json.loads(capsys.readouterr().out)["val_loss"]
    assert losses["null"] == losses["[[1,1]]"]
    assert losses["gradual"] == losses["[4]"] != losses["null"]
    assert main(["evaluate", str(tmp_path / "run"), "--dilations=[1,2]"]) == 2
    assert "--dilations: dilations must have 1 entries, one per level, got 2" in capsys.readouterr().err
