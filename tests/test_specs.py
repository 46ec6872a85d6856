import dataclasses
import random

import pytest
import torch
import yaml

import fibottention
from fibottention import (
    LSA,
    SATA,
    AttentionSpec,
    BigBird,
    CrissCross,
    Dense,
    DilatedWindow,
    EfficientAttention,
    Exponential,
    Fibonacci,
    Fibottention,
    GridAttention,
    Linformer,
    Longformer,
    Neighborhood,
    RandomPairs,
    SlidingWindow,
    SparseTransformer,
    TopK,
    WindowPartition,
    fit_macs,
    make_spec,
    patterns,
    spec_names,
)
from fibottention.specs import nearest

EXPECTED = {
    "bigbird", "criss_cross", "dense", "dilated_window", "efficient_attention", "exponential", "fibonacci",
    "fibottention", "grid_attention", "linformer", "longformer", "lsa", "neighborhood", "random_pairs", "sata",
    "sliding_window", "sparse_transformer", "topk", "window_partition",
}  # fmt: skip


def test_names_and_exports():
    assert set(spec_names()) >= EXPECTED
    for name in EXPECTED:
        spec = make_spec(name)
        assert spec.name == name
        assert getattr(fibottention, type(spec).__name__) is type(spec)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_spec_round_trips_and_builds(name):
    spec = make_spec(name)
    assert make_spec(spec.to_dict()) == spec
    assert hash(spec) == hash(make_spec(name))
    small = [] if name in ("neighborhood", "grid_attention") else [(1, 4, 2)]
    for heads, tokens, prefix in ((12, 196, 1), (3, 49, 0), *small):
        cost = spec.cost(heads, tokens, 16, prefix_tokens=prefix, layer=5)
        assert (cost.pairs > 0) == spec.has_weights
        assert cost.macs > 0
        assert cost.dense_macs == 2 * heads * (tokens + prefix) ** 2 * 16
        if not spec.has_pattern:
            continue
        pattern = spec.pattern(heads, tokens, prefix_tokens=prefix, layer=5)
        assert (pattern.num_heads, pattern.sequence_length) == (heads, tokens + prefix)
        assert name == "lsa" or pattern.prefix_tokens == prefix
        assert pattern.mask().any(-1).all()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"


def test_shuffle_has_the_order_of_the_released_code():
    # Facts, section 2.
    spec = Fibottention()
    assert spec.head_order(12, 0) == (2, 10, 9, 6, 11, 3, 4, 8, 5, 1, 12, 7)
    assert spec.head_order(12, 1) == (8, 12, 1, 9, 6, 7, 4, 11, 5, 2, 10, 3)
    assert Fibottention(shuffle=False).head_order(4, 3) == (1, 2, 3, 4)
    assert Fibottention(seed=1).head_order(12, 0) not in {spec.head_order(12, layer) for layer in range(24)}
    assert spec.pattern(12, 196, layer=1) is patterns.wythoff(12, 196, head_order=spec.head_order(12, 1))


def test_shuffle_leaves_the_global_generator_alone():
    random.seed(3)
    state = random.getstate()
    Fibottention().pattern(12, 196, layer=7)
    assert random.getstate() == state


def test_random_specs_differ_from_layer_to_layer():
    for name in ("bigbird", "random_pairs"):
        spec = make_spec(name)
        assert spec.pattern(4, 60, layer=0) is not spec.pattern(4, 60, layer=1)
        assert spec.pattern(4, 60, layer=1) is spec.pattern(4, 60, layer=1)


