import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from fibottention.errors import UserError
from fibottention.tasks.options import load_recipe, make_config, shipped_recipes
from fibottention.tasks.robot.data import RobotData
from fibottention.tasks.robot.environments import environment_spec, make_environment
from fibottention.tasks.robot.formats import write_demonstrations
from fibottention.tasks.robot.network import build_policy
from fibottention.tasks.robot.policy import Policy
from fibottention.tasks.robot.record import record_episode
from fibottention.tasks.robot.task import RobotTask
from fibottention.tasks.runs import load_model, train_run
from fibottention.training.engine import Trainer, make_accelerator
from fibottention.training.run import Run
from tests.robots import PUSHT, make_episodes, tiny_config, write


def small(tmp_path, *words, **changes):
    if not (tmp_path / "demos.zarr").exists():
        write(tmp_path / "demos.zarr", "zarr", lengths=(20, 12, 25))
    options = {
        "data.path": tmp_path / "demos.zarr",
        "data.cache": tmp_path / "cache",
        "train.batch_size": 8,
        "train.epochs": 2,
        "optim.warmup_steps": 2,
        "rollout.episodes": 2,
        "rollout.parallel": 0,
        "rollout.max_steps": 8,
        "rollout.every": 1,
        "diffusion.inference_steps": 2,
        **changes,
    }
    return tiny_config(*(f"--{name}={value}" for name, value in options.items()), *words)


def test_training_keeps_what_a_run_needs(tmp_path):
    config = small(tmp_path)
    summary = train_run(config, tmp_path / "run", command="")
    run = Run(tmp_path / "run")
    best = run.read_json("best.json")
    assert summary["train_episodes"] == 2
    assert 0 <= best["test_mean_score"] <= 1
    assert [r["seed"] for r in best["rollouts"]] == [100000, 100001]
    assert best["test_mean_score"] == pytest.approx(np.mean([r["score"] for r in best["rollouts"]]))
    assert best["episodes"] == 2
    assert [set(r) >= {"val_loss", "test_mean_score", "success"} for r in run.metrics()] == [True] * 2
    assert summary["attention"]["spec"]["name"] == "fibottention"
    # The statistics of the training episodes are with the weights.
    model = load_model(tmp_path / "run")[0]
    data = RobotData(config)
    rows = np.concatenate([np.arange(*data.store.starts[[e, e + 1]]) for e in data.train_episodes])
    actions = torch.from_numpy(data.store.arrays["action"][rows])
    scaled = model.normalizer.normalize("action", actions)
    assert (scaled.amin(0), scaled.amax(0)) == (pytest.approx([-1, -1]), pytest.approx([1, 1]))
    policy = Policy.from_run(tmp_path / "run", steps=2)
    assert policy.act({n: data.store.arrays[n][0] for n in ("image", "agent_pos")}).shape == (2,)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    config = small(tmp_path)
    train_run(copy.deepcopy(config), tmp_path / "whole", command="")
    steps, loss = 0, RobotTask.loss

    def stop(self, model, batch):
        nonlocal steps
        steps += 1
        if steps > len(self.train_loader) + 1:
            raise KeyboardInterrupt
        return loss(self, model, batch)

    monkeypatch.setattr(RobotTask, "loss", stop)
    with pytest.raises(KeyboardInterrupt):
        train_run(copy.deepcopy(config), tmp_path / "stopped", command="")
    monkeypatch.undo()
    assert len(Run(tmp_path / "stopped").metrics()) == 1
    train_run(copy.deepcopy(config), tmp_path / "stopped")
    for one, other in zip(Run(tmp_path / "whole").metrics(), Run(tmp_path / "stopped").metrics(), strict=True):
        for name in ("train_loss", "val_loss", "test_mean_score", "lr"):
            assert one[name] == other[name]
    weights = Run(tmp_path / "stopped").weights()
    assert all(torch.equal(value, weights[name]) for name, value in Run(tmp_path / "whole").weights().items())


