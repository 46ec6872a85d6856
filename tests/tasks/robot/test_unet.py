import math

import pytest
import torch
import torch.nn.functional as F

from fibottention.tasks.robot.unet import ConditionalUNet1d, _ConditionalBlock, _SinusoidalEmbedding


def test_it_has_as_many_parameters_as_diffusion_policys():
    """Diffusion Policy's notebook for PushT from states prints 6.535322e+07 for these sizes: 2 steps of 5 numbers."""
    unet = ConditionalUNet1d(2, 2 * 5, (256, 512, 1024), 5, 256)
    assert f"{sum(p.numel() for p in unet.parameters()):.6e}" == "6.535322e+07"


@pytest.mark.parametrize(("down_dims", "middle"), [((8, 16, 24), 4), ((8, 16), 8), ((8,), 16)])
def test_shapes(down_dims, middle):
    unet = ConditionalUNet1d(3, 7, down_dims, 3, 8, groups=4)
    noise, features = unet(torch.randn(5, 16, 3), torch.tensor([0, 1, 2, 50, 99]), torch.randn(5, 7))
    assert noise.shape == (5, 16, 3)
    assert features.shape == (5, down_dims[-1], middle)


def test_steps_become_sines_and_cosines():
    embedded = _SinusoidalEmbedding(6)(torch.tensor([0, 3]))
    # Frequencies 1, 1/100, 1/10000.
    angles = [3 * f for f in (1, 1e-2, 1e-4)]
    assert embedded[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert embedded[1].tolist() == pytest.approx([*map(math.sin, angles), *map(math.cos, angles)], abs=1e-6)


def test_a_block_by_hand():
    """Convolution, group norm, Mish, FiLM, the same again, and the residual."""
    torch.manual_seed(0)
    block = _ConditionalBlock(2, 4, 3, 3, 2)
    x, condition = torch.randn(1, 2, 6), torch.randn(1, 3)
    conv1, norm1 = block.first[0], block.first[1]
    conv2, norm2 = block.second[0], block.second[1]
    told = F.linear(F.mish(condition), block.film[1].weight, block.film[1].bias)
    scale, shift = told[:, :4, None], told[:, 4:, None]
    h = F.mish(F.group_norm(F.conv1d(x, conv1.weight, conv1.bias, padding=1), 2, norm1.weight, norm1.bias))
    h = scale * h + shift
    h = F.mish(F.group_norm(F.conv1d(h, conv2.weight, conv2.bias, padding=1), 2, norm2.weight, norm2.bias))
    h = h + F.conv1d(x, block.residual.weight, block.residual.bias)
    torch.testing.assert_close(block(x, condition), h)


def test_every_parameter_is_used_and_rows_do_not_mix():
    torch.manual_seed(0)
    unet = ConditionalUNet1d(2, 4, (8, 16), 3, 8, groups=4).double()
    actions, steps, condition = torch.randn(3, 8, 2).double(), torch.tensor([5, 6, 7]), torch.randn(3, 4).double()
    noise, features = unet(actions, steps, condition)
    (noise.square().sum() + features.square().sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in unet.parameters())
    alone, _ = unet(actions[1:2], steps[1:2], condition[1:2])
    torch.testing.assert_close(alone, noise[1:2], atol=1e-12, rtol=0)
