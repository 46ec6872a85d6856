"""A study as a YAML file describes it: its runs, each with its configuration."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.config import TaskConfig
from fibottention.tasks.kinds import task_kind
from fibottention.tasks.options import (
    load_recipe,
    make_config,
    merge_options,
    option_groups,
    read_yaml_file,
    shipped_recipes,
)

__all__ = ["PlannedRun", "Score", "Study", "load_study", "study_names"]

_KEYS = ("title", "task", "base", "seeds", "reference", "settings", "variants", "grid", "quick")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    Attributes:
        setting: Name of the model and data; empty if the study has only one.
        variant: Name of what is compared.
        seed: Seed of the run.
        config: All options of the run.
        path: Folder of the run in that of the study.
    """

    setting: str
    variant: str
    seed: int
    config: TaskConfig
    path: str


@dataclass(frozen=True)
class Score:
    """The metric by which runs are compared.

    Attributes:
        name: Its name in the log.
        label: What to call it.
        is_percent: Whether it is in percent.
    """

    name: str
    label: str
    is_percent: bool

    @property
    def unit(self) -> str:
        """What follows the label."""
        return " (%)" if self.is_percent else ""

    def text(self, value: float, signed: bool = False) -> str:
        """A value for people."""
        return f"{value:{'+' if signed else ''}.{2 if self.is_percent else 4}f}"


@dataclass(frozen=True)
class Study:
    """A study, ready to run.

    Attributes:
        name: Name of the file, with ``-quick`` for the quick version.
        title: What the study asks.
        settings: Names of the models and data; one empty name if there is only one.
        variants: Names of what is compared, in order.
        cells: Values of the grid's options by variant, for the variants that the grid makes.
        seeds: Seeds.
        reference: Variant that the others are compared with.
        score: The metric by which runs are compared.
        runs: All runs, in the order in which they are made.
    """

    name: str
    title: str
    settings: tuple[str, ...]
    variants: tuple[str, ...]
    cells: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]
    reference: str
    score: Score
    runs: tuple[PlannedRun, ...]


def study_names() -> list[str]:
    """Names of the studies that come with the package."""
    return [name for name in shipped_recipes("studies") if not name.startswith("_")]


