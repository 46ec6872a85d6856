"""Receptive fields against the formulas of arXiv 2209.15001, table 1 (facts on neighborhood attention, section 4)."""

import pytest
import timm
import torch
from torch import nn

from fibottention import NeighborhoodAttention1D, NeighborhoodAttention2D
from fibottention.analysis.receptive_field import influence, level_fields
from tests.models.test_neighborhood_transformer import small


def stack(kernel, dilations, axes=1):
    torch.manual_seed(0)
    layer = NeighborhoodAttention1D if axes == 1 else NeighborhoodAttention2D
    return nn.Sequential(*(layer(4, 2, kernel, dilation=d, rel_pos_bias=True) for d in dilations)).double()


def field(layers, *grid):
    """Number of inputs with a non-zero gradient of the central output."""
    x = torch.randn(1, 4, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = influence(lambda x: layers(x.movedim(1, -1)).movedim(-1, 1), x, [n // 2 for n in grid])
    return int((seen > 0).sum())


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_neighborhood_attention_grows_linearly(kernel, depth):
    assert field(stack(kernel, [1] * depth), 101) == depth * (kernel - 1) + 1


@pytest.mark.parametrize(("kernel", "depth"), [(3, 1), (3, 2), (3, 3), (3, 4), (5, 2), (5, 3)])
def test_dilated_attention_grows_exponentially_at_most(kernel, depth):
    grown = [kernel**layer for layer in range(depth)]
    length = kernel**depth
    # One window more on each side, so that no window on the way is shifted at a border.
    assert field(stack(kernel, grown), 3 * length) == kernel**depth
    assert field(stack(kernel, grown[::-1]), 3 * length) == kernel**depth


def test_in_two_dimensions_it_is_the_square():
    assert field(stack(3, [1, 1], axes=2), 15, 15) == 5**2
    assert field(stack(3, [1, 3], axes=2), 27, 27) == 9**2


def test_levels_of_a_model():
    options = {"depths": (3, 1, 1, 1), "num_heads": (1, 1, 2, 4), "embed_dim": 8}
    nat, *_ = level_fields(small("nat_mini", **options), (224, 224))
    # 3 * (7 - 1) + 1 tokens, 4 pixels apart, each seeing 7 pixels through the two convolutions of the tokenizer.
    assert nat.own_size == (19, 19)
    assert nat.size == (18 * 4 + 7, 18 * 4 + 7)
    assert nat.share == pytest.approx((79 / 224) ** 2)
    dinat, *rest = level_fields(small("dinat_mini", **options), (224, 224))
    assert dinat.dilations == (1, 8, 1)
    assert dinat.own_size == (56, 56)
    assert rest[-1].size == (224, 224)


def test_nothing_is_drawn_from_the_global_generator():
    model = timm.create_model("nat_mini", depths=(1,), num_heads=(1,), embed_dim=8)
    state = torch.get_rng_state()
    level_fields(model, (64, 64))
    assert torch.equal(torch.get_rng_state(), state)
