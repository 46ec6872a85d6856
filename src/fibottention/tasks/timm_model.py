"""Models of timm by name, with one sentence about what is wrong."""

from typing import Any

import timm

from fibottention.errors import UserError
from fibottention.specs import nearest

__all__ = ["check_timm_name", "create_timm_model"]


def check_timm_name(name: str, like: str = "") -> None:
    """Check that timm has a model of a name, of which a tag of weights may follow after a dot.

    Args:
        name: The name.
        like: Pattern of the names that are proposed instead, such as ``*vit*``; all if empty.

    Raises:
        UserError: If it has not.
    """
    stem = name.split(".")[0]
    if not timm.is_model(stem):
        raise UserError(f"no model is named {name!r}{nearest(stem, timm.list_models(like), 'see timm')}")


def create_timm_model(name: str, pretrained: bool, options: dict[str, Any], sized: dict[str, Any]) -> Any:
    """A model of timm.

    Args:
        name: Its name.
        pretrained: Whether it gets its pretrained weights.
        options: Its arguments.
        sized: One more argument, about the size of images, which models that take any size do not have.

    Raises:
        UserError: If it cannot be made so.
    """
    for arguments in ({**options, **sized}, options):
        try:
            return timm.create_model(name, pretrained=pretrained, **arguments)
        except Exception as error:  # whatever the model's constructor makes of its arguments
            unknown = isinstance(error, TypeError) and any(f"'{argument}'" in str(error) for argument in sized)
            if arguments is options or not unknown:
                raise UserError(f"model {name} cannot be made: {' '.join(str(error).split())}") from error
    raise AssertionError("unreachable")
