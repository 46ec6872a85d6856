import json
import math

import pytest
import torch
from transformers import VideoMAEForVideoClassification

from fibottention.errors import UserError
from fibottention.specs import Fibottention
from fibottention.tasks.kinds import task_kind, task_names
from fibottention.tasks.options import load_recipe, make_config, shipped_recipes
from fibottention.tasks.runs import load_model, train_run
from fibottention.tasks.video.config import VideoConfig
from fibottention.tasks.video.models import build_model
from fibottention.tasks.video.task import VideoTask
from fibottention.training.engine import make_accelerator
from tests.videos import MOTIONS, make_set

TINY = ("hidden_size=24", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=48")


def tiny(*words, model="timesformer"):
    size = ["--model.options.tubelet_size=[2,16,16]"] if model == "vivit" else ["--model.options.patch_size=16"]
    options = [f"--model.options.{word}" for word in TINY]
    data = ["--data.name=folder", "--data.num_frames=4", "--data.rate=2", "--data.image_size=32", "--data.workers=0"]
    train = ["--train.batch_size=4", "--train.epochs=1", "--optim.warmup_epochs=0", "--train.device=cpu"]
    return make_config({"task": "video"}, [f"--model.name={model}", *size, *options, *data, *train, *words])


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return make_set(tmp_path_factory.mktemp("videos"))


@pytest.mark.parametrize("model", ["timesformer", "videomae", "vivit"])
def test_each_model_trains_and_loads(model, videos, tmp_path):
    config = tiny(f"--data.root={videos}", model=model)
    summary = train_run(config, tmp_path / "run", command="the command")
    assert summary["classes"] == sorted(MOTIONS)
    assert 0 <= summary["mca"] <= 100
    assert summary["attention"]["density"] < 1
    assert summary["whole_model_macs"] > 0
    loaded, again, saved, _ = load_model(tmp_path / "run")
    assert isinstance(again, VideoConfig)
    assert again.to_dict()["data"] == config.to_dict()["data"]
    assert saved["classes"] == sorted(MOTIONS)
    assert not loaded.training
    samples = json.loads((tmp_path / "run/samples.json").read_text())
    assert len(samples) == 4
    assert all((tmp_path / "run" / sample["file"]).is_file() for sample in samples)


def test_resumed_training_is_training(videos, tmp_path):
    config = tiny(f"--data.root={videos}", "--train.epochs=2", "--optim.schedule=constant")
    train_run(config, tmp_path / "whole", command="")
    half = tiny(f"--data.root={videos}", "--train.epochs=1", "--optim.schedule=constant")
    train_run(half, tmp_path / "half", command="")
    text = (tmp_path / "half/config.yaml").read_text().replace("epochs: 1\n", "epochs: 2\n")
    (tmp_path / "half/config.yaml").write_text(text)
    train_run(config, tmp_path / "half")
    weights = [load_model(tmp_path / name)[0].state_dict() for name in ("whole", "half")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
def test_motion_is_learned(tmp_path):
    # Single frames do not tell the class, so only time can.
    root = make_set(tmp_path / "set", per_class=24)
    words = ["--train.epochs=20", "--train.batch_size=16", "--optim.lr=2e-3", "--augment.flip=0", "--optim.clip_grad=1"]
    options = ["--model.options.hidden_size=48", "--model.options.initializer_range=0.15", "--augment.scale=[32,36]"]
    config = tiny(f"--data.root={root}", *words, *options, "--attention.w_max=8", "--model.options.patch_size=8")
    summary = train_run(config, tmp_path / "run", command="")
    assert summary["top1"] >= 60  # chance is 25


def test_metrics_leave_out_absent_classes(videos):
    task = VideoTask(tiny(f"--data.root={videos}"))
    confusion = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 0], [0, 2, 2, 0], [0, 0, 0, 0]])
    metrics, details = task.metrics(confusion)
    assert metrics == {"mca": pytest.approx(100 * (3 / 4 + 2 / 4) / 2)}
    assert details == {"absent": ["down", "still"]}


class Counter(torch.nn.Module):
    """Says the class that the mean of a clip stands for."""

    def forward(self, clips):
        logits = torch.zeros(len(clips), 4)
        logits[:, 0] = clips.mean((1, 2, 3, 4))
        return type("Output", (), {"logits": logits})


