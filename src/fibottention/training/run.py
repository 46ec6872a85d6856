"""The folder of a run: what it holds, and how it is written so that a kill leaves nothing half-written."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fibottention.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Run", "load_weights", "write_atomically", "write_figure"]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a temporary file beside ``path``, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _named_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            mode = temporary.stat().st_mode  # safetensors' own would keep others from reading
            write(temporary)
            temporary.chmod(mode)
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a picture as PNG."""
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


@contextlib.contextmanager
def _named_write_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk or a read-only folder into one sentence that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "write" not in str(error):
            raise
        raise UserError(f"{path} cannot be written: is the disk full?") from error


def load_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a .safetensors or PyTorch file.

    Raises:
        UserError: If the file is missing or is not a file of weights.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file of weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds, pickle's own among them
        raise UserError(f"{path} is not a readable file of weights ({type(error).__name__})") from error
    for key in ("state_dict", "model", "state_dict_ema"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{path} holds no dictionary of tensors")
    return loaded


class Run:
    """A run's folder: ``config.yaml``, ``metrics.jsonl``, ``summary.json``, ``best.safetensors``, ``checkpoints/``.

    A checkpoint is a folder ``checkpoints/epoch_NNNN`` with ``model.safetensors`` and ``training_state.pt``; it is
    complete once it has that name.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def best_path(self) -> Path:
        """Weights of the best epoch."""
        return self.folder / "best.safetensors"

    def check_new(self) -> None:
        """Check that the folder can become that of a new run.

        Raises:
            UserError: If the folder holds something already.
        """
        if self.config_path.exists():
            raise UserError(
                f"train.output={self.folder} already holds a run; continue it with --resume {self.folder}, or name "
                "another folder"
            )
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"train.output={self.folder} must be a new or empty folder")

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder of a new run.

        Raises:
            UserError: If the folder holds something already or cannot be made.
        """
        self.check_new()
        with _named_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.write_yaml(config)

    def remove_if_unfinished(self) -> None:
        """Remove the folder of a run that has no finished epoch to go on from."""
        if self.checkpoint() is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """An existing run.

        Raises:
            UserError: If the folder is not that of a run.
        """
        run = cls(folder)
        if not run.config_path.is_file():
            raise UserError(f"{folder} is not the folder of a run: it has no config.yaml")
        return run

    def write_yaml(self, config: dict[str, Any]) -> None:
        """Save the resolved configuration."""
        write_atomically(self.config_path, lambda path: path.write_text(yaml.safe_dump(config, sort_keys=False)))

    def read_yaml(self) -> dict[str, Any]:
        """The resolved configuration."""
        try:
            config = yaml.safe_load(self.config_path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{self.config_path} is not valid YAML") from error
        if not isinstance(config, dict):
            raise UserError(f"{self.config_path} holds no configuration")
        return config

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file of the run."""
        write_atomically(self.folder / name, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))

    def read_json(self, name: str) -> Any | None:
        """Read a JSON file of the run, None if there is none."""
        path = self.folder / name
        return _parse_json(path, path.read_text()) if path.is_file() else None

    def metrics(self) -> list[dict[str, Any]]:
        """One record per epoch."""
        path = self.folder / "metrics.jsonl"
        return [_parse_json(path, line) for line in path.read_text().splitlines() if line] if path.is_file() else []

    def write_metrics(self, records: Iterable[dict[str, Any]]) -> None:
        """Replace the records of all epochs."""
        text = "".join(json.dumps(record) + "\n" for record in records)
        write_atomically(self.folder / "metrics.jsonl", lambda path: path.write_text(text))

    def save_best(self, weights: dict[str, Tensor]) -> None:
        """Save the weights of the best epoch."""
        write_atomically(self.best_path, lambda path: save_file(_contiguous(weights), path))

    def save_checkpoint(self, epoch: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Save everything that is needed to go on after ``epoch``, then drop the older checkpoints."""
        parent = self.folder / "checkpoints"
        final = parent / f"epoch_{epoch:04d}"
        temporary = parent / f".epoch_{epoch:04d}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with _named_write_errors(final):
                temporary.mkdir(parents=True)
                save_file(_contiguous(weights), temporary / "model.safetensors")
                torch.save(state, temporary / "training_state.pt")
                mode = (temporary / "training_state.pt").stat().st_mode
                (temporary / "model.safetensors").chmod(mode)  # safetensors' own would keep others from reading
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for other in parent.iterdir():
            if other != final:
                shutil.rmtree(other, ignore_errors=True)

    def checkpoint(self) -> Path | None:
        """The folder of the last complete checkpoint, None if there is none."""
        found = sorted((self.folder / "checkpoints").glob("epoch_*"))
        return found[-1] if found else None

    def weights(self) -> dict[str, Tensor]:
        """Weights of the best epoch.

        Raises:
            UserError: If no epoch has been finished.
        """
        if not self.best_path.is_file():
            raise UserError(f"{self.folder} has no weights yet: no epoch has been finished")
        return load_weights(self.best_path)


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _contiguous(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    # safetensors refuses views and shared storage.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