def test_rollouts_are_every_few_epochs_and_at_the_end(tmp_path):
    changes = {"train.epochs": 5, "rollout.every": 2, "rollout.episodes": 1}
    train_run(small(tmp_path, **changes), tmp_path / "run", command="")
    records = Run(tmp_path / "run").metrics()
    assert [r["epoch"] for r in records if "test_mean_score" in r] == [2, 4, 5]
    best = Run(tmp_path / "run").read_json("best.json")
    assert best["epoch"] in (2, 4, 5)
    # Another seed has other training episodes, and other statistics of them.
    words = [f"--model.checkpoint={tmp_path}/run/best.safetensors", "--train.seed=1"]
    summary = train_run(small(tmp_path, *words, **{**changes, "train.epochs": 0}), tmp_path / "again", command="")
    assert summary["test_mean_score"] == best["test_mean_score"]
    weights = Run(tmp_path / "run").weights()
    assert all(torch.equal(value, weights[name]) for name, value in Run(tmp_path / "again").weights().items())
    save_file({name: value * torch.nan for name, value in weights.items()}, tmp_path / "broken.safetensors")
    words = [
        f"--model.checkpoint={tmp_path}/broken.safetensors",
        "--rollout.environment=null",
        "--data.cameras=[image]",
    ]
    words += ["--data.states=[agent_pos]", "--data.columns={image: img, agent_pos: 'state[:2]'}"]
    with pytest.raises(UserError, match="the validation gives no number"):
        train_run(small(tmp_path, *words, **{**changes, "train.epochs": 0}), tmp_path / "broken", command="")
    assert not (tmp_path / "broken").exists()


