"""Rotations as axis and angle, matrix, and six numbers (Zhou et al., arXiv 1812.07035, the first two rows)."""

import torch
from torch import Tensor

__all__ = ["axis_angle_to_6d", "axis_angle_to_matrix", "matrix_to_axis_angle", "rotation_6d_to_axis_angle"]


def axis_angle_to_matrix(rotation: Tensor) -> Tensor:
    """Matrices ``(..., 3, 3)`` of rotations ``(..., 3)``: axis times angle in radians (Rodrigues' formula)."""
    x, y, z = rotation.unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))
    angle = rotation.norm(dim=-1)[..., None, None]
    unit = torch.eye(3, dtype=rotation.dtype, device=rotation.device)
    # The square of the cross product's matrix, without a matrix product, which autocast would round.
    square = rotation[..., :, None] * rotation[..., None, :] - angle**2 * unit
    # sin(a)/a and (1 - cos(a))/a^2, both smooth at 0.
    first = torch.sinc(angle / torch.pi)
    second = torch.sinc(angle / (2 * torch.pi)) ** 2 / 2
    return unit + first * cross + second * square


def matrix_to_axis_angle(matrix: Tensor) -> Tensor:
    """Rotations ``(..., 3)`` of matrices ``(..., 3, 3)``, with angles from 0 to pi."""
    m = matrix
    # The quaternion by its largest part, so that nothing small is divided by (Shepperd's method).
    w, x, y, z = (
        1 + m[..., 0, 0] + m[..., 1, 1] + m[..., 2, 2],
        1 + m[..., 0, 0] - m[..., 1, 1] - m[..., 2, 2],
        1 - m[..., 0, 0] + m[..., 1, 1] - m[..., 2, 2],
        1 - m[..., 0, 0] - m[..., 1, 1] + m[..., 2, 2],
    )
    yz, zx, xy = (m[..., i, j] - m[..., j, i] for i, j in ((2, 1), (0, 2), (1, 0)))
    sum_xy, sum_xz, sum_yz = (m[..., i, j] + m[..., j, i] for i, j in ((0, 1), (0, 2), (1, 2)))
    candidates = torch.stack(
        [
            torch.stack([w, yz, zx, xy], -1),
            torch.stack([yz, x, sum_xy, sum_xz], -1),
            torch.stack([zx, sum_xy, y, sum_yz], -1),
            torch.stack([xy, sum_xz, sum_yz, z], -1),
        ],
        dim=-2,
    )
    largest = torch.stack([w, x, y, z], -1).argmax(-1)
    quaternion = candidates.gather(-2, largest[..., None, None].expand(*largest.shape, 1, 4)).squeeze(-2)
    quaternion = torch.nn.functional.normalize(quaternion, dim=-1)
    quaternion = torch.where(quaternion[..., :1] < 0, -quaternion, quaternion)
    real, vector = quaternion[..., :1], quaternion[..., 1:]
    sine = vector.norm(dim=-1, keepdim=True)
    angle = 2 * torch.atan2(sine, real)
    return vector * torch.where(sine > 1e-8, angle / sine.clamp(min=1e-8), torch.full_like(sine, 2.0))


def axis_angle_to_6d(rotation: Tensor) -> Tensor:
    """Six numbers ``(..., 6)`` of rotations ``(..., 3)``."""
    return axis_angle_to_matrix(rotation)[..., :2, :].flatten(-2)


def rotation_6d_to_axis_angle(rotation: Tensor) -> Tensor:
    """Rotations ``(..., 3)`` of six numbers ``(..., 6)``, which need not be those of a rotation (Gram-Schmidt)."""
    first = torch.nn.functional.normalize(rotation[..., :3], dim=-1)
    second = rotation[..., 3:] - (first * rotation[..., 3:]).sum(-1, keepdim=True) * first
    second = torch.nn.functional.normalize(second, dim=-1)
    matrix = torch.stack([first, second, torch.linalg.cross(first, second)], dim=-2)
    return matrix_to_axis_angle(matrix)
