"""``fibottention analyze`` on runs made here."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from fibottention.analysis.report import write_report
from fibottention.cli import main
from fibottention.tasks.classification.runs import train_classification
from tests.pictures import photo_folder
from tests.tiny import sparse_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fibottention", "dense"):
        config = sparse_config(1)
        config.attention = {"name": name}
        train_classification(config, folder / name, command="none")
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
            "coverage.json", "coverage.png", "diversity.png", "heads.json", "heads.png",
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
    assert "1 images; written to" in capsys.readouterr().out.replace("\n", "")
    layers = json.loads((runs / "fibottention" / "analysis" / "localisation.json").read_text())
    # 48 pixels become 28, patches are 2 pixels: rows 3 to 8 or 9 and columns 1 or 2 to 11 of 14.
    assert layers[0]["area"] == pytest.approx(20 * 35 / 48**2, rel=0.1)
    assert all(0 <= share <= 1 for share in layers[0]["share"])
    Image.fromarray(mask[:20]).save(masks / "0.png")
    assert main(words) == 2
    assert "is 48 x 20 pixels, the image 48 x 48" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "1"], "--count must be at least 2, got 1"),
        (["--masks", "m"], "--masks needs --images"),
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
    train_classification(config, tmp_path / "run", command="none")
    assert main(["analyze", str(tmp_path / "run"), "--count", "2"]) == 2
    assert "sparsify does not support ResNet" in capsys.readouterr().err
    assert not (tmp_path / "run" / "analysis").exists()