def test_names_are_forgiving_about_case_and_dashes():
    assert make_spec("Fibottention", w_max=20) == Fibottention(w_max=20)
    assert make_spec("Sliding-Window").name == "sliding_window"
    assert make_spec({"name": "longformer", "window": 2}) == Longformer(window=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_spec("fibotention"), "no attention spec is named 'fibotention'; did you mean 'fibottention'"),
        (lambda: make_spec("xyz"), "no attention spec is named 'xyz'; valid are bigbird, criss_cross, dense"),
        (lambda: make_spec("longformer", windw=3), "has no option 'windw'; did you mean 'window'"),
        (lambda: make_spec("dense", window=3), "'dense' has no option 'window'; it has temperature"),
        (lambda: Fibottention(w_min="5"), "w_min must be a whole number, got '5'"),
        (lambda: Fibottention(w_max=2.5), "w_max must be a whole number or none, got 2.5"),
        (lambda: Fibottention(shuffle=1), "shuffle must be true or false, got 1"),
        (lambda: Fibottention(w_min=True), "w_min must be a whole number, got True"),
        (lambda: Fibottention(fill="one"), "fill must be '-inf' or 'zero', got 'one'"),
        (lambda: Fibottention(w_min=9, w_max=5), "w_min <= w_max, got 9 and 5"),
        (lambda: make_spec("random_pairs", density="x"), "density must be a number, got 'x'"),
        (lambda: SATA(threshold=2.0), r"threshold must be in .*, got 2.0"),
        (lambda: SATA(over=SATA()), "over must be another spec, got SATA itself"),
        (lambda: SATA(over=Fibottention(fill="zero")), "over must not have fill='zero'"),
        (lambda: SATA(over="fibotention"), "did you mean 'fibottention'"),
        (lambda: SATA(over=3), "SATA: over must be AttentionSpec or none, got 3"),
        (lambda: Dense(temperature=0), "temperature must be above 0, got 0"),
        (lambda: Neighborhood(dilation=[1, 2.5]), "dilation must be a whole number or a list of whole numbers, got"),
        (lambda: Neighborhood(dilation=()), r"kernel_size and dilation must be at least 1, got 7 and \(\)"),
        (lambda: Neighborhood(0), "kernel_size and dilation must be at least 1, got 0 and 1"),
        (lambda: Neighborhood().pattern(2, 50), "grid_size must be given for 50 tokens, which are no square"),
    ],
)
def test_bad_specs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_neighborhoods_take_their_dilations_in_turn_and_read_lists():
    spec = make_spec({"name": "neighborhood", "kernel_size": 3, "dilation": [1, 2]})
    assert spec == Neighborhood(3, (1, 2))
    assert spec.to_dict() == {"name": "neighborhood", "kernel_size": 3, "dilation": [1, 2], "rel_pos_bias": False}
    layers = [spec.pattern(2, 48, grid_size=(6, 8), layer=layer) for layer in range(3)]
    assert layers == [patterns.neighborhood(2, (6, 8), 3, dilation=d) for d in (1, 2, 1)]
    assert Neighborhood(3, rel_pos_bias=True).pattern(2, 36).num_buckets == 25


def test_sata_composes_with_other_specs():
    spec = make_spec({"name": "sata", "threshold": 0.05, "over": {"name": "fibottention", "w_min": 3}})
    assert spec == SATA(0.05, over=Fibottention(w_min=3))
    assert spec.to_dict()["over"] == Fibottention(w_min=3).to_dict()
    assert make_spec(spec.to_dict()) == spec
    assert spec.pattern(12, 196, prefix_tokens=1, layer=3) is Fibottention(w_min=3).pattern(
        12, 196, prefix_tokens=1, layer=3
    )
    assert SATA(over="lsa") == SATA(over=LSA())
    assert SATA(over="lsa").learned_temperature
    assert SATA().pattern(2, 9).is_dense
    assert SATA(over=Dense(temperature=2.0)).temperature == 2.0
    assert SATA(over=Neighborhood(3, rel_pos_bias=True)).bias_size == 25
    assert SATA(0.2, 0.75, False, "absolute").transform().extra_repr() == (
        "threshold=0.2, scale=0.75, learnable=False, mode='absolute'"
    )
    assert not SATA().only_pairs
    assert not LSA().only_pairs
    assert Dense().only_pairs
    assert not Dense(temperature=2.0).only_pairs


def test_lsa_keeps_all_pairs_but_the_diagonal():
    mask = LSA().pattern(3, 9, prefix_tokens=1).mask()
    assert torch.equal(mask, ~torch.eye(10, dtype=torch.bool).expand(3, -1, -1))


def test_a_new_spec_is_known_by_name():
    @dataclasses.dataclass(frozen=True)
    class Diagonal(AttentionSpec):
        name = "test_diagonal"

        def pattern(self, num_heads, num_tokens, *, prefix_tokens=0, layer=0, grid_size=None):
            return patterns.sliding_window(num_heads, num_tokens, 0, prefix_tokens=prefix_tokens)

    assert make_spec("test_diagonal").pattern(2, 5).nnz == 10
    assert Dense().fill == "-inf"


