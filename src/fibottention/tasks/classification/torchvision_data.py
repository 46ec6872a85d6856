"""The classification data sets of torchvision that timm's reader does not know: SVHN, STL10, Food101, DTD, ..."""

import inspect
from typing import Any

from torchvision import datasets

from fibottention.errors import UserError
from fibottention.tasks.classification.config import DataConfig

__all__ = ["is_torchvision_name", "open_torchvision"]

_NAMES = (
    "CLEVRClassification", "Country211", "DTD", "FER2013", "FGVCAircraft", "Flowers102", "Food101", "GTSRB",
    "Imagenette", "OxfordIIITPet", "PCAM", "RenderedSST2", "STL10", "StanfordCars", "SVHN", "USPS",
)  # fmt: skip
_SPLITS = {True: ("train", "trainval"), False: ("val", "validation", "valid", "test")}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _known() -> dict[str, Any]:
    return {_plain(name): getattr(datasets, name) for name in _NAMES if hasattr(datasets, name)}


def is_torchvision_name(name: str) -> bool:
    """Whether ``data.name`` is that of such a data set, ``torch/NAME``."""
    prefix, _, own = name.partition("/")
    return prefix.lower() == "torch" and _plain(own) in _known()


def open_torchvision(config: DataConfig, train: bool) -> Any:
    """A data set of torchvision from files that are there.

    Args:
        config: Its name, its folder, and maybe the names of its splits.
        train: Whether the training images are meant.

    Raises:
        UserError: If its files are missing, or it has no such split.
    """
    make = _known()[_plain(config.name.partition("/")[2])]
    if config.root is None:
        raise UserError(f"data.root must be given for data.name={config.name}: the folder that holds the data")
    parameters = inspect.signature(make).parameters
    options: dict[str, Any] = {"download": False} if "download" in parameters else {}
    given = config.train_split if train else config.val_split
    if "split" not in parameters:
        if given is not None:
            option = "train_split" if train else "val_split"
            raise UserError(
                f"data.{option} has no meaning for data.name={config.name}, which has two splits of its own"
            )
        return _open(make, config, {**options, "train": train})
    refused = ""
    for split in (given,) if given else _SPLITS[train]:
        try:
            return _open(make, config, {**options, "split": split})
        except ValueError as error:  # what torchvision says of a split that it does not know
            refused = " ".join(str(error).split())
    option = "train_split" if train else "val_split"
    raise UserError(f"data.name={config.name}: name the split with data.{option}: {refused}")


def _open(make: Any, config: DataConfig, options: dict[str, Any]) -> Any:
    try:
        return make(config.root, **options)
    except ValueError:
        raise
    except ImportError as error:
        raise UserError(f"data.name={config.name} needs another package: {error}") from error
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data.name={config.name}, data.root={config.root} cannot be opened: {message}") from error
