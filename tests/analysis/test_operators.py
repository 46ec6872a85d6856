"""Receptive fields as published, and costs as counted in real layers."""

import json

import pytest
import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fibottention import Dense, Longformer, NeighborhoodAttention2D
from fibottention.analysis.operators import operators
from fibottention.cli import main
from fibottention.specs import Neighborhood, TopK


@pytest.mark.parametrize(("kernel_size", "layers"), [(3, 1), (3, 2), (3, 3), (5, 2), (7, 2), (3, 4)])
def test_receptive_fields_as_published(kernel_size, layers):
    """Facts on neighborhood attention: after l layers with kernel k."""
    side = kernel_size ** (layers + 1)
    assert all(row.field[0] == row.field[1] for row in operators(side, 8, 2, kernel_size, layers))
    field = {row.name: row.field[0] for row in operators(side, 8, 2, kernel_size, layers)}
    grows = layers * (kernel_size - 1) + 1
    assert field == {
        "convolution": grows,
        "depthwise convolution": grows,
        "dilated convolution": kernel_size**layers,
        "self-attention": side,
        "window attention": kernel_size,
        "shifted-window attention": layers * kernel_size,
        "neighborhood attention": grows,
        "dilated neighborhood attention": kernel_size**layers,
    }


def counted(module, x):
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() // 2


def test_costs_are_those_that_are_counted():
    side, dim, heads, kernel = 9, 16, 2, 3
    rows = {row.name: row for row in operators(side, dim, heads, kernel, 2)}
    image, tokens = torch.zeros(1, dim, side, side), torch.zeros(1, side**2, dim)
    conv = nn.Conv2d(dim, dim, kernel, padding=1, bias=False)
    depthwise = nn.Conv2d(dim, dim, kernel, padding=1, groups=dim, bias=False)
    attention = timm.layers.Attention(dim, heads, proj_bias=False)
    windows = timm.layers.Attention(dim, heads, proj_bias=False)
    near = NeighborhoodAttention2D(dim, num_heads=heads, kernel_size=kernel, qkv_bias=False)
    near.backend = "gather"
    for name, module, x in (
        ("convolution", conv, image),
        ("depthwise convolution", depthwise, image),
        ("self-attention", attention, tokens),
        ("window attention", windows, tokens.view(-1, kernel**2, dim)),
        ("neighborhood attention", near, image.movedim(1, -1)),
    ):
        assert rows[name].macs == counted(module, x), name
        assert rows[name].parameters == sum(p.numel() for p in module.parameters() if p.ndim > 1), name
    assert rows["self-attention"].stored_weights == side**4 * heads
    assert rows["neighborhood attention"].stored_weights == side**2 * kernel**2 * heads


def test_command(capsys):
    assert main(["operators", "--side", "14", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 8
    assert main(["operators"]) == 0
    assert "dilated neighborhood" in capsys.readouterr().out
    for words, message in (
        (["--kernel-size", "4"], "kernel_size must be odd and in 1..side (56), got 4"),
        (["--kernel-size", "77"], "kernel_size must be odd and in 1..side (56), got 77"),
        (["--dim", "0"], "dim must be at least 1, got 0"),
    ):
        assert main(["operators", *words]) == 2
        assert message in capsys.readouterr().err


def test_specs_are_further_rows():
    """A neighborhood as a spec is that of the table; BigBird's global token sees all."""
    specs = {"near": Neighborhood(3), "far": Neighborhood(3, dilation=(1, 3)), "top": TopK(3), "raster": Longformer(1)}
    rows = {row.name: row for row in operators(9, 16, 2, 3, 2, {**specs, "all": Dense()})}
    for name, same in (("near", "neighborhood attention"), ("far", "dilated neighborhood attention")):
        ours, theirs = rows[name], rows[same]
        assert (ours.field, ours.macs, ours.stored_weights) == (theirs.field, theirs.macs, theirs.stored_weights)
        assert ours.reached == pytest.approx(theirs.reached)
    assert rows["all"].macs == rows["self-attention"].macs
    assert (rows["all"].field, rows["top"].field, rows["all"].reached) == ((9, 9), (9, 9), 1.0)
    # Two layers of one token to each side, along the raster: five tokens of the central row.
    assert (rows["raster"].field, rows["raster"].reached) == ((1, 5), pytest.approx(5 / 81))


def test_specs_on_the_command_line(capsys):
    assert main(["operators", "fibottention", "longformer:window=3", "--side", "14", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows[-2:]] == ["fibottention", "longformer:window=3"]
    assert main(["operators", "fibotention"]) == 2
    assert "did you mean 'fibottention'" in capsys.readouterr().err