def load_study(
    name: str,
    *,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    roots: Mapping[str, str] | None = None,
) -> Study:
    """The study of a YAML file, or of a name that comes with the package.

    The file holds ``title``; ``base``, a recipe, or ``task``, the name of a task; groups of options for all runs, as a
    recipe does; ``variants``, groups of options by name; ``grid``, lists of values by option, whose combinations are
    variants too; ``settings``, models and data by name, each with a ``base`` and groups of options; ``seeds``;
    ``reference``, the variant that the others are compared with; and ``quick``, what is different in the quick version.

    Args:
        name: File or name.
        quick: Whether to take the quick version.
        seeds: Seeds in the place of the study's own.
        overrides: Options for all runs, such as ``--train.epochs=3``.
        roots: Places of data by ``data.name`` (``data.format`` of detectors, ``data.path`` of robots).

    Raises:
        UserError: If there is no such study or something in it is not valid.
    """
    path = _find(name)
    content = read_yaml_file(path, "study")
    for key in content:
        if key not in (*_KEYS, *option_groups()):
            valid = [*_KEYS, *option_groups()]
            raise UserError(f"the study {path} has an unknown entry {key!r}{nearest(str(key), valid)}")
    if quick:
        content = _quick(content, path)
    _check_groups({"": _groups(content)}, path, "the options", option_groups())
    for option in ("seed", "output"):
        if option in content.get("train", {}):
            raise UserError(f"the study {path} must not hold train.{option}, which differs from run to run")
    title = str(content.get("title", path.stem))
    given = content.get("seeds", [0]) if seeds is None else seeds
    seeds = tuple(given) if isinstance(given, list | tuple) else ()
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise UserError(f"the seeds of a study must be different whole numbers of at least 0, got {given}")
    variants, cells = _variants(content, path)
    reference = str(content.get("reference", next(iter(variants))))
    if reference not in variants:
        raise UserError(f"reference: no variant is named {reference!r}{nearest(reference, list(variants))}")
    settings = content.get("settings") or {"": {}}
    _check_groups(settings, path, "settings", ("base", *option_groups()))
    settings = {str(name): options for name, options in settings.items()}
    for name in settings:
        if content.get("settings") and not _slug(name):
            raise UserError(f"the study {path} has a setting named {name!r}; names need a letter or a digit")
    _check_overrides(overrides, variants)

    used: set[str] = set()
    names: set[str] = set()
    runs = []
    for setting, setting_options in settings.items():
        own = dict(setting_options)
        base = own.pop("base", content.get("base"))
        common = {} if base is None else _base(base, path)
        if "task" in content:
            common["task"] = content["task"]
        common = merge_options(merge_options(common, _groups(content)), own)
        make_config({"task": common.get("task", "classification")}, list(overrides))  # a mistake here is no variant's
        for variant, options in variants.items():
            try:
                config = make_config(merge_options(common, options), list(overrides))
            except UserError as error:
                raise UserError(f"variant {variant!r} of the study {path}: {error}") from error
            names.add(data := _data_name(config))
            if data in (roots or {}):
                setattr(config.data, config.source[1], (roots or {})[data])
                used.add(data)
            folder = "/".join(_slug(part) for part in (setting, variant) if part)
            for seed in seeds:
                own_config = replace(config, train=replace(config.train, seed=seed))
                runs.append(PlannedRun(setting, variant, seed, own_config, f"{folder}/seed-{seed}"))
    for data in set(roots or {}) - used:
        raise UserError(f"--root: the study uses no data named {data!r}{nearest(data, sorted(names))}")
    _check_runs(runs, path)
    scores = {_score(run.config): run.config for run in runs}
    if len(scores) > 1:
        labels = " and ".join(score.label for score in scores)
        raise UserError(f"the study {path} has runs that are measured by {labels}, which cannot be compared")
    # All variants with one seed before the next seed, so that a study cut short compares like with like.
    runs.sort(key=lambda run: seeds.index(run.seed))
    return Study(
        path.stem + ("-quick" if quick else ""),
        title,
        tuple(settings),
        tuple(variants),
        cells,
        seeds,
        reference,
        next(iter(scores)),
        tuple(runs),
    )


def _data_name(config: TaskConfig) -> str:
    return str(getattr(config.data, config.source[0]))


def _score(config: TaskConfig) -> Score:
    kind = task_kind(config.task)
    name = kind.score_of(config)
    is_percent = name in kind.metrics and name not in kind.shares
    return Score(name, kind.metrics.get(name, "validation loss"), is_percent)


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{name} is a folder; a study is a YAML file, or one of {', '.join(study_names())}")
    shipped = shipped_recipes("studies")
    stem = path.name.removesuffix(".yaml")
    if stem not in shipped or (path.suffix and path.name != name):
        raise UserError(f"there is no study {name!r}: no such file, and no shipped study{nearest(stem, study_names())}")
    return shipped[stem]


def _quick(content: dict[str, Any], path: Path) -> dict[str, Any]:
    if "quick" not in content:
        raise UserError(f"the study {path} has no quick version: its entry 'quick' is missing")
    quick = content["quick"]
    if not isinstance(quick, dict):
        raise UserError(f"'quick' of the study {path} must hold options, got {quick!r:.80}")
    _check_groups({"": _groups(quick)}, path, "quick", option_groups())
    _check_groups({"": _groups(content)}, path, "the options", option_groups())
    for key in quick:
        if key == "quick" or key not in (*_KEYS, *option_groups()):
            raise UserError(f"the study {path} has an unknown entry {key!r} in 'quick'")
    rest = {key: value for key, value in content.items() if key not in option_groups()}
    return {**rest, **quick, **merge_options(_groups(content), _groups(quick))}


def _groups(content: Mapping[str, Any]) -> dict[str, Any]:
    return {group: content[group] for group in option_groups() if group in content}


def _base(name: Any, path: Path) -> dict[str, Any]:
    beside = path.parent / str(name)
    return load_recipe(str(beside) if beside.is_file() else str(name))