def test_nearest():
    assert nearest("lr", ["lr"]) == "; did you mean 'lr'?"
    assert nearest("zzz", ["a", "b"]) == "; valid are a, b"


def test_some_layers_see_all():
    spec = WindowPartition(size=4, global_every=3)
    kept = [spec.pattern(2, 64, layer=layer).is_dense for layer in range(12)]
    assert kept == [False, False, True] * 4
    assert spec.pattern(2, 64).density() == pytest.approx(1 / 4)
    assert not WindowPartition(size=4).pattern(2, 64, layer=2).is_dense
    with pytest.raises(ValueError, match="WindowPartition: size must be at least 1 and global_every at least 0"):
        WindowPartition(global_every=-1)


def test_options_are_what_they_look_like_in_yaml():
    """YAML reads on, off, yes and no as true and false, also as names."""
    for name in spec_names():
        for option in make_spec(name).to_dict():
            assert yaml.safe_load(f"{option}: 1") == {option: 1}
    with pytest.raises(ValueError, match="attention spec 'sata' has no option 'True'"):
        make_spec(yaml.safe_load("{name: sata, on: lsa}"))


FITTING = [
    BigBird(), DilatedWindow(), Exponential(), Fibonacci(), Fibottention(), GridAttention(), Linformer(), Longformer(),
    Neighborhood(), RandomPairs(), SlidingWindow(), SparseTransformer(window=0), SATA(over=Longformer()),
    WindowPartition(),
]  # fmt: skip


@pytest.mark.parametrize("spec", FITTING)
@pytest.mark.parametrize("share", [0.03, 0.1])
def test_specs_can_be_sized_to_a_cost(spec, share):
    if isinstance(spec, Exponential | Fibonacci | Fibottention | SparseTransformer) and share == 0.1:
        share = 0.04
    sized = fit_macs(spec, share, 12, 196, 64, prefix_tokens=1)
    cost = sized.cost(12, 196, 64, prefix_tokens=1)
    assert 1 / 1.5 <= cost.macs / cost.dense_macs / share <= 1.5
    assert type(sized) is type(spec)
    for field in dataclasses.fields(spec):
        if field.name not in (spec.size_option, "over"):
            assert getattr(sized, field.name) == getattr(spec, field.name)


def test_a_spec_that_fits_stays_and_one_that_cannot_is_refused():
    assert fit_macs(Fibottention(), 0.03, 12, 196, 64, prefix_tokens=1) == Fibottention()
    for spec, nearest_share in ((CrissCross(), "14.65%"), (TopK(), "100.00%"), (Dense(), "100.00%")):
        with pytest.raises(
            ValueError, match=f"{spec.name} cannot be brought to 3.00% .* the nearest is {nearest_share}"
        ):
            fit_macs(spec, 0.03, 12, 196, 64, prefix_tokens=1)
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got 2"):
        fit_macs(Longformer(), 2, 12, 196, 64)


def test_cost_of_a_pattern():
    cost = Fibottention().cost(12, 196, 64, prefix_tokens=1)
    assert 12 * cost.macs == pytest.approx(0.0214e9, rel=5e-3)  # facts on Fibottention, section 4
    assert 12 * cost.dense_macs == pytest.approx(0.715e9, rel=1e-3)
    assert cost.pairs == 9192 + 12 * 393


def test_sata_is_for_pairs_known_beforehand():
    with pytest.raises(ValueError, match="over must be a spec with weights of pairs known beforehand, got linformer"):
        SATA(over="linformer")


def test_sizes_of_zero_and_reasons():
    assert fit_macs(Longformer(), 0.0155, 12, 196, 64, prefix_tokens=1) == Longformer(window=0)
    with pytest.raises(ValueError, match="cannot be had in any size: grid_size must be given for 50 tokens"):
        fit_macs(Neighborhood(), 0.1, 12, 50, 64)
    for call in (lambda: fit_macs(Longformer(), 0.1, 0, 196, 64), lambda: TopK().cost(0, 196, 64)):
        with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
            call()
    with pytest.raises(ValueError, match="prefix_tokens must be at least 0, got -1"):
        EfficientAttention().cost(3, 4, 8, prefix_tokens=-1)


def test_the_size_does_not_depend_on_where_the_search_begins():
    sizes = {fit_macs(Longformer(window=window), 0.03, 12, 196, 64, prefix_tokens=1) for window in (0, 1, 5, 40)}
    assert len(sizes) == 1
