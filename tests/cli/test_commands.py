"""The commands as a user runs them, in a process of their own, on real images."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from fibottention.cli import main
from fibottention.training.run import Run, load_weights
from tests.pictures import break_images, photo_folder
from tests.tiny import SPARSE_WORDS, TINY_WORDS

COMMAND = [sys.executable, "-m", "fibottention.cli"]


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600)


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(Run(folder).checkpoint() / "model.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on photographs, some of them damaged."""
    folder = tmp_path_factory.mktemp("photos")
    root = photo_folder(folder / "data", train=30, val=6, size=32)
    broken = break_images(root / "train") + break_images(root / "val")
    words = ["train", *TINY_WORDS, "--data.name=folder", f"--data.root={root}", "--data.image_size=32"]
    words += ["--model.in_chans=3", "--model.options.patch_size=4", "--data.limit=null", "--train.epochs=4"]
    words += ["--augment.auto_augment=rand-m9-mstd0.5-inc1", "--train.batch_size=16", "--train.output=run"]
    result = run(*words, cwd=folder)
    return folder, result, broken


def test_train_on_a_folder_of_photographs(photos):
    folder, result, broken = photos
    assert result.returncode == 0, result.stderr
    assert "best top-1" in result.stdout
    assert "6 images could not be read" in result.stdout.replace("\n", " ")
    named = (folder / "run" / "unreadable.txt").read_text().split("\n")
    assert set(named) - {""} <= {str(p) for p in broken}
    assert {str(p) for p in broken if "/val/" in str(p)} <= set(named)
    best = Run(folder / "run").read_json("best.json")
    assert best["top1"] > 50  # chance is 33
    assert best["images"] == 15


