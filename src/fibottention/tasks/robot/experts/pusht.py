"""An expert for PushT: tries pushes in a simulator and makes the best one, until the block lies on the goal."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import shapely
from gym_pusht.envs.pusht import PushTEnv
from numpy.typing import NDArray
from shapely import affinity

from fibottention.tasks.robot.environments.pusht import PushT

__all__ = ["PushTExpert", "make"]

Point = NDArray[np.float64]

_AGENT_RADIUS = 15.0
_GAP = 14.0  # between agent and block before a push
_WALLS = (24.0, 488.0)  # of the agent's centre
_SPEED = 22.0  # pixels per step
_DISTANCES = (8.0, 25.0, 60.0, 120.0)
_STEP_COST = 0.35  # pixels of mean distance that a step must be worth
_TRIED = 8
_LAG = 4  # steps until the agent has caught up with its target


@dataclass(frozen=True)
class _State:
    """Everything that the future depends on: the block stands still when it is not pushed."""

    agent: Point
    velocity: Point
    block: Point
    angle: float


@dataclass(frozen=True)
class _Push:
    start: Point
    end: Point


class PushTExpert:
    """Plays PushT with knowledge of the block's pose.

    About 100 pushes, spread over the block's outline, are simulated from where they begin; the best 8 are simulated
    again with the way there, and the one that brings the corners of the block closest to the goal, at a cost per step,
    is made.

    Args:
        environment: The environment that is played, of which the pose is read.
        seed: Seed of small changes to the pushes, which get it out of places where none of them helps.
    """

    def __init__(self, environment: PushTEnv, seed: int) -> None:
        self.environment = environment
        self.random = np.random.default_rng(seed)
        self.simulator = PushTEnv(obs_type="state")
        self.simulator.reset(seed=0)
        goal = self.simulator.goal_pose
        local = [np.array(v) for shape in self.simulator._block_shapes for v in shape.get_vertices()]
        self.corners = np.stack(local)
        self.goal_corners = _placed(self.corners, goal[:2], goal[2])
        boxes = [shapely.Polygon([tuple(v) for v in shape.get_vertices()]) for shape in self.simulator._block_shapes]
        self.outline = shapely.union_all(boxes)
        self._targets = self._play()

    def act(self) -> NDArray[np.float32]:
        """The next target of the agent, ``(2,)`` in pixels."""
        return next(self._targets).astype(np.float32)

    def _play(self) -> Iterator[Point]:
        jitter = 0.0
        while True:
            state = self._observe()
            before = self._distance(state)
            plan, after = self._plan(state, jitter)
            # Where no push helps, look around at random.
            jitter = min(jitter + 0.3, 1.0) if after > before - 0.5 else 0.0
            yield from plan

    def _plan(self, state: _State, jitter: float) -> tuple[list[Point], float]:
        """Targets of the best push, and the distance after it."""
        scored = []
        for push in self._pushes(state, jitter):
            here = _State(push.start, np.zeros(2), state.block, state.angle)
            targets = _straight(push.start, push.end)
            scored.append((self._distance(self._simulate(here, targets)) + _STEP_COST * len(targets), push))
        scored.sort(key=lambda item: item[0])
        best: tuple[float, list[Point], float] | None = None
        for _, push in scored[:_TRIED]:
            targets = [*self._way(state, push.start), *_straight(push.start, push.end)]
            after = self._distance(self._simulate(state, targets))
            cost = after + _STEP_COST * len(targets)
            if best is None or cost < best[0]:
                best = cost, targets, after
        if best is None:  # boxed in: go to the middle
            return _straight(state.agent, np.array([256.0, 256.0])), math.inf
        return best[1], best[2]

    def _pushes(self, state: _State, jitter: float) -> Iterator[_Push]:
        ring = self._outline_at(state, 0.0).exterior
        count = 26
        for i in range(count):
            place = ring.length * ((i + jitter * self.random.uniform(-0.5, 0.5)) / count % 1.0)
            point, ahead = (np.array(ring.interpolate(p % ring.length).coords[0]) for p in (place, place + 0.5))
            along = (ahead - point) / max(float(np.linalg.norm(ahead - point)), 1e-9)
            inward = np.array([-along[1], along[0]]) * (1 if ring.is_ccw else -1)
            turn = jitter * self.random.uniform(-0.6, 0.6)
            inward = _rotated(inward, turn)
            start = point - inward * (_AGENT_RADIUS + _GAP)
            if start.min() < _WALLS[0] or start.max() > _WALLS[1]:
                continue
            for distance in _DISTANCES:
                reach = _GAP + distance * (1 + jitter * self.random.uniform(-0.4, 0.4))
                yield _Push(start, np.clip(start + inward * reach, *_WALLS))

    def _way(self, state: _State, goal: Point) -> list[Point]:
        """Targets on a way to a point that does not touch the block."""
        near = self._outline_at(state, _AGENT_RADIUS + 4)
        if not shapely.LineString([state.agent, goal]).intersects(near):
            return _straight(state.agent, goal)
        around: Any = self._outline_at(state, 0.0).convex_hull.buffer(_AGENT_RADIUS + _GAP - 2)
        ring = around.exterior
        first, last = (ring.project(shapely.Point(p)) for p in (state.agent, goal))
        forth = (last - first) % ring.length
        length = forth if forth <= ring.length / 2 else forth - ring.length
        steps = max(1, math.ceil(abs(length) / _SPEED))
        corners = [
            np.clip(np.array(ring.interpolate((first + length * i / steps) % ring.length).coords[0]), *_WALLS)
            for i in range(steps + 1)
        ]
        here = shapely.Point(state.agent)
        if not around.contains(here):  # come to the ring where a straight line first touches it
            free = [i for i, c in enumerate(corners) if not shapely.LineString([state.agent, c]).intersects(near)]
            corners = corners[free[-1] if free else 0 :]
        free = [i for i, c in enumerate(corners) if not shapely.LineString([c, goal]).intersects(near)]
        corners = corners[: free[0] + 1] if free else corners
        way, at = [], state.agent
        for corner in [*corners, goal]:
            way += _straight(at, corner, settle=False)
            at = corner
        return way

    def _outline_at(self, state: _State, distance: float) -> Any:
        turned: Any = affinity.rotate(self.outline, state.angle, origin=(0, 0), use_radians=True)
        placed = affinity.translate(turned, *state.block)
        return placed.buffer(distance) if distance else shapely.Polygon(placed.exterior)

    def _observe(self) -> _State:
        agent, block = self.environment.agent, self.environment.block
        return _State(np.array(agent.position), np.array(agent.velocity), np.array(block.position), block.angle)

    def _simulate(self, state: _State, targets: list[Point]) -> _State:
        simulator = self.simulator
        agent, block = simulator.agent, simulator.block
        agent.position, agent.velocity = state.agent.tolist(), state.velocity.tolist()
        block.velocity, block.angular_velocity = (0.0, 0.0), 0.0
        block.angle = state.angle  # the angle first: turning moves the body, whose centre of mass is elsewhere
        block.position = state.block.tolist()
        simulator.space.reindex_shapes_for_body(agent)
        simulator.space.reindex_shapes_for_body(block)
        for target in targets:
            x, y = target.tolist()
            for _ in range(round(1 / (simulator.dt * simulator.control_hz))):
                position: Any = agent.position
                velocity: Any = agent.velocity
                agent.velocity = (
                    velocity.x + (simulator.k_p * (x - position.x) - simulator.k_v * velocity.x) * simulator.dt,
                    velocity.y + (simulator.k_p * (y - position.y) - simulator.k_v * velocity.y) * simulator.dt,
                )
                simulator.space.step(simulator.dt)
        return _State(np.array(agent.position), np.array(agent.velocity), np.array(block.position), block.angle)

    def _distance(self, state: _State) -> float:
        """Mean distance of the block's corners to where they should be, in pixels."""
        placed = _placed(self.corners, state.block, state.angle)
        return float(np.linalg.norm(placed - self.goal_corners, axis=1).mean())


def make(environment: PushT, seed: int) -> PushTExpert:
    """An expert for an episode that has just begun."""
    return PushTExpert(environment.simulator, seed)


def _straight(start: Point, end: Point, settle: bool = True) -> list[Point]:
    """Targets on a line at constant speed, and a few at its end until the agent is there."""
    steps = max(1, math.ceil(float(np.linalg.norm(end - start)) / _SPEED))
    return [start + (end - start) * (i + 1) / steps for i in range(steps)] + [end] * (_LAG if settle else 0)


def _rotated(points: NDArray[np.float64], angle: float) -> NDArray[np.float64]:
    cos, sin = math.cos(angle), math.sin(angle)
    return points @ np.array([[cos, sin], [-sin, cos]])


def _placed(points: NDArray[np.float64], position: Point, angle: float) -> NDArray[np.float64]:
    return _rotated(points, angle) + position