def test_two_processes_play_each_episode_once(tmp_path):
    config = small(tmp_path, **{"train.epochs": 1, "optim.warmup_steps": 1, "rollout.episodes": 3})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config.to_dict()))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    result = subprocess.run(
        [*launch, "fibottention.cli", "train", "recipe.yaml", "--train.output=two", "--train.batch_size=4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 x cpu" in result.stdout
    best = Run(tmp_path / "two").read_json("best.json")
    assert [rollout["seed"] for rollout in best["rollouts"]] == [100000, 100001, 100002]


def test_weights_are_there_before_the_first_rollouts(tmp_path, monkeypatch):
    def stop(self, epoch):
        if epoch == 2:
            raise KeyboardInterrupt
        return set_epoch(self, epoch)

    set_epoch = RobotTask.set_epoch
    monkeypatch.setattr(RobotTask, "set_epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        train_run(small(tmp_path, **{"train.epochs": 9, "rollout.every": 9}), tmp_path / "run", command="")
    assert load_model(tmp_path / "run")[2]["epoch"] == 2


def test_without_an_environment_the_validation_loss_chooses(tmp_path):
    words = [
        "--data.cameras=[image]",
        "--data.states=[agent_pos]",
        '--data.columns={image: img, agent_pos: "state[:2]"}',
    ]
    summary = train_run(small(tmp_path, *words, **{"rollout.environment": "null"}), tmp_path / "run", command="")
    losses = [record["val_loss"] for record in Run(tmp_path / "run").metrics()]
    assert summary["best_epoch"] == 1 + int(np.argmin(losses))
    assert "test_mean_score" not in summary


def test_the_moving_average_is_as_diffusion_policys(tmp_path):
    """EMA of power 0.75: after n updates the decay is 1 - (1 + n - 1)^-0.75."""
    config = small(tmp_path)
    task = RobotTask(config)
    trainer = Trainer(task, Run(tmp_path / "run"), config.optim, config.train, make_accelerator(config.train))
    assert trainer.ema is not None
    for step in (2, 10, 1000):
        assert trainer.ema.get_decay(step) == pytest.approx(1 - step**-0.75)
    assert trainer.ema.get_decay(10**9) == 0.9999
    assert trainer.ema.get_decay(0) == trainer.ema.get_decay(1) == 0


@pytest.mark.slow
def test_one_episode_is_learned_by_heart(tmp_path):
    """Open-loop prediction of one of the expert's episodes: 13 % of the actions' range off at most, on average.

    Their mean would be 25 % off.
    """
    torch.use_deterministic_algorithms(False)  # filling memory would take longer than training
    episode = record_episode(make_environment("pusht"), 196)
    write_demonstrations(tmp_path / "demos.zarr", "zarr", [episode, episode], environment_spec("pusht"))
    words = [
        "--data.crop=null",
        "--model.options={patch_size: 32, embed_dim: 16, depth: 1, num_heads: 2}",
        "--model.down_dims=[32, 64]",
        "--model.step_embedding=16",
        "--diffusion.reconstruction_weight=0",
        "--diffusion.samples_per_window=8",
    ]
    config = small(tmp_path, *words)
    data = RobotData(config)
    torch.manual_seed(0)
    network = build_policy(config, data.shapes)[0]
    data.fit(network.normalizer)
    optimizer = torch.optim.AdamW(network.parameters(), betas=(0.95, 0.999), weight_decay=1e-6)
    windows = data.train_dataset
    batch = torch.utils.data.default_collate([windows[i] for i in range(len(windows))])
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1, (step + 1) / 20) * (1 - step / 300)
        loss = network(batch)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy = Policy(network, sampler="ddim", steps=20)
    arrays, start = data.store.arrays, data.store.starts[data.train_episodes[0]]
    errors = []
    for step in range(start, start + len(episode) - 8, 8):
        seen = {name: arrays[name][[step]][None] for name in ("image", "agent_pos")}
        planned = policy.plan(seen, [torch.Generator().manual_seed(0)])[0]
        errors.append(np.abs(planned - arrays["action"][step : step + 8]))
    assert np.mean(errors) < 0.13 * np.ptp(arrays["action"][start : start + len(episode)], axis=0).mean()


@pytest.mark.parametrize(
    ("recipe", "crop", "grid", "steps", "action"),
    [("pusht", 84, 10, 300, 2), ("can_ph", 76, 9, 400, 10), ("lift_ph", 76, 9, 400, 10)],
)
def test_the_recipes_have_the_published_settings(recipe, crop, grid, steps, action):
    """Facts, section 5: training settings of the robot experiments."""
    config = make_config(load_recipe(f"robot/{recipe}_fibottention"))
    data, optim, rollout, diffusion = config.data, config.optim, config.rollout, config.diffusion
    assert (data.horizon, data.observation_steps, data.action_steps, data.crop) == (16, 2, 8, crop)
    assert (config.model.name, config.model.options) == ("vit_base_patch16_224", {"patch_size": 8})
    assert (config.model.down_dims, config.model.kernel_size) == ([512, 1024, 2048], 5)
    assert (diffusion.train_steps, diffusion.inference_steps, diffusion.sampler) == (100, 100, "ddpm")
    assert diffusion.reconstruction_weight == 0.1
    assert (optim.name, optim.lr, optim.betas, optim.weight_decay) == ("adamw", 1e-4, (0.95, 0.999), 1e-6)
    assert (optim.schedule, optim.warmup_steps, optim.ema_power, optim.ema_decay) == ("cosine", 500, 0.75, 0.9999)
    assert config.train.batch_size == 64
    assert (rollout.every, rollout.episodes, rollout.first_seed, rollout.max_steps) == (50, 50, 100000, steps)
    assert config.attention["w_min"] == config.attention["w_max"] == grid**2
    config.check()


def test_the_full_policy_is_that_of_the_paper():
    """A ViT-B of 768 numbers per camera on 10 x 10 patches; built without memory."""
    config = make_config(load_recipe("robot/pusht_fibottention"))
    with torch.device("meta"):
        policy, report = build_policy(config, PUSHT)
    encoder = policy.encoders["image"]
    assert (encoder.embed_dim, len(encoder.blocks), encoder.blocks[0].attn.num_heads) == (768, 12, 12)
    assert encoder.patch_embed.grid_size == (10, 10)
    assert report is not None
    assert report.layers[0].num_tokens == 100
    assert policy.unet.down[0][0].film[1].in_features == 128 + 2 * (768 + 2)


def test_every_shipped_recipe_is_valid():
    for name in shipped_recipes("robot"):
        if not name.startswith("_"):
            make_config(load_recipe(f"robot/{name}")).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.path": "null"}, "data.path must name the demonstrations"),
        ({"data.path": "nowhere"}, "data.path=nowhere does not exist"),
        ({"data.cameras": "[imag]"}, "data.cameras: pusht has no 'imag'; did you mean 'image'"),
        ({"data.states": "[position]"}, "data.states: pusht has no 'position'"),
        ({"data.cameras": "[]"}, "must name at least one camera"),
        ({"data.columns": "{imag: img}"}, "data.columns: nothing is named 'imag'; did you mean 'image'"),
        ({"data.columns": "{image: imgs}"}, "has no column 'imgs'; did you mean 'img'"),
        ({"data.columns": "{agent_pos: state}"}, "agent_pos has 5 numbers, and pusht gives 2"),
        ({"data.columns": "{action: state}"}, "the actions have 5 numbers, and pusht takes 2"),
        ({"data.rotation": 0}, "data.rotation=0 and the two numbers after it must be in 0 .. 1"),
        ({"data.horizon": 15}, "data.horizon=15 must be a multiple of 2"),
        ({"data.action_steps": 17}, "do not fit into data.horizon=16"),
        ({"model.down_dims": "[8, 12]"}, "model.down_dims must be multiples of model.groups=8"),
        ({"model.pretrained": "true"}, "model.position=sincos is for encoders that are not pretrained"),
        ({"model.step_embedding": 7}, "model.step_embedding must be even"),
        ({"diffusion.reconstruction_channels": "[]"}, "diffusion.reconstruction_channels must be at least one"),
        ({"data.cameras": "[image, image]"}, "data.cameras: 'image' is not a name of its own"),
        ({"rollout.environment": "null", "data.cameras": "[a.b]"}, "data.cameras: 'a.b' is not a name of its own"),
        ({"model.kernel_size": 4}, "model.kernel_size must be odd"),
        ({"diffusion.inference_steps": 200}, "diffusion.inference_steps must be at most"),
        ({"rollout.environment": "pushed"}, "no environment is named 'pushed'"),
        ({"rollout.environment": "null"}, "data.cameras must name what the policy sees"),
        ({"data.limit": 2, "data.val_share": 2}, "data.val_share must be in 0 .. 0.9"),
        ({"model.checkpoint": "nothing.safetensors"}, "nothing.safetensors is not a file of weights"),
    ],
)
def test_bad_options(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        RobotTask(small(tmp_path, **changes))


def test_weights_of_another_policy_come_without_their_statistics(tmp_path):
    config = small(tmp_path, **{"train.epochs": 1, "optim.warmup_steps": 1})
    train_run(copy.deepcopy(config), tmp_path / "run", command="")
    weights = Run(tmp_path / "run").weights()
    save_file(
        {n: v + 1 if n.startswith("normalizer") else v for n, v in weights.items()}, tmp_path / "other.safetensors"
    )
    config.model.checkpoint = str(tmp_path / "other.safetensors")
    model = RobotTask(config).model.state_dict()
    assert all(torch.equal(model[name], value) for name, value in weights.items())


def test_relative_actions_are_not_taken_for_poses(tmp_path):
    """As in robomimic's image.hdf5, whose actions are in -1 .. 1, relative to the hand."""
    spec = environment_spec("lift")
    episodes = make_episodes(spec, (5, 6))
    for episode in episodes:
        episode.observations["robot0_eef_pos"][:] = [-0.1, 0.0, 1.0]
        episode.actions[:, :3] = [0.1, -0.2, 0.0]
    write_demonstrations(tmp_path / "lift.hdf5", "hdf5", episodes, spec)
    config = tiny_config(
        f"--data.path={tmp_path / 'lift.hdf5'}", f"--data.cache={tmp_path}", recipe="robot/lift_ph_cpu"
    )
    with pytest.raises(UserError, match="lift takes absolute poses, and these are relative"):
        RobotData(config)


def test_quaternions_are_left_as_they_are(tmp_path):
    spec = environment_spec("lift")
    episodes = make_episodes(spec, (5, 6))
    for episode in episodes:
        episode.actions[:, :3] = episode.observations["robot0_eef_pos"]
    write_demonstrations(tmp_path / "lift.hdf5", "hdf5", episodes, spec)
    config = tiny_config(
        f"--data.path={tmp_path / 'lift.hdf5'}", f"--data.cache={tmp_path}", recipe="robot/lift_ph_cpu"
    )
    data = RobotData(config)
    network = build_policy(config, data.shapes)[0]
    data.fit(network.normalizer)
    assert data.shapes.rotation == 3
    assert network.normalizer.robot0_eef_quat_scale.tolist() == [1] * 4
    assert network.normalizer.action_scale[3:9].tolist() == [1] * 6
    assert network.normalizer.robot0_eef_pos_scale.tolist() != [1] * 3


def test_weights_without_statistics_are_refused(tmp_path):
    train_run(small(tmp_path, **{"train.epochs": 1, "optim.warmup_steps": 1}), tmp_path / "run", command="")
    weights = Run(tmp_path / "run").weights()
    save_file({n: v for n, v in weights.items() if not n.startswith("normalizer")}, tmp_path / "run/best.safetensors")
    with pytest.raises(UserError, match=r"6 missing \(normalizer"):
        load_model(tmp_path / "run")
