"""What a study gives: by hand, and from real runs."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from fibottention.cli.options import make_console
from fibottention.errors import UserError
from fibottention.studies import runner
from fibottention.studies.plan import load_study
from fibottention.studies.plots import curves_figure, results_figure
from fibottention.studies.results import Summary, collect, table_rows, to_markdown
from fibottention.studies.runner import run_study
from fibottention.training.run import Run
from tests.scenes import write_coco_panoptic
from tests.tasks.dense.test_checkpoints import theirs
from tests.tiny import TINY_WORDS

TINY = TINY_WORDS[1:]


@pytest.fixture
def study(tmp_path):
    content = {
        "base": "demo",
        "seeds": [0, 1],
        "reference": "scale=1, threshold=0.1",
        "attention": {"name": "sata"},
        "grid": {"attention.scale": [1, 0], "attention.threshold": [0.1, 0.2]},
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_study(str(path))


def pretend(study, folder, top1):
    """Folders of finished runs with these top-1 values of two epochs, by variant and seed."""
    for planned in study.runs:
        values = top1.get((planned.variant, planned.seed))
        if values is None:
            continue
        run = Run(folder / planned.path)
        run.write_metrics([{"epoch": i + 1, "top1": value} for i, value in enumerate(values)])
        attention = {"pairs": 0.25, "macs": 2e6}
        run.write_json(
            "summary.json",
            {"top1": max(values), "parameters": 1000, "attention": attention, "step_milliseconds": 5 + planned.seed},
        )


def test_means_spreads_and_differences_by_hand(study, tmp_path):
    names = study.variants
    top1 = {(names[0], 0): (40, 50), (names[0], 1): (40, 60), (names[1], 0): (70, 52), (names[1], 1): (40, 66),
            (names[2], 1): (10, 57)}  # fmt: skip
    pretend(study, tmp_path, top1)
    results = collect(study, tmp_path, {f"{names[2].replace(', ', '-')}/seed-0": "the loss became nan"})
    first, second, third, fourth = results
    assert first.last == Summary(55, pytest.approx(50**0.5), 2)
    assert first.difference is None
    assert second.best == Summary(68, pytest.approx(8**0.5), 2)
    assert second.difference == Summary(4, pytest.approx(8**0.5), 2)  # 52 - 50 and 66 - 60
    assert third.difference == Summary(-3, None, 1)
    assert [run.state for run in third.runs] == ["diverged", "finished"]
    assert fourth.last is None
    header, rows = table_rows(study, results)
    assert header[:2] == ["variant", "seeds"]
    assert rows[1] == [
        names[1], "2", "59.00 ± 9.90", "+4.00 ± 2.83", "68.00 ± 2.83", "0.001 M", "25.00%", "2.00 M", "5",
    ]  # fmt: skip
    assert rows[2][:4] == [names[2], "1 (1 diverged)", "57.00", "-3.00"]
    assert rows[3][1:] == ["0 (2 not finished)", *[""] * 7]
    assert to_markdown(["a", "b"], [["x|y", "1"]]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n"

    dots, grid = results_figure(study, results).axes
    assert [t.get_text() for t in dots.get_yticklabels()] == list(names)
    assert sum(len(line.get_xdata()) for line in dots.lines if line.get_marker() == "o") == 5
    assert {t.get_text() for t in grid.texts} == {"55.00 ± 7.07", "59.00 ± 9.90", "57.00"}
    assert (grid.get_ylabel(), grid.get_xlabel()) == ("scale", "threshold")
    curves = curves_figure(study, results).axes[0]
    assert [list(line.get_ydata()) for line in curves.lines] == [[40, 55], [55, 59], [10, 57]]


def test_each_task_is_compared_by_its_own_metric(tmp_path):
    path = tmp_path / "robots.yaml"
    variants = {name: {"attention": {"name": name}} for name in ("dense", "fibottention")}
    path.write_text(yaml.safe_dump({"base": "robot/pusht_cpu", "variants": variants}))
    robots = load_study(str(path), roots={"pusht.zarr": "/elsewhere/pusht.zarr"}, overrides=["--data.path=pusht.zarr"])
    assert {run.config.data.path for run in robots.runs} == {"/elsewhere/pusht.zarr"}
    assert {run.config.essence()["data"]["path"] for run in robots.runs} == {"//elsewhere/pusht.zarr"}
    for planned, values in zip(robots.runs, ((0.25, 0.5), (0.75, 0.625)), strict=True):
        run = Run(tmp_path / "out" / planned.path)
        scores = [{"epoch": 2 * i + 2, "test_mean_score": value} for i, value in enumerate(values)]
        run.write_metrics([{"epoch": 1, "val_loss": 3.0}, scores[0], {"epoch": 3, "val_loss": 2.0}, scores[1]])
        content = {"test_mean_score": max(values), "parameters": 1000, "attention": None, "step_milliseconds": None}
        run.write_json("summary.json", content)
    results = collect(robots, tmp_path / "out", {})
    assert results[1].runs[0].curve == ((2, 0.75), (4, 0.625))
    header, rows = table_rows(robots, results)
    assert header[2:5] == ["mean score, last epoch", "minus dense", "best epoch"]
    assert rows[1][2:5] == ["0.6250", "+0.1250", "0.7500"]
    assert rows[1][-1] == ""
    assert curves_figure(robots, results).axes[0].get_ylabel() == "mean score"
    path.write_text(yaml.safe_dump({"base": "dense/upernet_dinat_cpu", "grid": {"model.drop_path": [0.0, 0.1]}}))
    segmenters = load_study(str(path), roots={"ade20k": "/elsewhere"})
    assert segmenters.score.label == "mean IoU"
    assert {run.config.data.root for run in segmenters.runs} == {"/elsewhere"}
    settings = {"robots": {"base": "robot/pusht_cpu"}, "segmenters": {"base": "dense/upernet_dinat_cpu"}}
    path.write_text(yaml.safe_dump({"settings": settings, "grid": {"optim.lr": [0.1, 0.2]}}))
    with pytest.raises(UserError, match="measured by mean score and mean IoU, which cannot be compared"):
        load_study(str(path))


def test_a_study_of_published_models_is_taken_up_again(tmp_path):
    """Their runs take over what the folder of the weights says, which the study's options do not hold."""
    root = write_coco_panoptic(tmp_path / "data", 2, 2, 64)
    theirs("mask2former", ["ground", "disc", "square", "sky", "triangle"]).save_pretrained(tmp_path / "published")
    content = {
        "task": "dense",
        "data": {"format": "coco_panoptic", "target": "panoptic", "test_size": None, "workers": 0},
        "model": {"head": "mask2former", "checkpoint": str(tmp_path / "published")},
        "train": {"epochs": 0, "device": "cpu"},
        "variants": {"whole": {}, "near": {"model": {"options": {"dilations": [[1], [1], [1, 1], [1]]}}}},
    }
    path = tmp_path / "dilations.yaml"
    path.write_text(yaml.safe_dump(content))
    console = make_console()
    for _ in range(2):
        study = load_study(str(path), roots={"coco_panoptic": str(root)})
        results = run_study(study, tmp_path / "out", command="the command", console=console)
    assert [run.state for result in results for run in result.runs] == ["finished"] * 2
    assert results[0].runs[0].curve[0][0] == 0
    saved = Run(tmp_path / "out/near/seed-0").read_yaml()
    assert saved["model"]["options"]["embed_dim"] == 16
    assert "embed_dim" not in saved["given"]["model"]["options"]


