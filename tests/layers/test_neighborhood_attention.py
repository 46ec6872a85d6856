import pytest
import torch

from fibottention import NeighborhoodAttention1D, NeighborhoodAttention2D, NeighborhoodAttention3D
from tests.ops.test_neighborhood import oracle

LAYERS = {1: NeighborhoodAttention1D, 2: NeighborhoodAttention2D, 3: NeighborhoodAttention3D}
GRIDS = {1: (12,), 2: (7, 8), 3: (4, 6, 7)}


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def by_formula(layer, x):
    """The layer as the papers describe it: project, attend, project."""
    q, k, v = (t.unflatten(-1, (layer.num_heads, -1)) for t in layer.qkv(x).chunk(3, -1))
    out, _ = oracle(q, k, v, layer.kernel_size, layer.stride, layer.dilation, layer.is_causal, layer.scale, layer.rpb)
    return layer.proj(out.flatten(-2))


@pytest.mark.parametrize("axes", LAYERS)
@pytest.mark.parametrize("options", [{}, {"rel_pos_bias": True, "dilation": 2}, {"stride": 2, "is_causal": True}])
def test_values_and_gradients(axes, options):
    torch.manual_seed(0)
    layer = LAYERS[axes](12, 3, 3 if axes < 3 else 2, **options).double()
    x = draw(2, *GRIDS[axes], 12).requires_grad_()
    out, expected = layer(x), by_formula(layer, x)
    torch.testing.assert_close(out, expected)
    grad = draw(*out.shape)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad((out * grad).sum(), leaves), torch.autograd.grad((expected * grad).sum(), leaves)
    )


@pytest.mark.parametrize(("axes", "grid"), [(1, (5,)), (2, (4, 9)), (2, (9, 4)), (2, (1, 1)), (3, (2, 9, 3))])
def test_small_inputs_are_padded_with_zeros_at_the_end_before_the_projection(axes, grid):
    torch.manual_seed(0)
    layer = LAYERS[axes](8, 2, 3, dilation=2, rel_pos_bias=True).double()
    torch.nn.init.normal_(layer.qkv.bias)
    x = draw(2, *grid, 8)
    padded = torch.zeros(2, *(max(n, 6) for n in grid), 8, dtype=torch.float64)
    inside = (slice(None), *(slice(n) for n in grid))
    padded[inside] = x
    torch.testing.assert_close(layer(x), by_formula(layer, padded)[inside])


def test_parameter_names_and_shapes_are_those_of_natten():
    layer = NeighborhoodAttention3D(24, 3, (3, 5, 7), rel_pos_bias=True)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "qkv.weight": (72, 24),
        "qkv.bias": (72,),
        "rpb": (3, 5, 9, 13),
        "proj.weight": (24, 24),
        "proj.bias": (24,),
    }
    assert set(NeighborhoodAttention1D(8, 2, 3, qkv_bias=False).state_dict()) == {
        "qkv.weight",
        "proj.weight",
        "proj.bias",
    }


def test_dropout_only_in_training():
    torch.manual_seed(0)
    layer = NeighborhoodAttention2D(8, 2, 3, attn_drop=0.5, proj_drop=0.2)
    x = draw(1, 6, 6, 8, dtype=torch.float32)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((10, 3, 3), {}, "embed_dim must be divisible by num_heads, got 10 and 3"),
        ((9, 3, (3, 3, 3)), {}, "kernel_size must be a whole number or 2 of them"),
        ((9, 3, 3, 2), {"rel_pos_bias": True}, "rel_pos_bias=True needs stride=1"),
        ((9, 3, 0), {}, "kernel_size must be at least 1, got 0"),
        ((9, 3, 3), {"dilation": True}, "dilation must be a whole number or 2 of them, got True"),
        ((9, 3, 3), {"attn_drop": 1.0}, r"attn_drop must be in \[0, 1\), got 1.0"),
        ((9, 3, 3), {"backend": "gpu"}, "backend must be one of auto, natten, .* got 'gpu'"),
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        NeighborhoodAttention2D(*arguments, **options)


def test_channels_in_another_axis_are_refused():
    with pytest.raises(ValueError, match="x must have embed_dim=8 channels in its last axis, got 6"):
        NeighborhoodAttention2D(8, 2, 3)(torch.zeros(1, 8, 6, 6))


def test_a_flat_sequence_is_refused_by_the_layer_for_images():
    with pytest.raises(ValueError, match=r"x must have 4 axes, \(B, \*grid, embed_dim\), got shape \(1, 36, 8\)"):
        NeighborhoodAttention2D(8, 2, 3)(torch.zeros(1, 36, 8))
