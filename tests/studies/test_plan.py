"""Studies as YAML files describe them."""

import pytest
import torch
import yaml

from fibottention.cli import main
from fibottention.errors import UserError
from fibottention.studies.plan import load_study, study_names
from fibottention.tasks.classification.task import build_model

STUDY = {
    "title": "a question",
    "base": "demo",
    "seeds": [3, 1],
    "reference": "dense",
    "optim": {"lr": 1e-3},
    "attention": {"name": "sata", "learnable": False},
    "variants": {
        "dense": {"attention": {"name": "dense"}},
        "windows": {"attention": {"name": "longformer", "window": 4}},
    },
    "grid": {"attention.scale": [1, 0.5], "attention.threshold": [0.1, 0.2]},
    "quick": {"seeds": [7], "train": {"epochs": 2}, "optim": {"clip_grad": None}, "grid": {"attention.scale": [0]}},
}


def write(folder, **changes):
    content = {key: value for key, value in {**STUDY, **changes}.items() if value is not None}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def test_runs_and_their_options(tmp_path):
    study = load_study(write(tmp_path), overrides=["--train.batch_size=30"])
    names = ["dense", "windows", *(f"scale={s}, threshold={t}" for s in (1, 0.5) for t in (0.1, 0.2))]
    assert (study.name, study.title, study.reference) == ("mine", "a question", "dense")
    assert list(study.variants) == names
    assert [(run.seed, run.variant) for run in study.runs] == [(seed, name) for seed in (3, 1) for name in names]
    assert study.runs[0].path == "dense/seed-3"
    assert study.runs[5].path == "scale=0.5-threshold=0.2/seed-3"
    assert study.cells["scale=0.5, threshold=0.2"] == {"attention.scale": 0.5, "attention.threshold": 0.2}
    first, last = study.runs[0].config, study.runs[-1].config
    assert first.attention == {"name": "dense", "temperature": 1.0}
    wanted = {"name": "sata", "learnable": False, "scale": 0.5, "threshold": 0.2}
    assert wanted.items() <= last.attention.items()
    assert (first.train.seed, last.train.seed) == (3, 1)
    assert (last.optim.lr, last.train.batch_size, last.train.epochs) == (1e-3, 30, 1)
    assert last.model.options["embed_dim"] == 64  # of the base


def test_quick_changes_what_it_names(tmp_path):
    study = load_study(write(tmp_path), quick=True)
    assert study.name == "mine-quick"
    assert [run.variant for run in study.runs] == ["dense", "windows", "scale=0"]
    assert {run.seed for run in study.runs} == {7}
    config = study.runs[-1].config
    assert (config.train.epochs, config.optim.lr, config.optim.clip_grad) == (2, 1e-3, None)
    assert load_study(write(tmp_path), quick=True, seeds=[0, 1]).seeds == (0, 1)


