"""Simulated robots: what a policy sees and does in each, and where demonstrations keep it."""

from fibottention.tasks.robot.environments.base import Environment, EnvironmentSpec, Expert
from fibottention.tasks.robot.environments.registry import (
    environment_names,
    environment_spec,
    make_environment,
    make_expert,
)

__all__ = [
    "Environment",
    "EnvironmentSpec",
    "Expert",
    "environment_names",
    "environment_spec",
    "make_environment",
    "make_expert",
]
