"""What a policy sees and does: names and sizes, and where demonstrations keep them."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.robot.config import RobotDataConfig
from fibottention.tasks.robot.environments import EnvironmentSpec
from fibottention.tasks.robot.rotation import axis_angle_to_6d, rotation_6d_to_axis_angle

__all__ = ["PolicyShapes", "observed_names"]


@dataclass(frozen=True)
class PolicyShapes:
    """Names and sizes of what a policy sees and does.

    Attributes:
        cameras: Height and width of each image before the crop.
        states: Length of each vector.
        action_dim: Numbers in an action of the robot.
        rotation: Place where axis and angle begin in it; None if it has no rotation.
    """

    cameras: dict[str, tuple[int, int]]
    states: dict[str, int]
    action_dim: int
    rotation: int | None

    @property
    def learned_action_dim(self) -> int:
        """Numbers in an action as the network sees it."""
        return self.action_dim + (3 if self.rotation is not None else 0)

    @property
    def learned_rotation(self) -> slice | None:
        """The six numbers of the rotation in it."""
        return None if self.rotation is None else slice(self.rotation, self.rotation + 6)

    def learned_actions(self, actions: Tensor) -> Tensor:
        """Actions ``(..., action_dim)`` as the network sees them, before they are scaled."""
        if self.rotation is None:
            return actions
        before, turn, after = actions.split([self.rotation, 3, self.action_dim - self.rotation - 3], dim=-1)
        return torch.cat([before, axis_angle_to_6d(turn), after], dim=-1)

    def robot_actions(self, learned: Tensor) -> Tensor:
        """Back from ``(..., learned_action_dim)``."""
        if self.rotation is None:
            return learned
        before, turn, after = learned.split([self.rotation, 6, self.action_dim - self.rotation - 3], dim=-1)
        return torch.cat([before, rotation_6d_to_axis_angle(turn), after], dim=-1)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PolicyShapes":
        """From what `to_dict` gives, also after a way through JSON."""
        return cls(**{**values, "cameras": {name: tuple(size) for name, size in values["cameras"].items()}})


def observed_names(
    data: RobotDataConfig, environment: EnvironmentSpec | None, kind: str
) -> tuple[dict[str, str], dict[str, str], str]:
    """Columns of the cameras and states by name, and that of the actions.

    Args:
        data: The options.
        environment: The environment of the rollouts.
        kind: Format of the demonstrations.

    Raises:
        UserError: If names are missing or the environment has others.
    """
    defaults = environment.columns[kind] if environment else {}
    chosen = {}
    for option, of_environment in (
        ("cameras", environment.cameras if environment else ()),
        ("states", tuple(environment.states) if environment else ()),
    ):
        names = getattr(data, option)
        if names is None:
            if environment is None:
                raise UserError(f"data.{option} must name what the policy sees, since there is no rollout.environment")
            names = list(of_environment)
        for name in names:
            if environment is not None and name not in of_environment:
                raise UserError(
                    f"data.{option}: {environment.name} has no {name!r}{nearest(name, list(of_environment))}"
                )
        for name in names:
            if "." in name or name == "action" or names.count(name) > 1 or name in chosen.get("cameras", ()):
                raise UserError(
                    f"data.{option}: {name!r} is not a name of its own without dots; data.columns says where it is kept"
                )
        chosen[option] = {name: data.columns.get(name, defaults.get(name, name)) for name in names}
    if not chosen["cameras"]:
        raise UserError("data.cameras must name at least one camera, got none")
    known = [*chosen["cameras"], *chosen["states"], "action"]
    for name in data.columns:
        if name not in known:
            raise UserError(f"data.columns: nothing is named {name!r}{nearest(name, known)}")
    action = data.columns.get("action", defaults.get("action", "actions" if kind == "hdf5" else "action"))
    return chosen["cameras"], chosen["states"], action
