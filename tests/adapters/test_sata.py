"""SATA, LSA and temperature in timm's models, against timm's own unfused attention."""

import copy

import pytest
import timm
import torch
from torch import nn

from fibottention import LSA, SATA, Dense, Fibottention, Longformer, Neighborhood, SparseAttention, sparsify
from fibottention.layers import PatternAttention
from tests.adapters.test_timm import build, images

SUPPORTED = ["vit", "deit_distilled", "registers", "gap", "swin", "pit", "eva02", "dinov3", "eva_rope_mixed"]


class Reference(nn.Module):
    """TWIST as the facts on SATA state it, in ten lines."""

    def __init__(self, threshold, scale, mode):
        super().__init__()
        self.threshold, self.mode = threshold, mode
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, a):
        m = a.detach().amax(-1, keepdim=True)
        trivial = a.detach() <= (self.threshold * m if self.mode == "relative" else self.threshold)
        total = torch.where(trivial, a, 0.0).sum(-1, keepdim=True)
        return torch.where(trivial, self.scale * a * a / torch.where(total > 0, total, 1.0), a)


def sharp(family):
    """A model whose attention is far from uniform, so that there are trivial weights."""
    model = build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("qkv.weight", "q_proj.weight", "k_proj.weight")):
                parameter.normal_(std=0.3)
    return model


def by_timm(model, make):
    """A timm model whose unfused attention passes its weights through a module in the place of dropout."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "attn_drop") and hasattr(module, "fused_attn"):
            module.fused_attn, module.attn_drop = False, make()
    return model


@pytest.mark.parametrize(("family", "mode"), [*((f, "relative") for f in SUPPORTED), ("vit", "absolute")])
def test_equals_timm_with_the_formula(family, mode):
    threshold = 0.1 if mode == "relative" else 0.02
    model, x = sharp(family).eval().double(), images(family).double()
    reference = by_timm(model, lambda: Reference(threshold, 0.5, mode).double())
    keys = set(model.state_dict())
    sparsify(model, SATA(threshold, mode=mode))
    added = set(model.state_dict()) - keys
    layers = [m for m in model.modules() if isinstance(m, PatternAttention)]
    assert len(added) == len(layers) > 0
    assert all(key.endswith("attn.sparse.transform.scale") for key in added)
    assert keys <= set(model.state_dict())
    out, expected = model(x), reference(x)
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), [m.transform.scale for m in layers])
    theirs = [m.scale for m in reference.modules() if isinstance(m, Reference)]
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), theirs), rtol=1e-5, atol=1e-6)
    assert all(float(g) != 0 for g in ours[:-1])


@pytest.mark.parametrize("spec", [LSA(), SATA(over=LSA()), SATA(over=Dense(temperature=2.0)), Dense(temperature=3.0)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_lsa_and_temperature_by_formula(spec, prefix):
    torch.manual_seed(0)
    layer = SparseAttention(24, 3, spec=spec, prefix_tokens=prefix).double()
    if layer.sparse.temperature is not None:
        assert layer.sparse.temperature.tolist() == pytest.approx([8**-0.5] * 3)
        nn.init.uniform_(layer.sparse.temperature, 0.2, 2.0)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(2, 10, 3, 3, 8).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT
    if layer.sparse.temperature is not None:
        scores = scores * layer.sparse.temperature[:, None, None]
        scores = scores.masked_fill(torch.eye(10, dtype=torch.bool), -torch.inf)
    else:
        scores = scores * 8**-0.5 * spec.temperature
    weights = scores.softmax(-1)
    if isinstance(spec, SATA):
        weights = Reference(0.1, 0.5, "relative").double()(weights)
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected)
    leaves = [p for n, p in layer.named_parameters() if "transform" not in n]
    torch.testing.assert_close(
        torch.autograd.grad(layer(x).square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves)
    )


@pytest.mark.parametrize("on", [Fibottention(), Longformer(), LSA(), Neighborhood(3, rel_pos_bias=True)])
@pytest.mark.parametrize("family", ["vit", "dinov3"])
def test_sata_on_other_specs_trains(family, on):
    model, x = sharp(family), images(family)
    sparsify(model, SATA(over=on))
    model(x).square().sum().backward()
    layers = [m for m in model.modules() if isinstance(m, PatternAttention)]
    assert all(m.transform.scale.grad is not None and m.transform.scale.grad.isfinite() for m in layers)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert any(float(m.transform.scale.grad) != 0 for m in layers)


@pytest.mark.parametrize("spec", [SATA(), LSA(), Dense(temperature=2.0)])
@pytest.mark.parametrize("family", ["convit", "cait"])
def test_refused_where_it_would_mean_something_else(family, spec):
    model = build(family)
    keys = set(model.state_dict())
    with pytest.raises(ValueError, match=f"{spec.name} is not supported by (GPSA|TalkingHeadAttn) at"):
        sparsify(model, spec)
    assert set(model.state_dict()) == keys
    sparsify(model, Dense())


@pytest.mark.parametrize("name", ["mvitv2_tiny", "hiera_tiny_224", "xcit_nano_12_p16_224", "volo_d1_224", "levit_128s"])
def test_other_families_are_refused_by_name(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=f"sparsify does not support {type(model).__name__}"):
        sparsify(model, SATA())


def test_a_layer_that_is_not_used_is_noticed_in_the_first_forward_pass():
    model, x = build("vit"), images("vit")
    sparsify(model, SATA())
    copied = copy.deepcopy(model)
    model(x)
    model(x)
    model.blocks[1].attn.forward = lambda x, **_: x
    model(x)  # only the first pass is watched
    copied.blocks[1].attn = nn.Identity()
    copied.blocks[1].attn.forward = lambda x, **_: x
    with pytest.raises(RuntimeError, match=r"1 attention layers were not used .* blocks.1.attn"):
        copied(x)
    copied(x)


def test_compiles_in_one_graph():
    model, x = build("vit").eval(), images("vit")
    sparsify(model, SATA(over=Fibottention()))
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_s_is_not_decayed():
    from timm.optim import param_groups_weight_decay

    model = build("vit")
    sparsify(model, SATA(over=LSA()))
    groups = param_groups_weight_decay(model, 0.05)
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    layers = [m for m in model.modules() if isinstance(m, PatternAttention)]
    assert not any(id(m.transform.scale) in decayed or id(m.temperature) in decayed for m in layers)
