"""The training loop, on a tiny model and real images."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch

from fibottention.analysis.report import write_report
from fibottention.errors import UserError
from fibottention.ops.twist import Twist
from fibottention.tasks.classification import task as task_module
from fibottention.tasks.classification.config import ClassificationConfig
from fibottention.tasks.classification.task import ClassificationTask, build_model
from fibottention.tasks.runs import train_run
from fibottention.training.engine import Trainer, make_accelerator
from fibottention.training.run import Run, load_weights
from tests.tiny import sparse_config, tiny_config


def last_weights(folder) -> dict[str, torch.Tensor]:
    return load_weights(Run(folder).checkpoint() / "model.safetensors")


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def trainer_of(config: ClassificationConfig, folder) -> Trainer:
    run = Run(folder)
    run.create({"task": "classification", **config.to_dict()})
    return Trainer(ClassificationTask(config), run, config.optim, config.train, make_accelerator(config.train))


def test_learns_and_keeps_a_whole_run(tmp_path):
    config = tiny_config(epochs=3)
    config.data.limit = 600
    summary = train_run(config, tmp_path / "run", command="the command")
    run = Run(tmp_path / "run")
    records = run.metrics()
    assert [r["epoch"] for r in records] == [1, 2, 3]
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    assert summary["top1"] > 20  # chance is 10
    best = run.read_json("best.json")
    assert best["top1"] == max(r["top1"] for r in records) == summary["top1"]
    confusion = torch.tensor(best["confusion"])
    assert confusion.sum() == best["images"] == 100
    assert 100 * confusion.trace().item() / 100 == pytest.approx(best["top1"])
    assert run.read_yaml()["command"] == "the command"
    assert len(run.read_json("samples.json")) == 6
    assert list((run.folder / "tensorboard").iterdir())
    curve = records[0]["loss_curve"]
    assert sum(curve) / len(curve) == pytest.approx(records[0]["train_loss"])
    assert summary["attention"]["macs"] < summary["attention"]["dense_macs"]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    config = tiny_config()
    train_run(config, tmp_path / "a", command="")
    torch.manual_seed(12345)  # whatever ran before
    train_run(tiny_config(), tmp_path / "b", command="")
    other = tiny_config()
    other.train.seed = 1
    train_run(other, tmp_path / "c", command="")
    assert equal(last_weights(tmp_path / "a"), last_weights(tmp_path / "b"))
    assert not equal(last_weights(tmp_path / "a"), last_weights(tmp_path / "c"))


def test_the_sparse_configuration_is_computed_sparsely():
    from fibottention import explain_backend

    attention = ClassificationTask(sparse_config()).model.blocks[0].attn
    q = torch.zeros(1, attention.num_heads, 197, attention.head_dim)
    assert explain_backend(q, attention.sparse.pattern(197)).backend == "cpu"


@pytest.mark.parametrize("make_config", [tiny_config, sparse_config])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, monkeypatch, make_config):
    config = make_config(epochs=3, drop_path=0.2)
    config.optim.ema_decay = 0.9
    config.augment.mixup = 0.4
    config.augment.random_erasing = 0.3
    train_run(copy.deepcopy(config), tmp_path / "whole", command="")

    steps = 0
    loss = ClassificationTask.loss

    def stop_in_epoch_2(self, model, batch):
        nonlocal steps
        steps += 1
        if steps == 9:
            raise KeyboardInterrupt
        return loss(self, model, batch)

    monkeypatch.setattr(ClassificationTask, "loss", stop_in_epoch_2)
    with pytest.raises(KeyboardInterrupt):
        train_run(copy.deepcopy(config), tmp_path / "stopped", command="")
    monkeypatch.undo()
    assert [r["epoch"] for r in Run(tmp_path / "stopped").metrics()] == [1]
    train_run(copy.deepcopy(config), tmp_path / "stopped")
    assert equal(last_weights(tmp_path / "whole"), last_weights(tmp_path / "stopped"))
    assert equal(Run(tmp_path / "whole").weights(), Run(tmp_path / "stopped").weights())
    drop = {"train_seconds", "samples_per_second", "step_milliseconds"}
    whole, stopped = (Run(tmp_path / name).metrics() for name in ("whole", "stopped"))
    assert [{k: v for k, v in r.items() if k not in drop} for r in whole] == [
        {k: v for k, v in r.items() if k not in drop} for r in stopped
    ]


def test_gradient_accumulation_equals_a_larger_batch(tmp_path):
    large, small = tiny_config(epochs=1), tiny_config(epochs=1)
    small.train.batch_size //= 2
    small.train.gradient_accumulation = 2
    for name, config in (("large", large), ("small", small)):
        train_run(config, tmp_path / name, command="")
    for a, b in zip(last_weights(tmp_path / "large").values(), last_weights(tmp_path / "small").values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_learning_rate_warms_up_and_falls_to_its_minimum(tmp_path):
    config = tiny_config(epochs=4)
    config.optim.warmup_epochs = 1.5
    config.optim.min_lr = 1e-5
    trainer = trainer_of(config, tmp_path / "run")
    updates = 4 * trainer.updates_per_epoch
    rates = []
    for update in range(updates + 1):
        trainer.scheduler.step_update(update)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    warm = int(1.5 * trainer.updates_per_epoch)
    assert rates[0] == pytest.approx(1e-6)
    assert rates[warm] == pytest.approx(config.optim.lr, rel=0.05)
    assert max(rates) == pytest.approx(config.optim.lr, rel=0.05)
    assert rates[-1] == pytest.approx(1e-5, rel=0.01)
    assert all(a > b for a, b in zip(rates[warm:], rates[warm + 1 :], strict=False))


@pytest.mark.parametrize("schedule", ["cosine", "poly"])
def test_the_rate_stays_at_its_minimum_in_the_cool_down(tmp_path, schedule):
    config = tiny_config(epochs=6)
    config.optim.schedule, config.optim.decay_rate = schedule, 1.0
    config.optim.warmup_epochs, config.optim.cooldown_epochs, config.optim.min_lr = 1, 2, 1e-5
    trainer = trainer_of(config, tmp_path / "run")
    rates = []
    for update in range(6 * trainer.updates_per_epoch):
        trainer.scheduler.step_update(update)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    last = 4 * trainer.updates_per_epoch
    assert rates[last:] == pytest.approx([1e-5] * len(rates[last:]))
    assert rates[last - 2] > 1.5e-5
    if schedule == "poly":  # of power 1: linear from the end of the warm-up on
        falling = rates[trainer.updates_per_epoch : last]
        assert [b - a for a, b in itertools.pairwise(falling)] == pytest.approx(
            [(1e-5 - config.optim.lr) / len(falling)] * (len(falling) - 1), rel=1e-3
        )


def test_steps_of_the_rate_count_from_the_start(tmp_path):
    config = tiny_config(epochs=6)
    config.optim.schedule, config.optim.milestones, config.optim.warmup_epochs = "multistep", [3, 5], 1
    trainer = trainer_of(config, tmp_path / "run")
    rates = []
    for epoch in range(6):
        trainer.scheduler.step_update(epoch * trainer.updates_per_epoch + 1)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[1:] == pytest.approx([2e-3, 2e-3, 2e-4, 2e-4, 2e-5])


def test_default_learning_rate_scales_with_the_batch(tmp_path):
    config = tiny_config()
    config.optim.lr = None
    config.optim.base_lr = 1e-3
    config.train.gradient_accumulation = 4
    assert trainer_of(config, tmp_path / "run").lr == pytest.approx(1e-3 * 4 * config.train.batch_size / 256)


def test_layer_decay_lowers_the_rates_of_early_layers(tmp_path):
    config = tiny_config()
    config.optim.layer_decay = 0.5
    trainer = trainer_of(config, tmp_path / "run")
    trainer.scheduler.step_update(trainer.updates_per_epoch)
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert len(rates) == 4  # patch embedding, two blocks, head


def sata_config():
    config = sparse_config(epochs=2)
    config.attention = {"name": "sata", "threshold": 1.0, "over": {"name": "fibottention"}}
    config.optim.transform_lr = 0.05
    config.optim.weight_decay = 0.5
    return config


def test_the_scales_of_sata_have_a_rate_of_their_own_and_no_decay(tmp_path):
    trainer = trainer_of(sata_config(), tmp_path / "run")
    scales = [m.scale for m in trainer.task.model.modules() if isinstance(m, Twist)]
    assert len(scales) > 1
    groups = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    trainer.scheduler.step_update(trainer.updates_per_epoch // 2)
    of_scales = groups[id(scales[0])]
    assert all(groups[id(scale)] is of_scales for scale in scales)
    assert len(of_scales["params"]) == len(scales)
    assert of_scales["weight_decay"] == 0
    others = [group["lr"] for group in trainer.optimizer.param_groups if group is not of_scales]
    # The schedule scales both alike (the minimum, 1e-6, is too small to be seen).
    assert of_scales["lr"] / max(others) == pytest.approx(0.05 / trainer.lr, rel=0.01)
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(
        list(trainer.task.model.parameters())
    )


def test_the_scales_of_sata_are_logged_drawn_and_resumed(tmp_path):
    config = sata_config()
    train_run(config, tmp_path / "run", command="")
    records = Run(tmp_path / "run").metrics()
    model = last_weights(tmp_path / "run")
    scales = [float(w) for n, w in model.items() if n.endswith("transform.scale")]
    assert records[-1]["transform_scales"] == pytest.approx(scales)
    assert records[-1]["transform_scales"] != records[0]["transform_scales"]
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "Scales of the trivial weights (SATA)" in page
    assert "scale s by epoch and by layer" in page


def test_moving_average_is_what_is_evaluated_and_saved(tmp_path):
    config = tiny_config(epochs=2)
    config.optim.ema_decay = 0.5
    trainer = trainer_of(config, tmp_path / "run")
    trainer.fit()
    assert trainer.eval_model is trainer.ema.module
    assert not equal(trainer.run.weights(), last_weights(tmp_path / "run"))


@pytest.mark.parametrize("make_config", [tiny_config, sparse_config])
@pytest.mark.parametrize("precision", [None, "no", "bf16"])
def test_mixed_precision(tmp_path, precision, make_config):
    config = make_config()
    config.train.mixed_precision = precision
    assert math.isfinite(train_run(config, tmp_path / "run", command="")["top1"])


def test_a_diverging_run_stops_with_advice(tmp_path):
    config = tiny_config()
    config.optim.lr = 1e30
    config.optim.warmup_epochs = 0
    with pytest.raises(UserError, match=r"the loss became .* lower optim\.lr \(now 1e\+30\)"):
        train_run(config, tmp_path / "run", command="")
    assert not (tmp_path / "run").exists(), "no finished epoch, nothing to keep"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c.train, "epochs", -1), "train.epochs must be at least 0, got -1"),
        (lambda c: setattr(c.train, "gradient_accumulation", 0), "train.gradient_accumulation must be at least 1"),
        (lambda c: setattr(c.optim, "name", "adamq"), "optim.name=adamq cannot be made: .*did you mean"),
        (
            lambda c: setattr(c.optim, "schedule", "cosin"),
            "optim.schedule=cosin cannot be made: .*did you mean 'cosine'",
        ),
        (lambda c: setattr(c.optim, "warmup_epochs", 9), "optim.warmup_epochs must be at least 0 and less than"),
        (
            lambda c: setattr(c.optim, "transform_lr", 1e-3),
            "optim.transform_lr=0.001 is for the scales that attention.name=sata learns, but the model has none",
        ),
        (lambda c: setattr(c.optim, "cooldown_epochs", 9), "optim.cooldown_epochs must be at least 0 and less than"),
        (
            lambda c: setattr(
                c, "optim", dataclasses.replace(c.optim, schedule="constant", cooldown_epochs=0.5, warmup_epochs=0)
            ),
            "optim.cooldown_epochs is for cosine, tanh and poly, got schedule constant",
        ),
        (lambda c: setattr(c.optim, "schedule", "none"), "optim.schedule=none .* use constant"),
        (lambda c: setattr(c.optim, "clip_grad", -1.0), "optim.clip_grad must be at least 1e-12, got -1.0"),
        (lambda c: setattr(c.augment, "label_smoothing", 2.0), "augment.label_smoothing must be in 0 .. 0.99, got 2.0"),
        (lambda c: setattr(c.augment, "mixup", -1.0), "augment.mixup must be at least 0, got -1.0"),
        (lambda c: setattr(c.augment, "flip", 2.0), "augment.flip must be in 0 .. 1, got 2.0"),
        (lambda c: setattr(c.augment, "scale", (0.5, 0.2)), "augment.scale must be two numbers"),
        (lambda c: setattr(c.data, "workers", -1), "data.workers must be at least 0, got -1"),
        (lambda c: setattr(c.model, "drop_path", 2.0), "model.drop_path must be in 0 .. 0.99, got 2.0"),
        (lambda c: setattr(c.train, "seed", -1), "train.seed must be at least 0, got -1"),
        (lambda c: setattr(c.optim, "ema_decay", 1.5), "optim.ema_decay must be between 0 and 1, got 1.5"),
        (lambda c: setattr(c.train, "device", "mps"), "train.device=mps is not available on this machine"),
    ],
)
def test_bad_options_are_named_and_leave_no_folder(tmp_path, change, message):
    config = tiny_config()
    change(config)
    with pytest.raises(UserError, match=message):
        train_run(config, tmp_path / "run", command="")
    assert not (tmp_path / "run").exists()


def test_without_epochs_the_first_weights_are_evaluated_and_kept(tmp_path):
    trained = train_run(tiny_config(epochs=1), tmp_path / "trained", command="")
    config = tiny_config(epochs=0)
    config.model.checkpoint = str(tmp_path / "trained/best.safetensors")
    summary = train_run(config, tmp_path / "run", command="")
    run = Run(tmp_path / "run")
    assert summary["top1"] == trained["top1"] == run.read_json("best.json")["top1"]
    assert (summary["epochs"], summary["best_epoch"], summary["train_seconds"]) == (0, 0, 0)
    assert summary["step_milliseconds"] is None
    assert [record["epoch"] for record in run.metrics()] == [0]
    assert equal(run.weights(), Run(tmp_path / "trained").weights())
    assert train_run(config, tmp_path / "run") == summary, "there is nothing to go on with"
    html = write_report([tmp_path / "run", tmp_path / "trained"], tmp_path / "report.html").read_text()
    assert "0 of 0" in html
    write_report([tmp_path / "run"], tmp_path / "report.html")


def test_without_epochs_a_new_classifier_is_refused(tmp_path, monkeypatch):
    other, _ = build_model(tiny_config(), 7)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    config = tiny_config(epochs=0)
    config.model.checkpoint = str(tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"other.pth are for 7 classes, the model is for 10"):
        train_run(config, tmp_path / "run", command="")
    create = task_module.create_timm_model  # pretrained weights would have to be downloaded
    monkeypatch.setattr(task_module, "create_timm_model", lambda name, pretrained, *rest: create(name, False, *rest))
    config.augment.mixup, config.train.batch_size = 0.8, 201  # which training would refuse
    config.model.checkpoint, config.model.pretrained = None, True
    with pytest.raises(
        UserError, match=r"weights of vit_tiny_patch16_224 are for 1000 classes, the data have 10: with"
    ):
        train_run(config, tmp_path / "run", command="")
    assert not (tmp_path / "run").exists()
    torch.save(build_model(tiny_config(), 10)[0].state_dict(), tmp_path / "same.pth")
    config.model.checkpoint = str(tmp_path / "same.pth")
    train_run(config, tmp_path / "same", command="")
    config.model.checkpoint, config.train.epochs = None, 1
    config.augment.mixup, config.train.batch_size = 0.0, 40
    train_run(config, tmp_path / "run", command="")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train_run(tiny_config(), tmp_path / "run", command="")
    other = tiny_config(epochs=3)
    other.model.options["embed_dim"] = 48
    with pytest.raises(UserError, match="is not a checkpoint of this model"):
        train_run(other, tmp_path / "run")