def test_settings_have_bases_and_roots(tmp_path):
    settings = {"A": {"base": "sata_vit_cifar100"}, "B": {"data": {"limit": 100}}}
    study = load_study(write(tmp_path, settings=settings), roots={"cifar100": "there"})
    assert study.settings == ("A", "B")
    by_setting = {run.setting: run for run in study.runs}
    assert by_setting["A"].config.data.root == "there"
    assert by_setting["B"].config.data.root is None
    assert (by_setting["A"].config.train.epochs, by_setting["B"].config.train.epochs) == (100, 1)
    assert by_setting["B"].path.startswith("B/")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": {}}, "unknown entry 'variant'; did you mean 'variants'"),
        ({"variants": {"a": 3}}, "variants .* must hold groups of options by name"),
        ({"variants": {"a": {"attention": 3}}}, "'a' in variants .*: attention must hold options, got 3"),
        ({"variants": {"a": {"attn": {}}}}, "'a' in variants .*: no group 'attn'"),
        ({"variants": {"a": {"attention": {"name": "sat"}}}, "reference": "a"}, "variant 'a' .* did you mean 'sata'"),
        ({"variants": {"dense": {"train": {"epochs": 2}}}}, "differ in data or train; all variants of a setting must"),
        ({"variants": {"a b": {}, "a/b": {}}, "reference": "a b"}, "too alike: both would be kept in the folder a-b/"),
        ({"reference": "dens"}, "reference: no variant is named 'dens'; did you mean 'dense'"),
        ({"grid": {"scale": [1]}}, "must name options as attention.scale, got 'scale'"),
        ({"grid": {"attention.scale": 1}}, "must hold lists of values by option"),
        ({"grid": None, "variants": None, "reference": None}, "compares nothing: it needs variants or a grid"),
        ({"seeds": [1, 1]}, r"different whole numbers of at least 0, got \[1, 1\]"),
        ({"seeds": [True]}, "seeds of a study must be different whole numbers"),
        ({"base": "dem"}, "no shipped recipe; did you mean 'demo'"),
        ({"seeds": 3}, "seeds of a study must be different whole numbers of at least 0, got 3"),
        ({"optim": 3}, "the options of the study .*: optim must hold options, got 3"),
        ({"variants": ["a", "b"]}, "variants .* must hold groups of options by name, got"),
        ({"variants": {1: {}, "1": {}}}, "two variants of one name among 1, '1'"),
        ({"train": {"seed": 3}}, "must not hold train.seed, which differs from run to run"),
        ({"variants": {"": {}, "b": {}}, "reference": "b"}, "has a variant named ''; names need a letter or a digit"),
        ({"settings": {"../": {}}}, "has a setting named '../'; names need a letter or a digit"),
        ({"settings": {10: 3}}, "settings .* must hold groups of options by name"),
        ({"settings": {"A": {"basis": "demo"}}}, "'A' in settings .*: no group 'basis'; did you mean 'base'"),
    ],
)
def test_mistakes_are_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load_study(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sata_gird"], "no shipped study; did you mean 'sata_grid'"),
        (["FILE", "--quick"], "has no quick version"),
        (["FILE", "--optim.clip_grad", "1"], "--optim.clip_grad: the study sets this itself"),
        (["FILE", "--model.options.depth=3"], "--model.options.depth: the study sets this itself"),
        (["FILE", "--attention.name", "lsa"], "--attention.name: the study sets this itself"),
        (["FILE", "--train.seed", "1"], "--train.seed is not for studies; use --seeds"),
        (["FILE", "--train.epoch", "1"], "no option --train.epoch; did you mean '--train.epochs'"),
        (["FILE", "--atention.name", "lsa"], "fibottention: there is no option --atention.name"),
        (["."], ". is a folder; a study is a YAML file, or one of dinat_dilation"),
        (["--quick", "--train.epochs=2"], "name the study before --train.epochs=2; there are dinat_dilation"),
        (["FILE", "--root", "cifar100"], "--root must be DATA=DIR"),
        (["FILE", "--root", "cifar100=x"], "the study uses no data named 'cifar100'"),
        (["FILE", "--seeds", "x"], "invalid int value: 'x'"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    variants = {**STUDY["variants"], "deep": {"model": {"options": {"depth": 9}}, "optim": {"clip_grad": 2}}}
    path = write(tmp_path, quick=None, variants=variants)
    assert main(["study", *(path if word == "FILE" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("quick", [3, {"train": 3}, {"title": "x", "quick": {}}])
def test_mistakes_in_the_quick_version(tmp_path, quick):
    with pytest.raises(UserError, match="'quick'|quick of the study"):
        load_study(write(tmp_path, quick=quick), quick=True)


@pytest.mark.parametrize("name", study_names())
@pytest.mark.parametrize("quick", [False, True])
def test_shipped_studies_are_valid(name, quick):
    study = load_study(name, quick=quick)
    assert len(study.seeds) >= 2
    assert study.reference == study.variants[0]
    assert len(study.variants) >= 4
    for run in {run.variant: run for run in study.runs if run.setting == study.settings[0]}.values():
        with torch.device("meta"):
            build_model(run.config, 10)
    if quick:
        assert all(run.config.data.name == "fashion-mnist-subset" for run in study.runs)


def test_names_in_other_letters_and_no_name(tmp_path, capsys):
    study = load_study(write(tmp_path, variants={"日本": {}, "中国": {}, "../été": {}}, reference="日本"))
    paths = [run.path for run in study.runs[:3]]
    assert paths == ["日本/seed-3", "中国/seed-3", "été/seed-3"]
    assert main(["study"]) == 0
    assert "  table2\n" in capsys.readouterr().out
