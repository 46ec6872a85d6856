import subprocess
import sys

import pytest
import torch

from fibottention.compat import natten
from fibottention.compat.natten import functional
from tests.ops.test_neighborhood import oracle

GRIDS = {1: (9,), 2: (6, 7), 3: (4, 6, 7)}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def expected(axes, q, k, v, kernel, dilation, rpb=None, more=None):
    last = [t.movedim(1, -2) for t in (q, k, v)]
    more = None if more is None else [t.transpose(1, 2) for t in more]
    ones, falses = (1,) * axes, (False,) * axes
    return oracle(*last, kernel, ones, dilation, falses, 1.0, rpb, more)[0].movedim(-2, 1)


def check(ours, theirs, leaves):
    torch.testing.assert_close(ours, theirs)
    grad = draw(*ours.shape, seed=5).detach()
    torch.testing.assert_close(
        torch.autograd.grad((ours * grad).sum(), leaves), torch.autograd.grad((theirs * grad).sum(), leaves)
    )


@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_oldest_names(axes, dilation):
    """How transformers, all-in-one and the papers' code call them: by position."""
    q, k, v = (draw(2, 3, *GRIDS[axes], 4, seed=s) for s in range(3))
    kernel = (3,) * axes if axes < 3 else (2, 3, 3)
    dilations = (dilation,) * axes
    rpb = draw(3, *(2 * size - 1 for size in kernel), seed=4)
    sizes = (3, dilation) if axes < 3 else (2, 3, dilation, dilation)
    scores = getattr(functional, f"natten{axes}dqkrpb")(q, k, rpb, *sizes)
    window = {1: 3, 2: 9, 3: 18}[axes]
    assert scores.shape == (2, 3, *GRIDS[axes], window)
    out = getattr(functional, f"natten{axes}dav")(scores.softmax(-1), v, *sizes)
    check(out, expected(axes, q, k, v, kernel, dilations, rpb), (q, k, v, rpb))
    plain = getattr(functional, f"natten{axes}dqk")(q, k, *sizes)
    out = getattr(functional, f"natten{axes}dav")(plain.softmax(-1), v, *sizes)
    check(out, expected(axes, q, k, v, kernel, dilations), (q, k, v))


@pytest.mark.parametrize("axes", GRIDS)
def test_the_names_of_0_17(axes):
    """How StyleNAT calls them: by name, with additional keys in natten's place at the end of the window."""
    q, k, v = (draw(2, 3, *GRIDS[axes], 4, seed=s) for s in range(3))
    more_k, more_v = draw(2, 3, 5, 4, seed=6), draw(2, 3, 5, 4, seed=7)
    rpb = draw(3, *[5] * axes, seed=4)
    scores = getattr(functional, f"na{axes}d_qk")(
        query=q, key=k, kernel_size=3, dilation=1, additional_keys=more_k, rpb=rpb
    )
    torch.testing.assert_close(scores[..., -5:], (q.flatten(2, -2) @ more_k.mT).view(*q.shape[:-1], 5))
    out = getattr(functional, f"na{axes}d_av")(
        scores.softmax(-1), v, kernel_size=3, dilation=1, additional_values=more_v
    )
    assert getattr(functional, f"na{axes}d_qk")(q[:0], k[:0], 3).shape == (0, *scores.shape[1:-1], scores.shape[-1] - 5)
    ones = (1,) * axes
    check(out, expected(axes, q, k, v, (3,) * axes, ones, rpb, (more_k, more_v)), (q, k, v, rpb, more_k, more_v))


def test_the_window_is_in_row_major_order():
    key = torch.arange(42.0).view(1, 1, 6, 7, 1)
    scores = functional.na2d_qk(torch.ones_like(key), key, 3)
    assert scores[0, 0, 2, 3].tolist() == [9, 10, 11, 16, 17, 18, 23, 24, 25]


