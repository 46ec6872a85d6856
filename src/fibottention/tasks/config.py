"""What the options of every task have in common."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fibottention.errors import UserError
from fibottention.specs import AttentionSpec, make_spec
from fibottention.training.config import OptimConfig, TrainConfig

__all__ = ["Range", "TaskConfig", "attention_spec"]

Range = tuple[str, float | None, float | None]

_RANGES: tuple[Range, ...] = (
    ("data.workers", 0, None),
    ("optim.weight_decay", 0, None),
    ("optim.momentum", 0, 1),
    ("optim.decay_epochs", 1e-6, None),
    ("optim.clip_grad", 1e-12, None),
    ("optim.layer_decay", 1e-6, 1),
    ("optim.lr", 0, None),
    ("optim.base_lr", 0, None),
    ("optim.backbone_lr", 0, None),
    ("optim.warmup_lr", 0, None),
    ("optim.min_lr", 0, None),
    ("optim.warmup_steps", 0, None),
    ("optim.ema_power", 1e-6, None),
    ("train.epochs", 0, None),
    ("train.batch_size", 1, None),
    ("train.gradient_accumulation", 1, None),
    ("train.seed", 0, None),
)


@dataclass
class TaskConfig:
    """All options of a run: groups of options, of which those named ``...attention`` are attention specs.

    Subclasses are dataclasses, one per task, and say what their numbers may be.

    Attributes:
        task: Name of the task.
        ranges: Option, smallest and largest value; None is no bound. A value of null is always allowed.
        source: Options of ``data`` that name the data and say where they are.
        data: Where the data come from.
        model: The model.
        attention: Name and fields of the attention spec; ``{"name": "none"}`` leaves the model as it is.
        optim: Optimizer and schedule.
        train: Training loop.
    """

    task: ClassVar[str]
    ranges: ClassVar[tuple[Range, ...]] = ()
    source: ClassVar[tuple[str, str]] = ("name", "root")

    data: Any = None
    model: Any = None
    attention: dict[str, Any] = field(default_factory=lambda: {"name": "fibottention"})
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @classmethod
    def groups(cls) -> tuple[str, ...]:
        """Names of the groups of options, specs left out."""
        return tuple(f.name for f in fields(cls) if not f.name.endswith("attention"))

    @classmethod
    def spec_groups(cls) -> tuple[str, ...]:
        """Names of the attention specs."""
        return tuple(f.name for f in fields(cls) if f.name.endswith("attention"))

    def to_dict(self) -> dict[str, Any]:
        """The options, and the name of the task, as plain data for YAML."""
        return {"task": self.task, **_plain(asdict(self))}

    def essence(self) -> dict[str, Any]:
        """The options that can change a result: not where the data are, nor the device."""
        options = self.to_dict()
        name, place = self.source
        kept = options["data"][name]
        options["data"] |= {place: None, "workers": 0}
        # Data that are named by their place alone may lie elsewhere, but in folders of the same names.
        options["data"][name] = "/".join(Path(kept).parts[-3:]) if name == place and kept is not None else kept
        options["train"] |= {"output": None, "device": "auto"}
        return options

    def settle(self, chosen: set[str]) -> None:
        """Adapt the specs that were not chosen to the rest of the options.

        Args:
            chosen: Names of the specs that were chosen.
        """

    def check(self) -> None:
        """Check that the numbers are in their ranges.

        Raises:
            UserError: Naming the first option that is not.
        """
        for option, low, high in (*_RANGES, *self.ranges):
            group, name = option.split(".")
            value = getattr(getattr(self, group), name)
            if value is None or ((low is None or value >= low) and (high is None or value <= high)):
                continue
            allowed = f"at least {low:g}" if high is None else f"in {low:g} .. {high:g}"
            raise UserError(f"{option} must be {allowed}, got {value}")


def attention_spec(options: dict[str, Any], group: str = "attention") -> AttentionSpec | None:
    """The spec of a group of options, None for the name ``none``.

    Raises:
        UserError: If a name or field is not valid.
    """
    if str(options.get("name", "")).lower() in ("none", ""):
        if len(options) > 1:
            raise UserError(f"{group}.name=none leaves the model as it is and takes no options, got {options}")
        return None
    try:
        return make_spec(options)
    except ValueError as error:
        raise UserError(f"{group}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
