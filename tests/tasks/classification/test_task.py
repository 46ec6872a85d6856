import pytest
import timm
import torch
from accelerate import Accelerator
from timm.layers import DropPath

from fibottention import Dense, Fibottention
from fibottention.errors import UserError
from fibottention.layers import PatternAttention
from fibottention.tasks.classification.config import AugmentConfig, ClassificationConfig, DataConfig, ModelConfig
from fibottention.tasks.classification.data import normalization
from fibottention.tasks.classification.task import ClassificationTask, build_model
from fibottention.tasks.config import attention_spec
from fibottention.tasks.options import load_recipe, make_config
from fibottention.tasks.weights import load_into
from fibottention.training.run import Run
from tests.pictures import photo_folder
from tests.tiny import tiny_config


def test_model_has_the_spec_and_the_seed_gives_its_weights():
    task, again = ClassificationTask(tiny_config()), ClassificationTask(tiny_config())
    specs = {m.spec for m in task.model.modules() if isinstance(m, PatternAttention)}
    assert specs == {Fibottention()}
    for a, b in zip(task.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_same_seed_gives_the_same_weights_for_every_spec():
    dense = tiny_config()
    dense.attention = {"name": "dense"}
    a, b = ClassificationTask(tiny_config()).model, ClassificationTask(dense).model
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_metrics_by_hand():
    task = ClassificationTask(tiny_config())
    logits = torch.full((5, 10), -5.0)
    predicted, targets = [1, 2, 2, 9, 0], [1, 2, 3, 0, -1]  # the last image cannot be read
    for row, label in enumerate(predicted):
        logits[row, label] = 5.0
    logits[3, 0] = 4.0  # second best is right
    batch = (logits, torch.tensor(targets), torch.tensor([-1, -1, -1, -1, 4]))
    result = task.evaluate(lambda images: images, iter([batch]), Accelerator(cpu=True))
    assert result.metrics["top1"] == 50.0
    assert result.metrics["top5"] >= 75.0
    assert result.details["images"] == 4
    confusion = torch.tensor(result.details["confusion"])
    assert (confusion[1, 1], confusion[2, 2], confusion[3, 2], confusion[0, 9]) == (1, 1, 1, 1)
    assert confusion.sum() == 4
    expected = torch.nn.functional.cross_entropy(logits[:4], batch[1][:4])
    assert result.metrics["val_loss"] == pytest.approx(float(expected))
    assert task.unreadable() == [task.data.name(4, train=False)]
    batch = (logits, torch.full((5,), -1), torch.arange(5))
    with pytest.raises(UserError, match="none of the validation images could be read"):
        task.evaluate(lambda images: images, iter([batch]), Accelerator(cpu=True))


def test_attention_none_leaves_the_model_as_it_is():
    config = tiny_config()
    config.attention = {"name": "none"}
    config.model.name = "resnet18"
    config.model.options = {}
    task = ClassificationTask(config)
    assert task.sparsify_report is None
    assert type(task.model).__name__ == "ResNet"


def test_start_from_a_checkpoint_with_other_classes(tmp_path):
    torch.manual_seed(5)
    config = tiny_config()
    source, _ = build_model(config, num_classes=3)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    config.model.checkpoint = str(tmp_path / "w.pth")
    model, _ = build_model(config, num_classes=10)
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert model.head.weight.shape[0] == 10


def test_weights_that_do_not_fit_are_listed():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=4)
    weights = dict(model.state_dict())
    load_into(model, weights, "file")
    del weights["norm.weight"]
    weights["extra"] = torch.zeros(1)
    weights["head.weight"] = torch.zeros(9, 192)
    with pytest.raises(UserError, match=r"in file do not fit .*1 missing \(norm.weight\); 1 unexpected \(extra\); 1"):
        load_into(model, weights, "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c.model, "name", "vit_tyni_patch16_224"), "no model is named .* did you mean 'vit_tiny"),
        (lambda c: c.model.options.update(num_heads=5), "cannot be made: dim should be divisible by num_heads"),
        (lambda c: c.model.options.update(num_heads=0), "cannot be made"),
        (lambda c: c.model.options.update(depth=0), "it has no blocks"),
        (lambda c: c.model.options.update(colour=1), "vit_tiny_patch16_224 cannot be made: .*colour"),
        (lambda c: c.model.options.update(num_classes=5), "num_classes=5 differs from the 10 classes"),
        (lambda c: c.model.options.update(in_chans=3), "must not hold in_chans; use model.in_chans"),
        (lambda c: c.model.options.update(img_size=32), "must not hold img_size; use data.image_size"),
        (
            lambda c: (setattr(c.model, "name", "resnet18"), setattr(c, "attention", {"name": "none"})),
            "model resnet18 cannot be made: .*patch_size",
        ),
        (
            lambda c: (c.attention.update(fill="zero"), c.model.options.update(attn_drop_rate=0.1)),
            "needs an attention dropout of 0, got 0.1 in Attention at blocks.0.attn",
        ),
        (lambda c: setattr(c, "attention", {"name": "fibotention"}), "did you mean 'fibottention'"),
        (lambda c: setattr(c, "attention", {"name": "none", "w_min": 3}), "takes no options"),
        (lambda c: setattr(c.model, "checkpoint", "/no/such.pth"), "/no/such.pth is not a file of weights"),
        (lambda c: (setattr(c.model, "name", "resnet18"), c.model.options.clear()), "does not support ResNet"),
    ],
)
def test_bad_models_are_named(change, message):
    config = tiny_config()
    change(config)
    with pytest.raises(UserError, match=message):
        build_model(config, 10)