def test_evaluate(photos):
    folder, _, _ = photos
    result = run("evaluate", "run", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["top1"] == pytest.approx(Run(folder / "run").read_json("best.json")["top1"])
    assert content["images"] == 15
    assert len(content["unreadable"]) == 3
    checkpoint = run("evaluate", folder / "run" / "checkpoints" / "epoch_0004", "--json", cwd=folder)
    last = Run(folder / "run").metrics()[-1]
    assert json.loads(checkpoint.stdout)["top1"] == pytest.approx(last["top1"])
    table = run("evaluate", folder / "run" / "best.safetensors", cwd=folder)
    assert "recall of coffee" in table.stdout


def test_predict(photos):
    folder, _, _ = photos
    images = sorted((folder / "data" / "val" / "rocket").glob("*.jpg"))
    result = run("predict", "run", *images, "--json", "--top", "2", cwd=folder)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert [entry["image"] for entry in content] == [str(p) for p in images]
    for entry in content:
        first, second = entry["predictions"]
        assert 1 >= first["probability"] >= second["probability"] >= 0
        assert {first["class"], second["class"]} < {"cat", "coffee", "rocket"}
    assert "probability" in run("predict", "run", images[0], cwd=folder).stdout


def test_report(photos):
    folder, _, _ = photos
    result = run("report", "run", "--output", "page.html", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "<h2>Attention maps</h2>" in (folder / "page.html").read_text()


def test_the_demo_compares_two_runs(tmp_path):
    result = run("train", *TINY_WORDS[1:], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    for part in ("fibottention", "dense", "100.00%", "attention MACs", "chance is 10 %", "report.html"):
        assert part in text
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["dense", "fibottention", "report.html"]


def test_killed_in_an_epoch_and_resumed_gives_the_same_weights(tmp_path):
    words = [*TINY_WORDS, *SPARSE_WORDS, "--train.epochs=5", "--model.drop_path=0.1"]
    assert run("train", *words, "--train.output=whole", cwd=tmp_path).returncode == 0
    killed = subprocess.Popen(
        [*COMMAND, "train", *words, "--train.output=killed"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    finished = tmp_path / "killed" / "checkpoints" / "epoch_0001"
    deadline = time.time() + 300
    while not finished.exists() and killed.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert 1 <= len(Run(tmp_path / "killed").metrics()) < 5
    resumed = run("train", "--resume", "killed", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after epoch " in resumed.stdout
    whole, killed_weights = last_weights(tmp_path / "whole"), last_weights(tmp_path / "killed")
    assert whole.keys() == killed_weights.keys()
    assert all(torch.equal(whole[name], killed_weights[name]) for name in whole)


def test_own_data_takes_the_documented_defaults(photos, tmp_path):
    folder, _, _ = photos
    words = ["--data.name=folder", f"--data.root={folder / 'data'}", "--data.image_size=32", "--data.workers=0"]
    words += ["--model.name=vit_tiny_patch16_224", "--model.options={depth: 1, embed_dim: 48, patch_size: 8}"]
    words += ["--train.epochs=1", "--optim.warmup_epochs=0", "--train.output=run"]
    result = run("train", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    config = Run(tmp_path / "run").read_yaml()
    assert config["model"]["in_chans"] == 3
    assert config["attention"]["name"] == "fibottention"


def test_interrupt_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "train", *TINY_WORDS, "--train.epochs=500", "--train.output=run"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    record = tmp_path / "run" / "metrics.jsonl"
    deadline = time.time() + 300
    while not record.exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped; continue with: fibottention train --resume run" in error
    assert "Traceback" not in error


def test_two_processes_train_like_one(tmp_path):
    # 21 validation images, an odd number
    words = [*TINY_WORDS, *SPARSE_WORDS, "--train.device=cpu", "--data.limit=126"]
    assert run("train", *words, "--train.batch_size=20", "--train.output=one", cwd=tmp_path).returncode == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    result = subprocess.run(
        [*launch, "fibottention.cli", "train", *words, "--train.batch_size=10", "--train.output=two"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    one, two = (Run(tmp_path / name).metrics() for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-4)
    for name in ("one", "two"):
        confusion = torch.tensor(Run(tmp_path / name).read_json("best.json")["confusion"])
        assert confusion.sum() == 21, "every validation image once"


def test_inspect(tmp_path):
    result = run("inspect", "fibottention", "--shuffle=false", "--tokens=196", "--heads=12", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["patch_pairs"] == 9192
    assert content["heads"][11] == {"head": 12, "distances": [30, 49], "patch_pairs": 626}
    with Image.open(tmp_path / "fibottention.png") as image:
        assert image.format == "PNG"
    table = run("inspect", "random_pairs", "--tokens=64", "--heads=2", "--density=0.1", cwd=tmp_path)
    assert "(explicit rows)" in table.stdout


def test_inspect_a_model(tmp_path):
    size = ["--image-size", "224", "160", "--depths", "[1,1,1,1]", "--output", "fields.png"]
    result = run("inspect", "dinat_mini", *size, "--dilations=gradual", "--json", cwd=tmp_path)
    summary = json.loads(result.stdout)
    assert summary["image_size"] == [224, 160]
    assert [level["grid"] for level in summary["levels"]] == [[56, 40], [28, 20], [14, 10], [7, 5]]
    assert summary["levels"][0]["receptive_field"] == [31, 31]  # seven tokens
    with Image.open(tmp_path / "fields.png") as image:
        assert image.format == "PNG"
    table = run("inspect", "nat_mini", *size, cwd=tmp_path)
    assert "7 x 7" in table.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no command is named 'trian'; did you mean 'train'"),
        (["inspect", "fibotention"], "did you mean 'fibottention'"),
        (["inspect", "longformer", "--windw", "3"], "no option 'windw'; did you mean 'window'"),
        (["inspect", "longformer", "--window", "-3"], "window must be at least 0, got -3"),
        (["inspect", "neighborhood", "--tokens", "60"], "--grid (such as 6x10) must be given for 60 tokens"),
        (["inspect", "neighborhood", "--tokens", "61", "--grid", "6x10"], "--grid 6x10 has 60 tokens, but --tokens is"),
        (["inspect", "neighborhood", "--grid", "6"], "--grid must be rows and columns, as 6x10, got 6"),
        (["inspect", "longformer", "--tokens", "0"], "num_tokens must be at least 1, got 0"),
        (["inspect", "longformer", "--tokens", "x"], "--tokens: invalid int value: 'x'"),
        (["inspect", "longformer", "--head-dim", "0"], "--head-dim is out of range: 0"),
        (["inspect", "longformer", "--output", "masks.jpg"], "--output must be a .png file, got masks.jpg"),
        (["inspect", "longformer", "--output", "/proc/masks.png"], "/proc/masks.png cannot be written"),
        (["train", "demo", "--data.nam=folder"], "there is no option --data.nam; did you mean '--data.name'"),
        (["train", "demo", "--train.mixed_precision=fp16", "--train.device=cpu"], "fp16 needs a GPU"),
        (["train", "--data.name=folder", "--data.root=nothing"], "data.root=nothing is not a folder"),
        (["inspect", "longformer", "--output", "no/such/folder.png"], "the folder no/such does not exist"),
        (["inspect"], "required: SPEC"),
        (["inspect", "dinat_mini", "--image-size", "0"], "--image-size must be one or two numbers above 0, got 0"),
        (["inspect", "dinat_mini", "--image_size", "3"], "no option --image_size; did you mean --image-size?"),
        (["inspect", "dinat_mni"], "no spec or model is named 'dinat_mni'; did you mean 'dinat_mini'?"),
        (["inspect", "longformer", "--output", "."], "--output: . is a folder, not a file"),
        (["inspect", "bigbird", "--random_keys", "-1"], "random_keys must be at least 0, got -1"),
        (["inspect", "--window", "-3", "longformer"], "window must be at least 0, got -3"),
        (["report", "nothing", "--output", "/tmp"], "--output: /tmp is a folder, not a file"),
        (["train", "demo", "--augment.label_smoothing=2"], "augment.label_smoothing must be in 0 .. 0.99"),
        (["train", "demo", "--data.workers=-1"], "data.workers must be at least 0"),
        (["evaluate", "nothing"], "nothing does not exist; give the folder of a run"),
        (["predict", "nothing", "a.png"], "nothing does not exist"),
        (["predict", "nothing", "a.png", "--device", "gpu"], "argument --device: invalid choice: 'gpu'"),
        (["report", "nothing"], "nothing does not exist"),
        (["train", "nothing.yaml"], "there is no recipe 'nothing.yaml'"),
        (["train", "--resume", "nothing"], "nothing is not the folder of a run"),
        (["train", "--resume", "nothing", "--train.epochs=3"], "--resume takes the folder of a run and no other"),
        (["train", "demo", "--data.name=folder", "--data.root=nothing"], "data.root=nothing is not a folder"),
        (["train", "demo", "--model.name=vit_tyni_patch16_224"], "no model is named"),
        (["train", "demo", "--model.options.num_heads=5"], "dim should be divisible by num_heads"),
        (["train", "demo", "--optim.lr=fast"], "optim.lr must be a number or null, got fast"),
        (["train", "demo", "--train.device=cuda"], "train.device=cuda is not available"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    if words == ["train", "demo", "--train.device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("fibottention: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_bad_input_of_a_real_process(tmp_path):
    result = run("train", "demo", "--optim.lrr=3", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "fibottention: there is no option --optim.lrr; did you mean '--optim.lr'?\n"
    assert result.stdout == ""


def test_unreadable_images_to_predict_are_named(photos, tmp_path, capsys):
    folder, _, _ = photos
    broken = break_images(photo_folder(tmp_path) / "val")
    for path in (*broken, tmp_path):
        assert main(["predict", str(folder / "run"), str(path)]) == 2
        error = capsys.readouterr().err
        assert str(path) in error
        assert "not a readable image" in error or "a folder, not an image" in error
        assert error.count("\n") == 1


def test_strict_stops_at_a_corrupt_image(photos, tmp_path):
    folder, _, _ = photos
    words = ["train", *TINY_WORDS, "--data.name=folder", f"--data.root={folder / 'data'}", "--data.image_size=32"]
    words += ["--model.in_chans=3", "--model.options.patch_size=4", "--data.limit=null", "--data.strict=true"]
    for workers in (0, 1):
        result = run(*words, f"--data.workers={workers}", cwd=tmp_path)
        assert result.returncode == 2, result.stderr
        assert "cannot read " in result.stderr.splitlines()[-1]
        assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir()), "nothing half-written"
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("damage", ["weights", "other", "config"])
def test_wrong_checkpoints_are_named(photos, tmp_path, damage, monkeypatch, capsys):
    import shutil

    folder, _, _ = photos
    shutil.copytree(folder / "run", tmp_path / "run")
    weights = tmp_path / "run" / "best.safetensors"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:500])
        message = "is not a readable file of weights"
    elif damage == "other":
        other = tmp_path / "run" / "other.pth"
        torch.save({"blocks.0.attn.qkv.weight": torch.zeros(3, 3)}, other)
        assert main(["predict", str(other), str(folder / "data" / "val" / "cat" / "0.jpg")]) == 2
        message = "do not fit VisionTransformer"
    else:
        (tmp_path / "run" / "config.yaml").write_text("task: classification\noptim: {lrr: 3}\n")
        message = "there is no option --optim.lrr"
    if damage != "other":
        assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_help_and_version(capsys):
    for words in ([], ["--help"], ["train", "--help"], ["--version"]):
        assert main(words) == 0
    text = capsys.readouterr().out
    for part in ("usage: fibottention COMMAND", "--optim.lr", "sparse_transformer", "--data.name", "fibottention 0."):
        assert part in text
    for command in ("inspect", "evaluate", "predict", "report"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
