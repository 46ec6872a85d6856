"""The environments by name; each is imported when it is used."""

import importlib

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.robot.environments.base import Environment, EnvironmentSpec, Expert
from fibottention.tasks.robot.environments.specs import SPECS

__all__ = ["environment_names", "environment_spec", "make_environment", "make_expert"]

_MODULES = {"pusht": "pusht", "lift": "manipulation", "can": "manipulation"}


def environment_names() -> list[str]:
    """Names of the environments."""
    return list(SPECS)


def environment_spec(name: str) -> EnvironmentSpec:
    """What is known of an environment.

    Raises:
        UserError: If there is none of that name.
    """
    if name not in SPECS:
        raise UserError(f"no environment is named {name!r}{nearest(name, list(SPECS))}")
    return SPECS[name]


def make_environment(name: str) -> Environment:
    """Start an environment.

    Raises:
        UserError: If there is none of that name, or it cannot draw on this machine.
    """
    spec = environment_spec(name)
    try:
        module = importlib.import_module(f"fibottention.tasks.robot.environments.{_MODULES[name]}")
    except ModuleNotFoundError:
        raise
    except ImportError as error:  # OpenCV without OpenGL
        raise UserError(f"{name} cannot draw here ({error}); install the library (Debian: libgl1)") from error
    return module.make(spec)


def make_expert(environment: Environment, seed: int) -> Expert:
    """The scripted expert of an environment, for an episode that has just begun."""
    module = importlib.import_module(f"fibottention.tasks.robot.experts.{_MODULES[environment.spec.name]}")
    return module.make(environment, seed)
