"""What is known of each environment without starting it."""

from fibottention.tasks.robot.environments.base import EnvironmentSpec

__all__ = ["ROBOSUITE_NAMES", "SPECS"]

ROBOSUITE_NAMES = {"lift": "Lift", "can": "PickPlaceCan"}

_PUSHT = EnvironmentSpec(
    name="pusht",
    cameras=("image",),
    states={"agent_pos": 2},
    image_size=96,
    action_dim=2,
    rotation=None,
    hand=None,
    action_low=(0.0, 0.0),
    action_high=(512.0, 512.0),
    max_steps=300,
    fps=10,
    columns={
        # As in Diffusion Policy's pusht_cchi_v7_replay.zarr and in lerobot/pusht_image.
        "zarr": {"image": "img", "agent_pos": "state[:2]", "action": "action"},
        "lerobot": {"image": "observation.image", "agent_pos": "observation.state", "action": "action"},
        "hdf5": {"image": "image", "agent_pos": "agent_pos", "action": "actions"},
    },
    task="Push the T-shaped block onto the T-shaped target.",
)

_ROBOT_STATES = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}
_ROBOT_CAMERAS = ("agentview_image", "robot0_eye_in_hand_image")
_ROBOT_COLUMNS = {
    "zarr": {name: name for name in (*_ROBOT_CAMERAS, *_ROBOT_STATES, "action")},
    "hdf5": {**{name: name for name in (*_ROBOT_CAMERAS, *_ROBOT_STATES)}, "action": "actions"},
    "lerobot": {
        "agentview_image": "observation.images.agentview",
        "robot0_eye_in_hand_image": "observation.images.robot0_eye_in_hand",
        "robot0_eef_pos": "observation.state[0:3]",
        "robot0_eef_quat": "observation.state[3:7]",
        "robot0_gripper_qpos": "observation.state[7:9]",
        "action": "action",
    },
}


def _manipulation(name: str, task: str, max_steps: int) -> EnvironmentSpec:
    return EnvironmentSpec(
        name=name,
        cameras=_ROBOT_CAMERAS,
        states=_ROBOT_STATES,
        image_size=84,
        action_dim=7,
        rotation=3,
        hand="robot0_eef_pos",
        # A box over the table that the gripper can reach; the rotation points it down, turned a little.
        action_low=(-0.3, -0.35, 0.82, 2.0, -1.0, -0.5, -1.0),
        action_high=(0.25, 0.35, 1.15, 3.14, 1.0, 0.5, 1.0),
        max_steps=max_steps,
        fps=20,
        columns=_ROBOT_COLUMNS,
        task=task,
    )


SPECS = {
    "pusht": _PUSHT,
    "lift": _manipulation("lift", "Lift the cube above the table.", 400),
    "can": _manipulation("can", "Put the can into its bin.", 400),
}
