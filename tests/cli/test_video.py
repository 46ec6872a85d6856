"""Action recognition as a user runs it, in processes of its own, on videos made here."""

import json
import os
import subprocess
import sys

import pytest

from fibottention.cli import main
from fibottention.tasks.video.decode import open_video
from tests.videos import MOTIONS, make_set, moving_square, write_clip

COMMAND = [sys.executable, "-m", "fibottention.cli"]
RECIPE = """
task: video
data: {name: list, num_frames: 4, rate: 2, image_size: 32, workers: 1}
model:
  name: timesformer
  options: {patch_size: 8, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 48}
attention: {name: fibottention, w_max: 8}
optim: {warmup_epochs: 0}
train: {epochs: 1, batch_size: 4, device: cpu}
"""


def run(*words, cwd):
    return subprocess.run([*COMMAND, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Lists, two unreadable videos and a run, made by the commands."""
    folder = tmp_path_factory.mktemp("video")
    make_set(folder / "set", per_class=6)
    (folder / "set/train").rename(folder / "videos")
    (folder / "videos/down/0.mp4").write_bytes(b"")
    split = run("video", "split", "videos", "--protocol", "random", "--val-share", "0.4", cwd=folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    words = ["train", "recipe.yaml", "--data.root", "videos", "--train.output", "run"]
    return folder, split, run(*words, cwd=folder)


def test_split_and_train(trained):
    folder, split, result = trained
    assert split.returncode == 0, split.stderr
    assert {path.name for path in (folder / "videos").glob("*.*")} == {
        "train.csv",
        "val.csv",
        "test.csv",
        "classes.txt",
    }
    counts = {name: len((folder / f"videos/{name}.csv").read_text().splitlines()) for name in ("train", "val", "test")}
    assert counts == {"train": 12, "val": 8, "test": 4}
    assert result.returncode == 0, result.stderr
    assert "best top-1" in result.stdout
    assert "videos/s" in result.stdout.replace("\n", " ")
    best = json.loads((folder / "run/best.json").read_text())
    assert best["classes"] == sorted(MOTIONS)


def test_two_processes_see_each_video_once(trained):
    folder, *_ = trained
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    words = ["train", "recipe.yaml", "--data.root", "videos", "--train.batch_size=3", "--train.output", "two"]
    result = subprocess.run(
        [*launch, "fibottention.cli", *words],
        cwd=folder, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 x cpu" in result.stdout
    one, two = (json.loads((folder / name / "best.json").read_text()) for name in ("run", "two"))
    assert two["videos"] == one["videos"] == 8


def test_unreadable_videos_are_named(trained):
    folder, _, result = trained
    lists = {name: (folder / f"videos/{name}.csv").read_text() for name in ("train", "val", "test")}
    where = next(name for name, text in lists.items() if "down/0.mp4" in text)
    if where == "test":
        result = run("evaluate", "run", "--split", "test.csv", cwd=folder)
        assert "could not be read: videos/down/0.mp4" in result.stdout
    else:
        assert "1 videos could not be read" in result.stdout.replace("\n", " ")
        assert (folder / "run/unreadable.txt").read_text() == "videos/down/0.mp4\n"


def test_evaluate_with_views_and_another_attention(trained):
    folder, _, _ = trained
    words = ["evaluate", "run", "--split", "test.csv", "--data.views", "2", "--data.crops=3", "--json"]
    result = run(*words, cwd=folder)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["videos"] in (3, 4)
    assert 0 <= content["mca"] <= 100
    assert sum(map(sum, content["confusion"])) == content["videos"]
    result = run("evaluate", "run", "--attention.name", "dense", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "dense attention on" in result.stdout
    assert "mean class accuracy" in result.stdout


def test_predict_on_a_telephones_file(trained):
    folder, _, _ = trained
    clip = moving_square("across", 5, 9, (32, 56))
    times = [0, 0.1, 0.15, 0.4, 0.5, 0.9, 1.0, 1.01, 1.5]
    write_clip(folder / "my phone.mp4", clip, times=times, rotation=90, audio=True)
    result = run("predict", "run", "my phone.mp4", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    (prediction,) = json.loads(result.stdout)
    assert prediction["video"] == "my phone.mp4"
    assert sum(entry["probability"] for entry in prediction["predictions"]) == pytest.approx(1)
    result = run("predict", "run", "my phone.mp4", "videos/down/0.mp4", cwd=folder)
    assert result.returncode == 2
    assert result.stderr == "fibottention: cannot read videos/down/0.mp4: an empty file\n"
    assert "my phone.mp4" in result.stdout  # what can be read is told all the same


def test_analyze_and_report(trained):
    folder, _, _ = trained
    result = run("analyze", "run", "--videos", "videos/still/1.mp4", "--layer", "1", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert (folder / "run/analysis/clip_1.png").is_file()
    with open_video(folder / "run/analysis/clip_1.mp4") as video:
        assert video.frames([0, 3]).shape == (2, 3, 64, 128)
    result = run("report", "run", cwd=folder)
    assert result.returncode == 0, result.stderr
    page = (folder / "run/report.html").read_text()
    assert "mean class accuracy" in page
    assert "Where each head looks" in page


def test_crop(trained):
    folder, _, _ = trained
    lines = [f"{motion}/{number}.mp4,4,4,40,40" for motion in MOTIONS for number in range(5)]
    (folder / "boxes.csv").write_text("path,x1,y1,x2,y2\n" + "\n".join(lines))
    words = ["video", "crop", "videos", "--boxes", "boxes.csv", "--output", "crops", "--size", "24", "--workers", "2"]
    result = run(*words, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "19 videos cropped into crops, 0 were there already" in result.stdout
    assert "5 were left out" in result.stdout
    left_out = (folder / "crops/left_out.txt").read_text()
    assert "down/0.mp4: an empty file" in left_out
    assert "still/5.mp4: there is no box for it" in left_out
    before = (folder / "crops/still/0.mp4").stat().st_mtime_ns
    result = run(*words, cwd=folder)
    assert "0 videos cropped into crops, 19 were there already" in result.stdout
    assert (folder / "crops/still/0.mp4").stat().st_mtime_ns == before
    with open_video(folder / "crops/still/0.mp4") as video:
        assert len(video.times) == 12
        assert video.frames([0]).shape == (1, 3, 24, 24)


def test_cost(capsys):
    words = ["video", "cost", "dense", "fibottention", "--frames", "2", "4", "--patches", "49", "--heads", "4"]
    assert main([*words, "--head-dim", "8", "--measure", "--json"]) == 0
    costs = {(c["frames"], c["kind"], c["spec"]): c for c in json.loads(capsys.readouterr().out)}
    assert len(costs) == 8
    joint, divided = costs[4, "joint", "dense"], costs[4, "divided", "dense"]
    assert joint["pairs"] == 4 * (4 * 49 + 1) ** 2
    assert divided["pairs"] == 4 * (4 * 50**2 + 49 * 4**2)
    assert joint["macs"] == 2 * 8 * joint["pairs"]
    assert costs[4, "joint", "fibottention"]["pairs"] < joint["pairs"] / 4
    assert all(c["both_ms"] > 0 for c in costs.values())
    assert main(words) == 0
    assert "joint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["video", "spilt"], "video has no command 'spilt'; did you mean 'split'?"),
        (["video", "split", "nowhere", "--protocol", "random"], "nowhere is not a folder"),
        (["video", "split", "set", "--protocol", "cross-view"], "--dataset must be given for --protocol cross-view"),
        (["video", "split", "set", "--protocol", "cross-view", "--dataset", "nucla"], "none of the 12 videos is named"),
        (["video", "split", "empty", "--protocol", "random"], "empty needs one folder of videos per action"),
        (["video", "split", "set/val", "--protocol", "random", "--test-share", "1"], "--test-share must be at least 0"),
        (["video", "crop", "set", "--output", "o"], "give --boxes FILE, or --weights FILE of a detector"),
        (["video", "crop", "set", "--output", "set", "--boxes", "x"], "--output must be another folder"),
        (["video", "crop", "set", "--output", "o", "--boxes", "x"], "--boxes: x cannot be read"),
        (["video", "cost", "dense", "--frames", "0"], "--frames must be at least 1"),
        (["train", "recipe.yaml", "--data.root", "empty"], "there is no list train.csv in data.root=empty"),
        (["train", "recipe.yaml", "--data.clip", "3"], "there is no option --data.clip"),
        (["train", "recipe.yaml", "--augment.mixup", "3"], "there is no option --augment.mixup"),
        (["train", "--task", "vido"], "no task is named 'vido'; did you mean 'video'?"),
        (["train", "recipe.yaml", "--task", "video"], "--task is for training without a recipe"),
        (["train", "--task", "video", "--data.root", "empty"], "there is no list train.csv in data.root=empty"),
        (["train", "--data.root", "videos"], "data.root=videos has no meaning for the embedded images"),
        (["train", "--model.name", "vivit"], "model.name=vivit is for videos"),
        (["evaluate", "run", "--temporal_attention.name", "lonformer"], "did you mean 'longformer'?"),
        (["train", "video/nucla"], "no shipped recipe; did you mean 'video/nucla_timesformer'?"),
        (["analyze", "run", "--layer", "9"], "--layer must be in 1 .. 2, got 9"),
        (["analyze", "run", "--videos", "recipe.yaml"], "cannot read recipe.yaml: not a video"),
        (["predict", "run", "set"], "cannot read set: a folder, not a video"),
        (["evaluate", "run", "--data.views", "0"], "data.views must be at least 1, got 0"),
        (["evaluate", "run", "--data.num_frames", "8"], "--data.num_frames cannot be changed: the model is made for 4"),
        (["evaluate", "run", "--data.vews", "2"], "there is no option --data.vews; did you mean '--data.views'?"),
    ],
)
def test_bad_input_is_one_sentence(trained, words, message, monkeypatch, capsys):
    folder, _, _ = trained
    (folder / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("fibottention: ")
    assert error.count("\n") == 1
    assert message in error


def test_help_shows_the_options_of_the_recipes_task(trained, monkeypatch, capsys):
    folder, _, _ = trained
    monkeypatch.chdir(folder)
    assert main(["train", "recipe.yaml", "--help"]) == 0
    assert "--data.num_frames" in capsys.readouterr().out
    assert main(["video", "--help"]) == 0
    assert "split" in capsys.readouterr().out
