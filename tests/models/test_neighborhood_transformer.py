"""The models: sizes of the papers, timm's interface, any image size, dilations."""

import itertools

import pytest
import timm
import torch
from timm.models import list_models

import fibottention  # noqa: F401  (registers the models)
from fibottention.analysis.cost import whole_model_macs
from fibottention.models import neighborhood_registry as registry
from fibottention.models.neighborhood_transformer import NeighborhoodTransformer, level_dilations

# Facts on neighborhood attention, section 4: parameters with 1000 classes, and GMACs at the published image size.
PUBLISHED = {
    "nat_mini": (19_984_174, 2.70),
    "nat_tiny": (27_901_582, 4.30),
    "nat_small": (50_743_297, 7.77),
    "nat_base": (89_769_652, 13.68),
    "dinat_mini": (19_984_174, 2.70),
    "dinat_tiny": (27_901_582, 4.30),
    "dinat_small": (50_719_681, 7.77),
    "dinat_base": (89_769_652, 13.68),
    "dinat_large": (200_943_514, 30.5),
    "dinat_s_tiny": (28_288_354, 4.5),
    "dinat_s_small": (49_606_258, 8.7),
    "dinat_s_base": (87_768_224, 15.4),
    "dinat_s_large": (196_532_476, 34.5),
}
SMALL = {"depths": (1, 2, 1, 2), "num_heads": (1, 2, 4, 8), "embed_dim": 16}


def small(name="dinat_mini", **options):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, "num_classes": 5, "drop_path_rate": 0.0, **options}).eval()