def test_scores_are_the_mean_over_clips():
    samples = torch.arange(6.0).view(2, 3, 1, 1, 1, 1).expand(2, 3, 2, 3, 4, 4)
    logits = VideoTask.logits(Counter(), samples)
    assert logits[:, 0].tolist() == [1.0, 4.0]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_every_video_is_evaluated_once(videos, batch_size):
    config = tiny(f"--data.root={videos}", f"--train.batch_size={batch_size}", "--data.views=2", "--data.crops=3")
    task = VideoTask(config, train=False)
    result = task.evaluate(task.model, iter(task.val_loader), make_accelerator(config.train))
    assert result.details["videos"] == 8
    assert [sum(row) for row in result.details["confusion"]] == [2, 2, 2, 2]
    assert result.details["absent"] == []


def test_unreadable_videos_are_not_counted(tmp_path):
    root = make_set(tmp_path)
    for name in ("still/0.mp4", "still/1.mp4"):
        (root / "val" / name).write_bytes(b"")
    config = tiny(f"--data.root={root}")
    task = VideoTask(config, train=False)
    result = task.evaluate(task.model, iter(task.val_loader), make_accelerator(config.train))
    assert result.details["videos"] == 6
    assert result.details["absent"] == ["still"]
    assert math.isfinite(result.metrics["mca"])
    assert [name.split("val/")[1] for name in task.unreadable()] == ["still/0.mp4", "still/1.mp4"]


def test_specs_in_space_and_in_time(videos):
    config = tiny("--temporal_attention.name=longformer", "--temporal_attention.window=1")
    _, report = build_model(config, 4)
    assert [layer.prefix_tokens for layer in report.layers] == [1, 0]
    _, report = build_model(tiny("--attention.name=none"), 4)
    assert report is None
    config = tiny("--model.options.attention_type=joint_space_time", "--attention.w_max=6")
    _, report = build_model(config, 4)
    assert [layer.num_tokens for layer in report.layers] == [4 * 4]
    assert report.spec == Fibottention(w_max=6)


@pytest.mark.parametrize("name", ["timesformer", "videomae", "vivit"])
def test_pretrained_models_load_and_get_a_new_classifier(name, tmp_path, videos):
    source, _ = build_model(tiny("--attention.name=none", model=name), 7)
    source.save_pretrained(tmp_path / "source")
    words = [f"--model.name={name}", f"--model.pretrained={tmp_path}/source", "--data.num_frames=4"]
    words += ["--data.image_size=32", "--data.name=folder", f"--data.root={videos}", "--data.workers=0"]
    words += ["--train.batch_size=4", "--train.epochs=1", "--optim.warmup_epochs=0", "--train.device=cpu"]
    model, report = build_model(make_config({"task": "video"}, words), 4)
    assert type(model) is type(source)
    assert model.classifier.out_features == 4
    own, theirs = model.state_dict(), source.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in theirs if not key.startswith("classifier"))
    assert report.spec == Fibottention()
    train_run(make_config({"task": "video"}, words), tmp_path / "run", command="")
    with pytest.raises(UserError, match=r"source are for 7 classes, the data have 4: with train.epochs=0 the new"):
        build_model(make_config({"task": "video"}, [*words, "--train.epochs=0"]), 4)
    model, _ = build_model(make_config({"task": "video"}, [*words, "--train.epochs=0"]), 7)
    assert torch.equal(model.classifier.weight, source.classifier.weight)
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    again, *_ = load_model(tmp_path / "run")  # without the source
    assert type(again) is type(source)


def test_a_timesformer_may_get_more_frames(tmp_path):
    source, _ = build_model(tiny("--attention.name=none"), 4)
    torch.nn.init.normal_(source.timesformer.embeddings.time_embeddings)
    source.save_pretrained(tmp_path)
    words = [f"--model.pretrained={tmp_path}", "--data.image_size=32", "--attention.name=none"]
    model, _ = build_model(make_config({"task": "video"}, [*words, "--data.num_frames=8"]), 4)
    clips = torch.randn(2, 8, 3, 32, 32)
    source.config.num_frames = 8  # transformers stretches the embeddings in its forward pass
    torch.testing.assert_close(model.eval()(clips).logits, source.eval()(clips).logits)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.num_frames=4"], "data.image_size must be 32 for model.pretrained="),
        (["--data.image_size=32", "--model.name=vivit"], "is a timesformer, but model.name=vivit"),
        (
            ["--data.image_size=32", "--model.options.hidden_size=48"],
            "model.options.hidden_size=48 differs from the 24 of",
        ),
    ],
)
def test_pretrained_models_that_do_not_fit(words, message, tmp_path):
    build_model(tiny("--attention.name=none"), 4)[0].save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        build_model(make_config({"task": "video"}, [f"--model.pretrained={tmp_path}", *words]), 4)