def test_one_class_is_refused(tmp_path):
    import shutil

    root = photo_folder(tmp_path)
    for split in ("train", "val"):
        for name in ("cat", "rocket"):
            shutil.rmtree(root / split / name)
    config = tiny_config()
    config.data.name, config.data.root, config.data.limit = "folder", str(root), None
    with pytest.raises(UserError, match=r"only one class \(coffee\)"):
        ClassificationTask(config)


def test_mixup_needs_even_batches():
    config = tiny_config()
    config.augment.mixup = 0.2
    config.train.batch_size = 41
    with pytest.raises(UserError, match="train.batch_size must be even"):
        ClassificationTask(config)


def test_attention_spec_of_options():
    assert attention_spec({"name": "fibottention", "w_max": 20}) == Fibottention(w_max=20)
    assert attention_spec({"name": "dense"}) == Dense()
    assert attention_spec({"name": "none"}) is None


def shipped_recipes():
    from pathlib import Path

    paths = sorted(Path("recipes").resolve().glob("[a-z]*.yaml"))
    return {path.stem: (make_config(load_recipe(path.stem)), path.read_text()) for path in paths}


def test_recipes_of_fibottention_have_the_published_settings():
    recipes = {n: r for n, r in shipped_recipes().items() if "nat_" not in n and "sata" not in n and n != "demo"}
    assert len(recipes) == 16
    for config, text in recipes.values():
        assert timm.is_model(config.model.name)
        # Facts on Fibottention, section 5.
        assert config.attention == Fibottention(w_min=5).to_dict()
        assert (config.optim.name, config.optim.base_lr, config.optim.weight_decay) == ("adamw", 1e-3, 0.05)
        assert (config.optim.layer_decay, config.optim.warmup_epochs, config.optim.min_lr) == (0.75, 5, 1e-6)
        assert (config.train.epochs, config.data.image_size, config.data.resize) == (100, 224, 256)
        assert config.augment == AugmentConfig(
            auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25, label_smoothing=0.1
        )
        assert config.model.drop_path == 0.2
        assert "Published" in text


def test_recipes_of_neighborhood_attention_have_the_published_settings():
    recipes = {n: r for n, r in shipped_recipes().items() if n.endswith("_imagenet") and "nat_" in n}
    assert len(recipes) == 15
    # Facts on neighborhood attention, section 4.
    top1 = {
        "nat": {"mini": 81.8, "tiny": 83.2, "small": 83.7, "base": 84.3},
        "dinat": {"mini": 81.8, "tiny": 82.7, "small": 83.8, "base": 84.4},
        "dinat_s": {"tiny": 81.8, "small": 83.5, "base": 83.8},
        "nat_isotropic": {"small": 80.0, "base": 81.6},
        "dinat_isotropic": {"small": 80.8, "base": 82.1},
    }
    for family, of_sizes in top1.items():
        for size, accuracy in of_sizes.items():
            config, text = recipes[f"{family}_{size}_imagenet"]
            assert f"Published, in the paper: top-1 {accuracy} %" in text
            assert timm.is_model(config.model.name)
            assert config.model.name == f"{family}_{size}"
            assert config.attention == {"name": "none"}
            optim, train = config.optim, config.train
            assert (optim.name, optim.lr, optim.weight_decay, optim.schedule) == ("adamw", 1e-3, 0.05, "cosine")
            assert optim.warmup_epochs == (50 if family.endswith("isotropic") and size == "base" else 20)
            assert train.epochs - optim.cooldown_epochs == 300
            assert (train.batch_size * 8, config.data.image_size, optim.clip_grad) == (1024, 224, 5.0)
            assert (config.augment.mixup, config.augment.cutmix, config.augment.random_erasing) == (0.8, 1.0, 0.25)
            assert config.model.drop_path is None, "the model's own"


