"""Robot learning as a user runs it, in processes of its own, on demonstrations recorded here."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from fibottention.cli import main
from fibottention.tasks.robot.environments import environment_spec, make_environment
from fibottention.tasks.robot.formats import open_demonstrations, write_demonstrations
from fibottention.tasks.robot.record import Recording, record_episode
from fibottention.tasks.video.decode import open_video
from tests.robots import write

COMMAND = [sys.executable, "-m", "fibottention.cli"]
RECIPE = """
task: robot
data: {crop: 84, workers: 0, cache: cache, observation_steps: 2}
model:
  options: {patch_size: 16, embed_dim: 16, depth: 1, num_heads: 2}
  down_dims: [8, 16]
  step_embedding: 8
diffusion: {inference_steps: 4, sampler: ddim, reconstruction_channels: [8, 8]}
attention: {name: fibottention}
rollout: {environment: pusht, episodes: 2, parallel: 2, max_steps: 16}
optim: {warmup_steps: 2}
train: {epochs: 1, batch_size: 16, device: cpu}
"""


def run(*words, cwd):
    return subprocess.run([*COMMAND, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Demonstrations in three formats and a run, made by the commands."""
    folder = tmp_path_factory.mktemp("robot")
    words = ["--episodes", "2", "--format", "zarr", "hdf5", "lerobot", "--processes", "2", "--seed", "196"]
    recorded = run("robot", "record", "pusht", *words, cwd=folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    result = run("train", "recipe.yaml", "--data.path", "pusht.zarr", "--train.output", "run", cwd=folder)
    return folder, recorded, result


def test_record(trained):
    folder, recorded, _ = trained
    assert recorded.returncode == 0, recorded.stderr
    text = " ".join(recorded.stdout.split())
    assert "the expert did the task in 2 of 2 episodes" in text
    assert text.count("reads back as it was recorded") == 3
    assert "played again: the task is done in 2 of 2 episodes" in text
    assert {path.name for path in folder.iterdir()} >= {"pusht.zarr", "pusht.hdf5", "pusht_lerobot"}
    assert not (folder / "pusht_episodes").exists()
    assert open_demonstrations(folder / "pusht.hdf5").seeds == [196, 197]
    again = run("robot", "record", "pusht", "--episodes", "1", cwd=folder)
    assert (again.returncode, again.stderr) == (
        2,
        "fibottention: pusht.zarr exists already; give --output another name\n",
    )


def test_replay(trained):
    folder = trained[0]
    result = run("robot", "replay", "pusht", "pusht_lerobot", "--processes", "1", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "played again: the task is done in 2 of 2 episodes\n"


def test_train(trained):
    folder, _, result = trained
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "1 episodes, " in text
    assert "best mean score 0." in text
    best = json.loads((folder / "run/best.json").read_text())
    assert [rollout["seed"] for rollout in best["rollouts"]] == [100000, 100001]
    assert len(list((folder / "run/samples").iterdir())) == 1


def test_evaluate(trained):
    folder = trained[0]
    words = ["--episodes", "3", "--max-steps", "12", "--baselines", "--videos", "1", "--steps", "2"]
    result = run("evaluate", "run", *words, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert list(content["policies"]) == ["fibottention policy", "random policy", "idle policy"]
    for policy in content["policies"].values():
        assert [episode["seed"] for episode in policy["episodes"]] == [100000, 100001, 100002]
        scores = [episode["score"] for episode in policy["episodes"]]
        assert policy["test_mean_score"] == pytest.approx(np.mean(scores))
        assert policy["steps"] == 12
    assert content["seconds_per_action"] == pytest.approx(content["seconds_per_plan"] / 8)
    assert content["seconds_per_plan"] > 0
    with open_video(folder / content["videos"][0]) as video:
        assert len(video.times) == 13
    shown = run("evaluate", *words[:4], "run", "--attention.name", "longformer", "--videos", "0", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "run in pusht: 3 episodes from seed 100000" in text
    assert "longformer" in text


@pytest.mark.parametrize("demonstrations", ["pusht.zarr", "pusht.hdf5", "pusht_lerobot"])
def test_predict(trained, demonstrations):
    folder = trained[0]
    words = ["--episode", "1", "--step", "5", "--json"]
    result = run("predict", "run", demonstrations, *words, cwd=folder)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    demonstration = open_demonstrations(folder / "pusht.hdf5").read(1, ["actions"])["actions"]
    assert np.allclose(content["recorded"], demonstration[5:13])
    error = np.abs(np.array(content["planned"]) - content["recorded"]).mean()
    assert content["mean_absolute_error"] == pytest.approx(error, rel=1e-5)
    if demonstrations != "pusht.zarr":
        other = json.loads(run("predict", "run", "pusht.zarr", *words, cwd=folder).stdout)
        assert other["planned"] == content["planned"]


def test_report(trained):
    folder = trained[0]
    result = run("report", "run", "--output", "report.html", cwd=folder)
    assert result.returncode == 0, result.stderr
    page = (folder / "report.html").read_text()
    for text in ("mean score", "pusht.zarr", "masks of the heads", "MACs of attention per sample"):
        assert text in page
    assert "Confusion" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["robot", "recrod"], "robot has no command 'recrod'; did you mean 'record'?"),
        (["robot", "record", "pushed"], "no environment is named 'pushed'; did you mean 'pusht'?"),
        (["robot", "record", "pusht", "--episodes", "0"], "--episodes must be at least 1, got 0"),
        (["robot", "record", "pusht", "--format", "npz"], "invalid choice: 'npz'"),
        (["robot", "replay", "pusht", "nothing"], "data.path=nothing does not exist"),
        (["evaluate", "run", "--steps", "1000"], "steps must be in 1 .. 100"),
        (["evaluate", "run", "--episodes", "0"], "rollout.episodes must be at least 1, got 0"),
        (["evaluate", "run", "--attention.name", "fibotention"], "did you mean 'fibottention'"),
        (["predict", "run", "pusht.zarr", "--episode", "2"], "--episode must be in 0 .. 1, got 2"),
        (["predict", "run", "pusht.zarr", "--step", "1000"], "--step must be in 0 .. "),
        (["predict", "run", "nothing.zarr"], "data.path=nothing.zarr does not exist"),
        (["train", "recipe.yaml"], "data.path must name the demonstrations"),
        (["train", "recipe.yaml", "--data.path", "pusht.zarr", "--data.cameras", "[imag]"], "pusht has no 'imag'"),
        (["analyze", "run"], "is a robot run"),
        (["video", "analyze", "run"], "video has no command 'analyze'"),
    ],
)
def test_bad_input_is_one_line(trained, words, message, monkeypatch, capsys):
    monkeypatch.chdir(trained[0])
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("fibottention: ")
    assert message in error


def test_what_was_not_recorded_here_cannot_be_replayed(trained, tmp_path):
    write(tmp_path / "foreign.hdf5", "hdf5")
    with h5py.File(tmp_path / "foreign.hdf5", "a") as file:
        del file["data/demo_0"].attrs["seed"]
    result = run("robot", "replay", "pusht", "foreign.hdf5", cwd=tmp_path)
    assert result.returncode == 2
    assert "does not say what began its episodes" in result.stderr


def test_without_opengl_it_is_one_line(tmp_path):
    """OpenCV's ImportError where the machine has no libGL."""
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    words = [*COMMAND, "robot", "record", "pusht", "--episodes", "1", "--processes", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "pusht cannot draw here (libGL.so.1" in result.stderr


def test_a_recording_goes_on_after_its_first_file(tmp_path):
    recording = Recording(tmp_path / "pusht_episodes", "pusht")
    episode = record_episode(make_environment("pusht"), 196)
    episode.save(recording.path(196))
    write_demonstrations(tmp_path / "pusht.zarr", "zarr", [episode], environment_spec("pusht"))
    words = ["--episodes", "1", "--seed", "196", "--processes", "1", "--format", "zarr", "hdf5"]
    result = run("robot", "record", "pusht", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"pusht.zarr", "pusht.hdf5"}


def test_help(capsys):
    for words in (["robot"], ["train", "robot/pusht_cpu", "--help"]):
        assert main(words) == 0
        assert "usage: fibottention" in capsys.readouterr().out
    assert run("robot", "record", "--help", cwd=".").returncode == 0