def test_fused_functions_take_the_rest_by_name():
    q = draw(1, 6, 7, 2, 4).detach()
    out = natten.na2d(q, q, q, 3, scale=1.0, dilation=2)  # as k-diffusion does
    torch.testing.assert_close(out, oracle(q, q, q, (3, 3), (1, 1), (2, 2), (False, False), 1.0)[0])
    with pytest.raises(TypeError, match="positional arguments"):
        natten.na2d(q, q, q, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_and_out(dtype):
    q = draw(1, 2, 6, 7, 8).detach().to(dtype)
    scores = functional.na2d_qk(q, q, 3)
    out = functional.na2d_av(scores.softmax(-1), q, 3)
    assert scores.dtype == out.dtype == dtype


def test_causal_windows_are_refused():
    q = draw(1, 2, 6, 7, 8)
    with pytest.raises(NotImplementedError, match="is_causal is not supported"):
        functional.na2d_qk(q, q, 3, is_causal=(True, False))


def test_bad_shapes_are_named():
    q = draw(1, 2, 6, 7, 8)
    with pytest.raises(ValueError, match="key must have the shape of query"):
        functional.na2d_qk(q, q[:, :1], 3)
    with pytest.raises(ValueError, match=r"attn must be of shape \(1, 2, 6, 7, 9\), got \(1, 2, 6, 7, 8\)"):
        functional.na2d_av(q, q, 3)
    with pytest.raises(ValueError, match="rpb must be of shape"):
        functional.na2d_qk(q, q, 3, rpb=torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match=r"expected a tensor \(B, heads, \*grid, channels\) of 4 axes"):
        functional.na1d_qk(q, q, 3)


def test_modules_have_the_old_arguments_and_a_relative_bias_unless_told():
    old = natten.NeighborhoodAttention2D(
        dim=8, kernel_size=3, dilation=None, num_heads=2, qkv_bias=True, qk_scale=None, attn_drop=0.0, proj_drop=0.0
    )
    assert old.rpb.shape == (2, 5, 5)
    assert old.dilation == (1, 1)
    assert natten.NeighborhoodAttention2D(8, 2, 3, 2, bias=False).rpb is None
    assert natten.NeighborhoodAttention2D(8, 2, 3, 2, rel_pos_bias=False).rpb is None
    assert natten.NeighborhoodAttention1D(8, 2, 3, 2)(torch.zeros(1, 9, 8)).shape == (1, 9, 8)
    assert natten.NeighborhoodAttention3D(8, 2, 3)(torch.zeros(1, 3, 4, 5, 8)).shape == (1, 3, 4, 5, 8)


def test_numbers_for_the_depth():
    layer = natten.NeighborhoodAttention3D(8, 2, 3, kernel_size_d=5, dilation=2, dilation_d=1)
    assert (layer.kernel_size, layer.dilation) == ((5, 3, 3), (1, 2, 2))
    assert natten.NeighborhoodAttention3D(8, 2, 3, dilation=None).dilation == (1, 1, 1)
    with pytest.raises(TypeError, match="positional argument"):
        natten.NeighborhoodAttention3D(8, 2, 3, 5)
    q = draw(1, 2, 4, 6, 7, 4)
    with pytest.raises(TypeError, match="positional argument"):
        functional.na3d_qk(q, q, 3, 5, 1, 1)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_install_serves_code_that_imports_natten():
    """The imports of StyleNAT, OneFormer, k-diffusion, OverLoCK and transformers, in a process of their own."""
    result = run("""
import importlib.metadata, importlib.util
from fibottention.compat.natten import install
install()
install()
assert importlib.util.find_spec("natten") is not None
print(importlib.metadata.version("natten"))
import natten
from natten.functional import na2d_av, na2d_qk, natten1dav, natten1dqkrpb, natten2dav, natten2dqkrpb
from natten.functional import na2d_qk_with_bias, natten2dqk, natten3dqkrpb
from natten import NeighborhoodAttention1D, NeighborhoodAttention2D, use_fused_na, use_autotuner
from natten.natten2d import na2d_qk_with_bias as again, natten2dqkrpb as old, NeighborhoodAttention2D as layer_2d
from natten.natten1d import natten1dav as of_one_axis
from natten.functional import NATTEN2DQKRPBFunction, NATTEN2DAVFunction, NATTEN1DAVFunction
assert again is na2d_qk_with_bias and old is natten2dqkrpb and of_one_axis is natten1dav
assert layer_2d is NeighborhoodAttention2D and not hasattr(natten.natten1d, "natten2dav")
import torch
q = torch.randn(1, 2, 9, 9, 4)
weights = NATTEN2DQKRPBFunction.apply(q, q, torch.zeros(2, 13, 13), 7, 1).softmax(-1)
assert NATTEN2DAVFunction.apply(weights, q, 7, 1).shape == q.shape
use_fused_na(True)
use_autotuner(True)
assert natten.has_fused_na() and not natten.has_natten()
layer = NeighborhoodAttention2D(dim=8, kernel_size=7, dilation=2, num_heads=2)
layer(torch.zeros(1, 9, 20, 8)).sum().backward()
from transformers.utils import is_natten_available
print(is_natten_available())
""")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0.15.1", "True"]


def test_install_does_not_hide_a_natten_that_is_installed(tmp_path):
    (tmp_path / "natten.py").write_text("__version__ = '0.21.7'")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from fibottention.compat import natten as ours
assert ours.has_natten()
try:
    ours.install()
except RuntimeError as error:
    print(error)
ours.install(replace=True)
import natten
assert natten is ours
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("natten is installed; uninstall it")