def test_recipes_of_pre_training_and_fine_tuning():
    recipes = shipped_recipes()
    config, _ = recipes["dinat_large_imagenet22k"]
    assert (config.train.epochs, config.train.batch_size * config.train.gradient_accumulation * 8) == (90, 4096)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.schedule, config.optim.decay_rate) == (
        1e-3,
        0.01,
        "poly",
        1.0,
    )
    for size, name in ((224, "dinat_large"), (384, "dinat_large_384"), (384, "dinat_large_384_11x11")):
        config, text = recipes[name.replace("large", "large_imagenet") + ("_224" if size == 224 else "")]
        assert config.model.name == name
        assert (config.train.epochs, config.train.batch_size * 8, config.data.image_size) == (30, 512, size)
        assert (config.optim.lr, config.optim.weight_decay, config.optim.warmup_epochs) == (5e-5, 1e-4, 0)
        assert (config.optim.schedule, config.augment.mixup, config.augment.cutmix) == ("poly", 0.0, 0.0)
        assert {"dinat_large": "86.6", "dinat_large_384": "87.4", "dinat_large_384_11x11": "87.5"}[name] in text
    assert "86.5" in recipes["dinat_s_large_imagenet_224"][1]
    for name, model in (("22k", ""), ("_224", ""), ("_384", "_384")):
        ours, theirs = (recipes[f"{family}_imagenet{name}"][0] for family in ("dinat_s_large", "dinat_large"))
        assert ours.model.name == f"dinat_s_large{model}"
        assert (ours.optim, ours.train, ours.augment, ours.data) == (
            theirs.optim,
            theirs.train,
            theirs.augment,
            theirs.data,
        )


def test_recipes_of_sata_have_the_published_settings():
    recipes = {n: r for n, r in shipped_recipes().items() if n.startswith("sata_")}
    # Facts on SATA, small-data recipe: t, lr, lr2.
    published = {
        "sata_vit_cifar100": (0.1, 3e-3, 7e-5),
        "sata_vit_tiny_imagenet": (0.1, 3e-3, 1e-3),
        "sata_pit_cifar100": (0.05, 1e-3, 1e-3),
        "sata_pit_tiny_imagenet": (0.1, 1e-3, 3e-4),
    }
    assert recipes.keys() == published.keys()
    for name, (config, text) in recipes.items():
        optim, augment = config.optim, config.augment
        assert (config.attention["threshold"], optim.lr, optim.transform_lr) == published[name]
        assert (config.attention["name"], config.attention["scale"], config.attention["over"]) == ("sata", 0.5, None)
        size = 32 if "cifar" in name else 64
        assert (config.model.name, config.data.image_size) == (f"{name.split('_')[1]}_small_data_{size}", size)
        assert (optim.weight_decay, optim.warmup_epochs, optim.warmup_lr, optim.min_lr) == (0.05, 10, 1e-6, 1e-6)
        assert (config.train.epochs, config.train.batch_size, config.train.mixed_precision) == (100, 128, "no")
        assert (augment.auto_augment, augment.repeats, augment.crop, augment.random_erasing) == (
            "cifar",
            3,
            "padded",
            0.25,
        )
        assert (augment.mix_probability, augment.label_smoothing, config.model.drop_path) == (0.5, 0.1, 0.1)
        assert "Published" in text


def test_nat_and_dinat_are_left_as_they_are_unless_told():
    assert make_config({}, ["--model.name", "dinat_mini"]).attention == {"name": "none"}
    assert make_config({"model": {"name": "nat_tiny"}}).attention == {"name": "none"}
    told = make_config({}, ["--model.name", "dinat_mini", "--attention.name", "dense"])
    assert told.attention["name"] == "dense"


def test_recipes_and_overrides():
    recipe = load_recipe("vit_base_cifar10")
    config = make_config(recipe, ["--optim.lr", "0.5", "--attention.w_max=30", "--data.strict=true"])
    assert (config.optim.lr, config.attention["w_max"], config.data.strict) == (0.5, 30, True)
    other = make_config(recipe, ["--attention.name", "longformer"])
    assert other.attention == {"name": "longformer", "window": 1, "global_tokens": 0}
    assert make_config({}) == ClassificationConfig(attention=Fibottention().to_dict())
    again = make_config(config.to_dict())
    assert again == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.lrr", "3"], "there is no option --optim.lrr; did you mean '--optim.lr'"),
        (["--optim.lr", "abc"], "optim.lr must be a number or null, got abc"),
        (["--train.epochs", "1.5"], "train.epochs must be a whole number, got 1.5"),
        (["--augment.crop=middle"], "augment.crop must be one of 'resized', 'padded', 'none', got middle"),
        (["--optim.betas", "[1,2,3]"], r"optim.betas must be tuple\[float, float\] or null, got \[1, 2, 3\]"),
        (["--attention.nam=x"], "has no option 'nam'; it has fill, w_min"),
        (["--attention.w_max"], "the option --attention.w_max needs a value"),
        (["--attention.name=longfomer"], "did you mean 'longformer'"),
        (["stray"], "unexpected word 'stray'"),
    ],
)
def test_bad_options_are_named(words, message):
    with pytest.raises(UserError, match=message):
        make_config({}, words)