def run_tiny(folder, seeds, **changes):
    content = {
        "title": "windows against all pairs",
        "base": "demo",
        "seeds": [0, 1],
        "variants": {"dense": {"attention": {"name": "dense"}}, "window": {"attention": {"name": "longformer"}}},
        **changes,
    }
    path = folder / "windows.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    study = load_study(str(path), seeds=seeds, overrides=TINY)
    return study, run_study(study, folder / "out", command="the command", console=make_console())


def test_a_study_from_the_command_line_and_one_more_seed(tmp_path):
    run_tiny(tmp_path, [0])
    out = tmp_path / "out"
    kept = (out / "dense/seed-0/summary.json").stat().st_mtime_ns
    # As after a kill: one run without a finished epoch, one with a checkpoint and no end.
    (out / "window/seed-0/summary.json").unlink()
    (out / "dense/seed-1").mkdir()
    config = load_study(str(tmp_path / "windows.yaml"), overrides=TINY).runs[2].config
    Run(out / "dense/seed-1").write_yaml({"task": "classification", **config.to_dict()})
    words = [sys.executable, "-m", "fibottention.cli", "study", tmp_path / "windows.yaml", "--output", out, *TINY]
    other = subprocess.run([*words, "--optim.lr=1"], capture_output=True, text=True, timeout=300)
    assert other.returncode == 2
    assert "holds a run with other options than the study has now (optim.lr)" in other.stderr.replace("\n", " ")
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "windows against all pairs" in result.stdout
    assert "run 3 of 4: dense, seed 1" in result.stdout
    assert "run 1 of 4" not in result.stdout
    assert (out / "dense/seed-0/summary.json").stat().st_mtime_ns == kept
    content = json.loads((out / "results.json").read_text())
    assert [entry["last"]["count"] for entry in content["results"]] == [2, 2]
    for entry in content["results"]:
        for run in entry["runs"]:
            assert run["last"] == Run(out / run["folder"]).metrics()[-1]["top1"]
    html = (out / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert len(re.findall(r"data:image/png;base64,", html)) == 2
    for text in ("windows against all pairs", "4 of 4 runs finished", "window/seed-1", "100.00%"):
        assert text in html
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "| window | 2 |" in (out / "results.md").read_text()


def test_a_run_that_diverges_is_left_out(tmp_path):
    changes = {
        "variants": {"dense": {"attention": {"name": "dense"}}, "wild": {"optim": {"lr": 1e30, "clip_grad": None}}}
    }
    study, results = run_tiny(tmp_path, [0], **changes)
    out = tmp_path / "out"
    assert [result.runs[0].state for result in results] == ["finished", "diverged"]
    assert "the loss became" in (out / "report.html").read_text()
    again = run_study(study, out, command="the command", console=make_console())
    assert [result.runs[0].state for result in again] == ["finished", "diverged"]
    changes["variants"]["wild"] = {"optim": {"lr": 1e-3}}  # mended, it is made again
    _, mended = run_tiny(tmp_path, [0], **changes)
    assert [result.runs[0].state for result in mended] == ["finished", "finished"]


def test_what_a_study_does_not_touch(tmp_path, monkeypatch):
    run_tiny(tmp_path, [0])
    out = tmp_path / "out"
    with runner._locked(out), pytest.raises(UserError, match="is in use by another study"):
        run_tiny(tmp_path, [0, 1])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="was made with processes 1, not 2; go on with 1"):
        run_tiny(tmp_path, [0, 1])
    monkeypatch.undo()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    (out / "dense/seed-0/summary.json").unlink()  # stopped half-way
    with pytest.raises(UserError, match="was made with mixed precision no, not bf16; go on with no"):
        run_tiny(tmp_path, [0, 1])
    monkeypatch.undo()
    (tmp_path / "other.yaml").write_text((tmp_path / "windows.yaml").read_text())
    other = load_study(str(tmp_path / "other.yaml"), overrides=TINY)
    with pytest.raises(UserError, match="holds the study 'windows'; name another folder for 'other'"):
        run_study(other, out, command="the command", console=make_console())
    (out / "dense/seed-1").mkdir()
    (out / "dense/seed-1/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="must be a new or empty folder"):
        run_tiny(tmp_path, [0, 1])
    assert (out / "dense/seed-1/thesis.txt").read_text() == "mine"


def test_data_that_are_not_there_are_found_first(tmp_path):
    settings = {"here": {}, "there": {"data": {"name": "cifar10"}, "model": {"in_chans": 3}}}
    message = "variant 'dense' in 'there': data.root must be given .*; give it as --root cifar10=DIR"
    with pytest.raises(UserError, match=message):
        run_tiny(tmp_path, [0], settings=settings)
    with pytest.raises(UserError, match="variant 'window': optim.transform_lr=0.1 is for the scales"):
        run_tiny(
            tmp_path, [0], variants={"window": {"attention": {"name": "longformer"}, "optim": {"transform_lr": 0.1}}}
        )
    for options, message in (
        ({"optim": {"name": "sgdx"}}, "the optimizer optim.name=sgdx cannot be made"),
        ({"augment": {"flip": 2}}, "augment.flip must be in 0 .. 1, got 2"),
        ({"optim": {"cooldown_epochs": 100}}, "optim.cooldown_epochs must be at least 0 and less than"),
        ({"model": {"checkpoint": "nothing.pth"}}, "nothing.pth is not a file of weights"),
    ):
        with pytest.raises(UserError, match=f"variant 'odd': {message}"):
            run_tiny(tmp_path, [0], variants={"dense": {"attention": {"name": "dense"}}, "odd": options})
    assert not (tmp_path / "out").exists()


def test_a_grid_of_specs_is_drawn(tmp_path):
    grid = {"attention.scale": [0.5], "attention.over": ["lsa", {"name": "dense", "temperature": 2.0}]}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({"base": "demo", "attention": {"name": "sata"}, "grid": grid}))
    study = load_study(str(path))
    pretend(study, tmp_path, {(study.variants[0], 0): (40, 50)})
    cells = results_figure(study, collect(study, tmp_path, {})).axes[1]
    assert "lsa" in {t.get_text() for t in (*cells.get_xticklabels(), *cells.get_yticklabels())}


def test_a_variant_that_cannot_be_built_is_found_first(tmp_path):
    changes = {
        "variants": {
            "dense": {"attention": {"name": "dense"}},
            "odd": {"model": {"drop_path": 0.1, "name": "resnet18"}},
        }
    }
    with pytest.raises(UserError, match="variant 'odd': "):
        run_tiny(tmp_path, [0], **changes)
    assert not (tmp_path / "out").exists()