def _variants(content: dict[str, Any], path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Options by variant, and the grid's values by variant."""
    named = content.get("variants") or {}
    _check_groups(named, path, "variants", option_groups())
    variants = {str(name): options for name, options in named.items()}
    if len(variants) < len(named):
        raise UserError(f"the study {path} has two variants of one name among {', '.join(map(repr, named))}")
    grid = content.get("grid") or {}
    if not isinstance(grid, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise UserError(f"grid of the study {path} must hold lists of values by option, got {grid!r:.80}")
    for option in grid:
        group, dot, name = str(option).partition(".")
        if group not in option_groups() or not dot or "." in name:
            raise UserError(f"grid of the study {path} must name options as attention.scale, got {option!r}")
    cells = {}
    for values in itertools.product(*grid.values()) if grid else ():
        cell = {str(option): value for option, value in zip(grid, values, strict=True)}
        options: dict[str, Any] = {}
        for option, value in cell.items():
            group, _, name = option.partition(".")
            options.setdefault(group, {})[name] = value
        name = ", ".join(f"{option.partition('.')[2]}={value}" for option, value in cell.items())
        if name in variants:
            raise UserError(f"the study {path} has two variants named {name!r}")
        variants[name], cells[name] = options, cell
    for name in variants:
        if not _slug(name):
            raise UserError(f"the study {path} has a variant named {name!r}; names need a letter or a digit")
    if not variants:
        raise UserError(f"the study {path} compares nothing: it needs variants or a grid")
    return variants, cells


def _check_groups(named: Any, path: Path, what: str, valid: Sequence[str]) -> None:
    """Check that a mapping holds groups of options by name."""
    if not isinstance(named, dict) or not all(isinstance(options, dict) for options in named.values()):
        raise UserError(f"{what} of the study {path} must hold groups of options by name, got {named!r:.80}")
    for name, options in named.items():
        where = f"{name!r} in {what} of the study {path}" if name else f"{what} of the study {path}"
        for group, values in options.items():
            if group not in valid:
                raise UserError(f"{where}: no group {group!r}{nearest(str(group), [*valid])}")
            if group != "base" and not isinstance(values, dict):
                raise UserError(f"{where}: {group} must hold options, got {values!r}")


def _check_overrides(overrides: Sequence[str], variants: Mapping[str, dict[str, Any]]) -> None:
    """Refuse options of the command line that a study sets itself, run by run."""
    own = set()
    for options in variants.values():
        for group, values in options.items():
            for name, value in values.items():
                nested = value if isinstance(value, dict) and value else {"": None}
                own |= {f"--{group}.{name}.{inner}".rstrip(".") for inner in nested} | {f"--{group}.{name}"}
    for word in overrides:
        option = word.split("=")[0]
        if option.startswith("--attention.") or option in own:
            raise UserError(f"{option}: the study sets this itself; change its file instead")
        if option in ("--train.seed", "--train.output"):
            instead = "--seeds" if "seed" in option else "--output"
            raise UserError(f"{option} is not for studies; use {instead}")


def _check_runs(runs: Sequence[PlannedRun], path: Path) -> None:
    """Check that folders are different, and that the variants of a setting have the same data and budget."""
    folders: dict[str, PlannedRun] = {}
    budgets: dict[str, PlannedRun] = {}
    for run in runs:
        other = folders.setdefault(run.path, run)
        if other is not run:
            raise UserError(
                f"the names {other.variant!r} and {run.variant!r} in the study {path} are too alike: both would be "
                f"kept in the folder {run.path}"
            )
        first = budgets.setdefault(run.setting, run)
        train = replace(first.config.train, seed=run.seed)
        if (run.config.data, run.config.train) != (first.config.data, train):
            raise UserError(
                f"the variants {first.variant!r} and {run.variant!r} of the study {path} differ in data or train; all "
                "variants of a setting must have the same data and budget"
            )


def _slug(name: str) -> str:
    return re.sub(r"[^\w.=]+", "-", name).strip("-.")