def test_bad_recipes_are_named(tmp_path):
    for text, message in (
        ("optim: {lrr: 1}", "there is no option --optim.lrr"),
        ("optim: [", "is not valid YAML"),
        ("- a", "must hold named options"),
        ("base: none.yaml", "there is no recipe"),
        ("base: r.yaml", "at most 3 deep"),
        ("base: {a: 1}", "must name another recipe"),
        ("train: {epochs: 2024-10-19}", "train.epochs must be a whole number"),
        ("optim: 3", "must hold groups of options"),
    ):
        path = tmp_path / "r.yaml"
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            make_config(load_recipe(str(path)))
    with pytest.raises(UserError, match="no shipped recipe; did you mean 'vit_base_cifar10"):
        load_recipe("vit_bse_cifar10")


@pytest.mark.parametrize(
    ("name", "options", "attention", "share"),
    [
        ("vit_tiny_patch16_224", {"depth": 2}, {"name": "longformer"}, 0.03),
        ("pit_ti_224", {}, {"name": "longformer"}, 0.1),
        ("cait_xxs24_224", {"depth": 2}, {"name": "longformer"}, 0.05),
        ("vit_tiny_patch16_224", {"depth": 2}, {"name": "neighborhood", "dilation": [1, 4]}, 0.05),
    ],
)
def test_attention_of_a_given_cost(name, options, attention, share):
    config = ClassificationConfig(model=ModelConfig(name=name, match_macs=share, options=options), attention=attention)
    with torch.device("meta"):
        _, report = build_model(config, 10)
    assert 1 / 1.5 <= report.density / share <= 1.5


def test_attention_of_a_given_cost_that_cannot_be():
    config = ClassificationConfig(
        model=ModelConfig(name="vit_tiny_patch16_224", match_macs=0.03), attention={"name": "dense"}
    )
    with torch.device("meta"):
        assert build_model(config, 10)[1].density == 1
        config.attention = {"name": "criss_cross"}
        with pytest.raises(UserError, match="criss_cross cannot be brought to 3.00% .* the nearest is 14.65%"):
            build_model(config, 10)
        config.attention = {"name": "none"}
        with pytest.raises(UserError, match="model.match_macs needs an attention spec, got attention.name=none"):
            build_model(config, 10)


def test_weights_bring_their_normalization(tmp_path):
    def begun(*words):
        config = make_config({}, ["--model.name", "vit_small_patch16_224", *words])
        ClassificationTask.begin(config)
        return config.data.mean, config.data.std

    pretrained = ["--model.pretrained", "true"]
    half = [0.5] * 3  # timm: not ImageNet's statistics
    assert begun(*pretrained) == (half, half)
    assert begun(*pretrained, "--data.mean", "[0.4, 0.4, 0.4]") == ([0.4] * 3, half)
    assert begun() == begun(*pretrained, "--model.in_chans", "1") == (None, None)
    with pytest.raises(UserError, match="vit_small_patch16_224.nosuch cannot be made: Invalid pretrained tag"):
        begun("--model.name", "vit_small_patch16_224.nosuch", *pretrained)
    Run(tmp_path).write_yaml(make_config({}, ["--data.name", "cifar10"]).to_dict())
    weights = str(tmp_path / "checkpoints" / "epoch_0001" / "model.safetensors")
    assert begun("--model.checkpoint", weights) == (None, None), "a recipe in a folder is no run"
    Run(tmp_path).write_json("best.json", {})
    mean, std = begun("--model.checkpoint", str(tmp_path / "checkpoints" / "epoch_0001" / "model.safetensors"))
    assert (mean, std) == normalization(DataConfig(name="cifar10"), 3)
    assert make_config({}, pretrained).data.mean is None, "a run that is opened again stays as it was"


def test_no_stochastic_depth_is_none():
    words = ["--model.name", "dinat_mini", "--model.options.depths=[1,1,1,2]"]
    for given, rate in (([], 0.2), (["--model.drop_path", "0"], 0.0), (["--model.drop_path", "0.3"], 0.3)):
        model, _ = build_model(make_config({}, [*words, *given]), 10)
        found = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
        assert max(found, default=0.0) == pytest.approx(rate)