def images(*size, batch=2, seed=0):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def randomize(model, seed=0):
    """Give every parameter a value that matters, those that start at 0 or 1 too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name][0]


@pytest.mark.parametrize("name", ["nat_mini", "dinat_tiny", "dinat_s_tiny", "nat_small"])
def test_macs_as_published(name):
    macs = whole_model_macs(timm.create_model(name), (3, 224, 224))
    assert macs / 1e9 == pytest.approx(PUBLISHED[name][1], rel=0.01)


def test_every_name_of_the_papers_is_registered():
    sizes = {"nat": ("mini", "tiny", "small", "base"), "dinat": ("mini", "tiny", "small", "base", "large")}
    names = {f"{family}_{size}" for family, of_family in sizes.items() for size in of_family}
    names |= {f"dinat_s_{size}" for size in ("tiny", "small", "base", "large")}
    names |= {f"{family}_isotropic_{size}" for family in ("nat", "dinat") for size in ("small", "base")}
    names |= {"dinat_large_384", "dinat_large_384_11x11"}
    assert names <= set(list_models()) & set(registry.__all__)


def test_dilations_as_published():
    at = {name: create_on_meta(name).dilations for name in ("dinat_mini", "dinat_large_384", "dinat_isotropic_small")}
    assert at["dinat_mini"] == [[1, 8, 1], [1, 4, 1, 4], [1, 2] * 3, [1] * 5]
    assert at["dinat_large_384"][:2] == [[1, 13, 1], [1, 6, 1, 6]]
    assert at["dinat_isotropic_small"] == [[1, 2] * 6]
    assert {d for of_level in create_on_meta("nat_base").dilations for d in of_level} == {1}


def create_on_meta(name):
    with torch.device("meta"):
        return timm.create_model(name)


@pytest.mark.parametrize("name", ["nat_mini", "dinat_base", "dinat_s_tiny", "dinat_isotropic_small"])
def test_every_parameter_gets_a_gradient(name):
    model = small(name, **({"depths": (2,), "num_heads": (1,)} if "isotropic" in name else {})).train()
    model(images(64, 48)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


@pytest.mark.parametrize("name", ["dinat_mini", "dinat_s_tiny"])
@pytest.mark.parametrize("size", [(224, 224), (32, 32), (100, 75), (17, 240), (5, 5)])
def test_any_image_size(name, size):
    model = small(name)
    assert model(images(*size)).shape == (2, 5)
    features = model.forward_intermediates(images(*size), intermediates_only=True)
    for info, feature, grid in zip(model.feature_info, features, model.level_sizes(size), strict=True):
        assert feature.shape == (2, info["num_chs"], *grid)


def test_features_only_and_intermediates_agree():
    model = randomize(small())
    features = small(features_only=True, out_indices=(1, 3))
    features.model.load_state_dict(model.state_dict(), strict=False)
    assert features.feature_info.channels() == [32, 128]
    assert features.feature_info.reduction() == [8, 32]
    x = images(64, 64)
    final, every = model.forward_intermediates(x)
    torch.testing.assert_close(features(x), [every[1], every[3]])
    torch.testing.assert_close(final, model.forward_features(x))
    last = model.forward_intermediates(x, 1, norm=True, intermediates_only=True, output_fmt="NHWC")
    torch.testing.assert_close(last, [final])
    assert len(model.forward_intermediates(x, [0], stop_early=True)[1]) == 1


def test_pruning_keeps_the_features():
    model = small()
    x = images(64, 64)
    wanted = model.forward_intermediates(x, [1], intermediates_only=True)
    assert model.prune_intermediate_layers([1], prune_norm=True) == [1]
    assert len(model.levels) == 2
    torch.testing.assert_close(model.forward_intermediates(x, [1], intermediates_only=True), wanted)
    assert model(x).shape == (2, 8, 8, 32)


def test_classifier_can_be_replaced_and_left_out():
    model = small()
    model.reset_classifier(7)
    assert model(images(64, 64)).shape == (2, 7)
    assert model.get_classifier().out_features == 7
    model.reset_classifier(0)
    pooled = model(images(64, 64))
    assert pooled.shape == (2, 128)
    torch.testing.assert_close(small(num_classes=0)(images(64, 64)).shape, pooled.shape)
    torch.testing.assert_close(pooled, model.forward_features(images(64, 64)).mean((1, 2)))


def test_gradient_checkpointing_changes_nothing():
    results = []
    for enable in (False, True):
        model = randomize(small())
        model.set_grad_checkpointing(enable)
        model(images(64, 64)).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*results)


def test_default_cfg_is_true():
    for name in ("nat_mini", "dinat_s_large_384", "dinat_isotropic_base"):
        model = create_on_meta(name)
        cfg = model.default_cfg
        assert isinstance(model.get_submodule(cfg["first_conv"]), torch.nn.Conv2d)
        assert model.get_submodule(cfg["classifier"]).out_features == 1000
        assert model.level_sizes(cfg["input_size"][1:])[-1] == cfg["pool_size"]


def test_layer_decay_groups_follow_the_depth():
    from timm.optim import param_groups_layer_decay

    model = small()
    of = {id(p): g["lr_scale"] for g in param_groups_layer_decay(model, layer_decay=0.5) for p in g["params"]}
    scale = {name: of[id(parameter)] for name, parameter in model.named_parameters()}
    order = ["patch_embed.proj.0.weight", "levels.0.blocks.0.norm1.weight", "levels.1.blocks.0.norm1.weight",
             "levels.1.blocks.1.norm1.weight", "levels.1.downsample.norm.weight", "levels.2.blocks.0.norm1.weight",
             "levels.3.blocks.1.norm1.weight", "head.weight"]  # fmt: skip
    assert all(scale[a] < scale[b] for a, b in itertools.pairwise(order))


def test_dilations_change_the_result_and_can_be_set_back():
    model = randomize(small("nat_mini", kernel_size=3))
    x = images(128, 128)
    plain = model(x)
    model.set_dilations([4, 2, 1, 1])
    assert model.dilations == [[1], [1, 2], [1], [1, 1]]
    assert not torch.equal(model(x), plain)
    torch.testing.assert_close(model(x), small_copy(model, "dinat_mini", kernel_size=3, dilations=(4, 2, 1, 1))(x))
    model.set_dilations(None)
    assert torch.equal(model(x), plain)


def small_copy(model, name, **options):
    copy = small(name, **options)
    copy.load_state_dict(model.state_dict())
    return copy


def test_dilations_from_the_image_size():
    model = create_on_meta("nat_tiny")
    model.set_dilations("max")
    assert model.dilations == [[1, 8, 1], [1, 4, 1, 4], [1, 2] * 9, [1] * 5]  # the published ones at 224
    model.set_dilations("max", 384)
    assert [max(level) for level in model.dilations] == [13, 6, 3, 1]  # and at 384
    # floor(n / K) of the shorter side: 800 x 1216 gives the published bounds 28, 14, 7, 3 of COCO.
    model.set_dilations("gradual", (800, 1216))
    assert model.dilations == [[1, 28, 1], [1, 7, 1, 14], [1, 3, 1, 5, 1, 7] * 3, [1, 3, 1, 3, 1]]
    model.set_dilations("max", 32)
    assert {d for level in model.dilations for d in level} == {1}
    built = timm.create_model("dinat_mini", **SMALL, dilations="max", img_size=448, kernel_size=7)
    assert built.dilations == [[1], [1, 8], [1], [1, 2]]


def test_gradual_dilations_as_published_for_ade20k():
    assert [level_dilations(depth, largest, gradual=True) for depth, largest in ((3, 16), (4, 8), (6, 4))] == [
        [1, 16, 1],
        [1, 4, 1, 8],
        [1, 2, 1, 3, 1, 4],
    ]


@pytest.mark.parametrize(
    ("dilations", "message"),
    [
        ("largest", "dilations must be 'max', 'gradual' or an entry per level, got 'largest'"),
        ([1, 2], "dilations must have 4 entries, one per level, got 2"),
        ([[1], [1], [1], [1, 1]], "dilations of level 1 must be one whole number above 0 or 2 of them, got"),
        ([[0], 1, 1, 1], "dilations of level 0 must be one whole number above 0 or 1 of them, got"),
        ([0, 1, 1, 1], "dilations of level 0 must be one whole number above 0 or 1 of them, got 0"),
        ([2.0, 1, 1, 1], "dilations of level 0 must be one whole number above 0 or 1 of them, got 2.0"),
        (8, "dilations must be 'max', 'gradual' or an entry per level, got 8"),
    ],
)
def test_bad_dilations_are_named(dilations, message):
    model = small()
    before = model.dilations
    with pytest.raises(ValueError, match=message):
        model.set_dilations(dilations)
    assert model.dilations == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1, 1)}, "depths and num_heads must have one entry per level"),
        ({"tokenizer": "linear"}, "tokenizer must be 'conv' or 'patch', got 'linear'"),
        ({"patch_size": 8}, "patch_size must be 4 with tokenizer='conv', got 8"),
        ({"num_heads": (3, 3, 3, 3)}, "embed_dim must be divisible by num_heads, got 16 and 3"),
        ({"global_pool": "max"}, "global_pool must be 'avg' or '', got 'max'"),
        ({"kernel_size": 0}, "kernel_size must be a whole number of at least 1, got 0"),
        ({"kernel_size": (7, 7)}, r"kernel_size must be a whole number of at least 1, got \(7, 7\)"),
        ({"num_classes": -1}, "num_classes must be a whole number of at least 0, got -1"),
        ({"img_size": (64,)}, r"img_size must be one whole number above 0 or two, got \(64,\)"),
        ({"attn_drop_rate": 1.0}, r"attn_drop must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        NeighborhoodTransformer(**{**SMALL, **options})


def test_merging_orders_the_neighbours_as_swin_does():
    from timm.models.swin_transformer import PatchMerging as Swin

    from fibottention.models.neighborhood_transformer import PatchMerging

    ours, theirs = randomize(PatchMerging(6)), Swin(6)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 7, 6, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiles_for_several_image_sizes(fullgraph):
    torch._dynamo.reset()
    model = randomize(small(kernel_size=3, depths=(1, 2), num_heads=(1, 2), dilations=(2, 2)))
    compiled = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    for size in ((64, 64), (80, 112)):
        torch.testing.assert_close(compiled(images(*size)), model(images(*size)), rtol=1e-3, atol=1e-3)


def test_norms_of_features_that_are_not_asked_for_are_dropped():
    features = small(features_only=True, feature_norms=True, out_indices=(1,))
    sum(f.square().sum() for f in features(images(64, 64))).backward()
    assert [n for n, p in features.named_parameters() if p.grad is None] == []
    backbone = small(feature_norms=True)
    assert backbone.num_classes == 0
    with pytest.raises(ValueError, match="a model with feature_norms has no classifier, got num_classes=7"):
        backbone.reset_classifier(7)
    with pytest.raises(ValueError, match="global_pool must be 'avg' or '', got 'max'"):
        small().reset_classifier(3, "max")


def test_can_be_traced():
    model = small()
    x = images(64, 64)
    torch.testing.assert_close(torch.jit.trace(model, x, check_trace=False)(x), model(x))


def test_models_are_found_by_their_sizes():
    large = {"embed_dim": 192, "depths": [3, 4, 18, 5], "num_heads": [6, 12, 24, 48], "mlp_ratio": 2.0}
    assert registry.matching_model_name("dinat", {**large, "kernel_size": 7}) == "dinat_large"
    assert registry.matching_model_name("dinat", {**large, "kernel_size": 11}) == "dinat_large_384_11x11"
    assert registry.matching_model_name("nat", {**large, "kernel_size": 7}) is None
    mini = {"embed_dim": 64, "depths": (3, 4, 6, 5), "num_heads": (2, 4, 8, 16), "mlp_ratio": 3.0, "kernel_size": 7}
    assert registry.matching_model_name("nat", mini) == "nat_mini"
    assert registry.matching_model_name("dinat", {**mini, "mlp_ratio": 4.0}) is None
