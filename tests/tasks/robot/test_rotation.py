import math

import pytest
import torch
from scipy.spatial.transform import Rotation

from fibottention.tasks.robot.rotation import (
    axis_angle_to_6d,
    axis_angle_to_matrix,
    matrix_to_axis_angle,
    rotation_6d_to_axis_angle,
)


def rotations(dtype=torch.float64):
    found = torch.from_numpy(Rotation.random(500, random_state=0).as_rotvec()).to(dtype)
    axes = torch.nn.functional.normalize(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    angles = torch.tensor([0.0, 1e-12, 1e-6, 1e-3, math.pi / 2, math.pi - 1e-3, math.pi - 1e-7, math.pi])
    return torch.cat([found, (axes[:, None] * angles[:, None]).reshape(-1, 3).to(dtype)])


def test_matrices_are_those_of_scipy():
    turns = rotations()
    torch.testing.assert_close(
        axis_angle_to_matrix(turns),
        torch.from_numpy(Rotation.from_rotvec(turns.numpy()).as_matrix()),
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-3)])
def test_both_ways_give_the_same_rotation(dtype, tolerance):
    """Near half a turn the axis may point the other way, so matrices are compared; float32 knows pi to 1e-7 and its
    sine to the root of that."""
    turns = rotations(dtype)
    for back in (
        matrix_to_axis_angle(axis_angle_to_matrix(turns)),
        rotation_6d_to_axis_angle(axis_angle_to_6d(turns)),
    ):
        torch.testing.assert_close(axis_angle_to_matrix(back), axis_angle_to_matrix(turns), atol=tolerance, rtol=0)
        assert (back.norm(dim=-1) <= math.pi + 1e-5).all()


def test_six_numbers_are_the_first_two_rows():
    turn = torch.tensor([0.0, 0.0, math.pi / 2], dtype=torch.float64)  # x to y
    torch.testing.assert_close(
        axis_angle_to_6d(turn), torch.tensor([0, -1, 0, 1, 0, 0], dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_six_numbers_need_not_be_those_of_a_rotation():
    turns = rotations()[:500]
    six = axis_angle_to_6d(turns)
    # Longer rows, and a second row with a part of the first: Gram-Schmidt takes both away.
    bent = torch.cat([3 * six[:, :3], 0.5 * six[:, 3:] + 0.7 * six[:, :3]], dim=-1)
    torch.testing.assert_close(rotation_6d_to_axis_angle(bent), turns, atol=1e-9, rtol=0)
