"""Experts for Lift and PickPlaceCan: go over the object, down, grasp, up, and for the can over the bin and let go."""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fibottention.tasks.robot.environments.manipulation import Manipulation

__all__ = ["ManipulationExpert", "make"]

Goal = Callable[[], NDArray[np.float64]]

_DOWN = np.array([math.pi / math.sqrt(2), math.pi / math.sqrt(2), 0.0])  # the hand's axis to the table, fingers along y
_STEP = 0.06  # metres that the target is ahead of the hand
_NEAR = 0.012
_OPEN, _CLOSED = -1.0, 1.0


class ManipulationExpert:
    """Plays Lift or PickPlaceCan with knowledge of where the object is.

    Args:
        environment: The environment that is played.
        seed: Seed of the small differences between demonstrations: heights and speed.
    """

    def __init__(self, environment: Manipulation, seed: int) -> None:
        self.environment = environment
        random = np.random.default_rng(seed)
        self.hover = random.uniform(0.07, 0.10)
        self.speed = _STEP * random.uniform(0.8, 1.0)
        self._actions = self._play()

    def act(self) -> NDArray[np.float32]:
        """The next action, ``(7,)``."""
        return next(self._actions)

    def _object(self) -> NDArray[np.float64]:
        simulator = self.environment.simulator
        is_lift = self.environment.spec.name == "lift"
        body = simulator.cube_body_id if is_lift else simulator.obj_body_id["Can"]
        return np.array(simulator.sim.data.body_xpos[body])

    def _above(self, height: float) -> Goal:
        """Some metres above the object, wherever it is."""
        return lambda: self._object() + np.array([0, 0, height])

    def _play(self) -> Iterator[NDArray[np.float32]]:
        is_lift = self.environment.spec.name == "lift"
        grip = 0.0 if is_lift else 0.015
        while True:  # once more if the object slipped away
            yield from self._go(self._above(self.hover), _OPEN, 0.02)
            yield from self._go(self._above(grip), _OPEN, _NEAR)
            grasp = self._above(grip)()
            for _ in range(7):
                yield self._towards(grasp, _CLOSED)
            high = _over(grasp, 0.15 if is_lift else 0.22)
            yield from self._go(high, _CLOSED, 0.03)
            if self._object()[2] < high()[2] - 0.1:
                continue
            if is_lift:
                while True:
                    yield self._towards(high(), _CLOSED)
            simulator = self.environment.simulator
            place = np.array(simulator.target_bin_placements[simulator.object_id])
            # So far out the arm sags by some centimetres.
            yield from self._go(_over(place, 0.25), _CLOSED, 0.06)
            yield from self._go(_over(place, 0.12), _CLOSED, 0.06)
            for _ in range(10):
                yield self._towards(_over(place, 0.12)(), _OPEN)
            yield from self._go(_over(place, 0.25), _OPEN, 0.06)

    def _go(self, goal: Goal, gripper: float, near: float) -> Iterator[NDArray[np.float32]]:
        for _ in range(80):
            if np.linalg.norm(goal() - self.environment.pose()[0]) < near:
                return
            yield self._towards(goal(), gripper)

    def _towards(self, goal: NDArray[np.float64], gripper: float) -> NDArray[np.float32]:
        position, _ = self.environment.pose()
        way = goal - position
        length = float(np.linalg.norm(way))
        return np.concatenate([position + way * min(1.0, self.speed / max(length, 1e-9)), _DOWN, [gripper]]).astype(
            np.float32
        )


def _over(place: NDArray[np.float64], height: float) -> Goal:
    return lambda: place + np.array([0, 0, height])


def make(environment: Manipulation, seed: int) -> ManipulationExpert:
    """An expert for an episode that has just begun."""
    return ManipulationExpert(environment, seed)