def test_weights_of_a_file_start_a_run(tmp_path):
    source, _ = build_model(tiny("--attention.name=none"), 4)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(UserError, match="are for 4 classes, the model is for 6"):
        build_model(tiny(f"--model.checkpoint={tmp_path}/weights.pth", "--train.epochs=0"), 6)
    model, _ = build_model(tiny(f"--model.checkpoint={tmp_path}/weights.pth"), 6)
    assert torch.equal(model.timesformer.layernorm.weight, source.timesformer.layernorm.weight)
    assert model.classifier.out_features == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.pretrained=nothing"], "is neither a folder here nor a name on the hub"),
        (["--model.pretrained=nobody/nothing"], "model.pretrained=nobody/nothing cannot be loaded"),
        (["--model.options.hiden_size=3"], "timesformer has no option 'hiden_size'; did you mean 'hidden_size'?"),
        (["--model.options.num_frames=3"], "model.options must not hold num_frames, which comes from data.num_frames"),
        (["--model.options.num_attention_heads=0"], "num_attention_heads must be a whole number of at least 1, got 0"),
        (["--model.options.patch_size=[8,8]"], "patch_size must be one number for square patches"),
        (["--model.options.num_attention_heads=5"], "hidden_size=24 must be a multiple of num_attention_heads=5"),
        (["--data.image_size=40"], "data.image_size=40 must be a multiple of the patch size 16"),
        (["--attention.name=neighborhood", "--attention.kernel_size=3"], "attention in timesformer: .*kernel"),
        (["--model.options.attention_type=both"], "model timesformer cannot be made: Unknown attention type"),
    ],
)
def test_models_that_cannot_be(words, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        build_model(tiny(*words), 4)


def test_unknown_models():
    with pytest.raises(UserError, match="model.name must be one of 'timesformer', 'videomae', 'vivit', got timesfomer"):
        tiny("--model.name=timesfomer")


def test_other_models_say_what_they_lack():
    with pytest.raises(UserError, match="temporal_attention is for TimeSformer, which videomae is not"):
        build_model(tiny("--temporal_attention.name=dense", model="videomae"), 4)
    with pytest.raises(UserError, match="videomae has no stochastic depth"):
        build_model(tiny("--model.drop_path=0.1", model="videomae"), 4)
    with pytest.raises(UserError, match="data.num_frames=3 must be a multiple of the tubelet's 2 frames"):
        build_model(tiny("--data.num_frames=3", model="videomae"), 4)
    model, _ = build_model(tiny(model="videomae"), 4)
    assert isinstance(model, VideoMAEForVideoClassification)


def recipes():
    return {path.stem: path for path in shipped_recipes("video").values() if not path.stem.startswith("_")}


@pytest.mark.parametrize("name", recipes())
def test_recipes(name):
    config = make_config(load_recipe(f"video/{name}"))
    assert config.task == "video"
    config.check()
    assert config == make_config(config.to_dict())
    assert "fibottention train" in recipes()[name].read_text()


PUBLISHED = {
    "smarthome_cross_subject_timesformer": (8, 32),
    "smarthome_cross_view_1_timesformer": (8, 32),
    "smarthome_cross_view_2_timesformer": (8, 32),
    "ntu60_cross_subject_timesformer": (8, 32),
    "ntu60_cross_view_timesformer": (8, 32),
    "nucla_timesformer": (16, 4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_settings(name):
    # Facts, section 5: the released code of arXiv 2406.19391.
    config = make_config(load_recipe(f"video/{name}"))
    assert (config.data.num_frames, config.data.rate) == PUBLISHED[name]
    assert (config.data.views, config.data.crops, config.data.image_size) == (1, 3, 224)
    assert config.train_scale == (256, 320)
    optim = config.optim
    assert (optim.name, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", 0.005, 0.9, 1e-4)
    assert (optim.schedule, optim.milestones, optim.decay_rate) == ("multistep", [11, 14], 0.1)
    assert config.train.epochs == 15
    assert config.train.batch_size * config.train.gradient_accumulation == 64
    assert config.model.drop_path == 0.1
    assert config.attention["name"] == "fibottention"
    assert config.attention["w_max"] == 65
    assert config.attention["variant"] == "modified"
    assert config.temporal_attention == {"name": "none"}


def test_kinds():
    assert task_names() == ["classification", "video", "robot", "dense"]
    assert [task_kind(name).sample for name in task_names()] == ["images", "videos", "episodes", "images"]
    with pytest.raises(UserError, match="no task is named 'vido'; did you mean 'video'?"):
        make_config({"task": "vido"})
    with pytest.raises(UserError, match="there is no option --augment.mixup"):
        make_config({"task": "video"}, ["--augment.mixup=0.2"])
