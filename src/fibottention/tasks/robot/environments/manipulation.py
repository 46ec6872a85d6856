"""Lift and PickPlaceCan of robosuite, with a Panda arm and absolute poses as actions."""

import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fibottention.errors import UserError
from fibottention.tasks.robot.environments.base import EnvironmentSpec
from fibottention.tasks.robot.environments.specs import ROBOSUITE_NAMES

__all__ = ["Manipulation", "make"]


class Manipulation:
    """See `Environment`. The reward is 1 once the task is done.

    An action is the pose that the hand is to have, in the world (position in metres, axis and angle), and the gripper,
    -1 open to 1 closed.

    Attributes:
        simulator: robosuite's environment, of which an expert reads where things are.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        # Without a display, MuJoCo draws with the GPU's or the CPU's own library.
        if sys.platform == "linux" and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")
        try:
            import robosuite  # pyright: ignore[reportMissingImports]
            from robosuite.controllers import (  # pyright: ignore[reportMissingImports]
                load_composite_controller_config,
            )

            controller = load_composite_controller_config(robot="Panda")
            controller["body_parts"]["right"].update(input_type="absolute", input_ref_frame="world")
            self.simulator: Any = robosuite.make(
                ROBOSUITE_NAMES[spec.name],
                robots="Panda",
                controller_configs=controller,
                has_renderer=False,
                has_offscreen_renderer=True,
                use_camera_obs=True,
                camera_names=[name.removesuffix("_image") for name in spec.cameras],
                camera_heights=spec.image_size,
                camera_widths=spec.image_size,
                control_freq=spec.fps,
                hard_reset=False,
                ignore_done=True,
                reward_shaping=False,
                seed=0,
            )
        except ModuleNotFoundError:
            raise
        except (ImportError, RuntimeError, AttributeError, OSError) as error:  # as PyOpenGL and MuJoCo happen to fail
            if not any(word in str(error) for word in ("GL", "Mesa", "render", "shared object")):
                raise
            raise UserError(
                f"{spec.name} cannot draw here with MUJOCO_GL={os.environ.get('MUJOCO_GL')} ({str(error)[:80]}); "
                "install the library (Debian: libegl1 libgl1-mesa-dri, or libosmesa6 with MUJOCO_GL=osmesa)"
            ) from error
        self._images(False)

    def _images(self, enabled: bool) -> None:
        """Switch drawing, which takes ten times as long as moving."""
        for name in self.spec.cameras:
            self.simulator.modify_observable(name, "enabled", enabled)
            self.simulator.modify_observable(name, "active", enabled)

    def reset(self, seed: int) -> None:
        """See `Environment`."""
        simulator = self.simulator
        simulator.rng = np.random.default_rng(seed)
        for sampler in (
            simulator.placement_initializer,
            *getattr(simulator.placement_initializer, "samplers", {}).values(),
        ):
            sampler.rng = simulator.rng
        for robot in simulator.robots:
            robot.rng = simulator.rng
        simulator.reset()

    def step(self, action: NDArray[Any]) -> tuple[float, bool]:
        """See `Environment`."""
        _, reward, _, _ = self.simulator.step(np.asarray(action, dtype=np.float64))
        return float(reward), bool(self.simulator._check_success())

    def observe(self) -> dict[str, NDArray[Any]]:
        """See `Environment`."""
        self._images(True)
        found = self.simulator._get_observations(force_update=True)
        self._images(False)
        images = {name: np.ascontiguousarray(found[name][::-1]) for name in self.spec.cameras}  # OpenGL begins below
        return images | {name: np.asarray(found[name], dtype=np.float32) for name in self.spec.states}

    def state(self) -> NDArray[np.float64]:
        """MuJoCo's state: time, positions, velocities."""
        return self.simulator.sim.get_state().flatten()

    def render(self) -> NDArray[np.uint8]:
        """See `Environment`."""
        return self.simulator.sim.render(width=256, height=256, camera_name="agentview")[::-1]

    def pose(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Position and axis-angle rotation of the hand, as an action would set them."""
        controller = self.simulator.robots[0].composite_controller.part_controllers["right"]
        controller.update(force=True)
        from scipy.spatial.transform import Rotation

        return np.array(controller.ref_pos), Rotation.from_matrix(controller.ref_ori_mat).as_rotvec()

    def hold(self) -> NDArray[np.float32]:
        """See `Environment`."""
        position, rotation = self.pose()
        return np.concatenate([position, rotation, [0.0]]).astype(np.float32)

    def close(self) -> None:
        """See `Environment`."""
        self.simulator.close()


def make(spec: EnvironmentSpec) -> Manipulation:
    """Start an environment of robosuite."""
    return Manipulation(spec)
