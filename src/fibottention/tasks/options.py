"""Options from recipes and the command line, checked, as configuration objects."""

import argparse
import json
import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.config import TaskConfig, attention_spec
from fibottention.tasks.kinds import config_class, task_names

__all__ = [
    "group_parser",
    "load_recipe",
    "make_config",
    "merge_options",
    "option_groups",
    "read_yaml_file",
    "shipped_recipes",
    "spec_options",
]

_RECIPE_FOLDERS = ("video", "robot", "dense")


def option_groups() -> tuple[str, ...]:
    """Names of the groups of options that some task has, ``attention`` and other specs included."""
    found: dict[str, None] = {}
    for name in task_names():
        found.update(dict.fromkeys((*config_class(name).groups(), *config_class(name).spec_groups())))
    return tuple(found)


def group_parser(prog: str, config: type[TaskConfig]) -> ArgumentParser:
    """Parser of the option groups of a task, without its attention specs."""
    parser = ArgumentParser(prog=prog, exit_on_error=False, add_help=False, default_env=False)
    defaults = config()
    for group in config.groups():
        default = getattr(defaults, group)
        parser.add_argument(f"--{group}", type=type(default), default=default)
    return parser


def load_recipe(name: str, seen: int = 0) -> dict[str, Any]:
    """Options of a recipe: a YAML file, or the name of a recipe that comes with the package.

    A recipe may name another one, in the same folder, as its ``base``.

    Args:
        name: File or name.
        seen: Number of recipes that this one is the base of.

    Raises:
        UserError: If there is no such recipe or it is not valid.
    """
    path = Path(name)
    if not path.is_file():
        path = _shipped(name)
    options = read_yaml_file(path, "recipe")
    if not all(isinstance(value, dict) for key, value in options.items() if key not in ("base", "task")):
        raise UserError(f"the recipe {path} must hold groups of options ({', '.join(option_groups())})")
    base = options.pop("base", None)
    if base is None:
        return options
    if not isinstance(base, str) or seen >= 3:
        raise UserError(f"the recipe {path} must name another recipe as its base, at most 3 deep, got {base}")
    return merge_options(load_recipe(str(path.parent / base), seen + 1), options)


def _shipped(name: str) -> Path:
    """The recipe of a name such as ``vit_base_imagenet`` or ``video/nucla_timesformer``."""
    stem = name.removesuffix(".yaml").removeprefix("recipes/")
    folder, _, last = stem.rpartition("/")
    known = {
        f"{inner}/{word}" if inner else word: path
        for inner in ("", *_RECIPE_FOLDERS)
        for word, path in shipped_recipes(inner).items()
    }
    is_name = name.removesuffix(".yaml") == name or stem != last  # demo.yaml would be a file in this folder
    if stem not in known or not is_name or (name.endswith(".yaml") and not folder):
        listed = [word for word in known if not word.rpartition("/")[2].startswith("_")]
        raise UserError(f"there is no recipe {name!r}: no such file, and no shipped recipe{nearest(stem, listed)}")
    return known[stem]


def read_yaml_file(path: Path, what: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Args:
        path: The file.
        what: What to call it in a message.

    Raises:
        UserError: If the file is not YAML or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"the {what} {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"the {what} {path} must hold named options, got {content!r:.60}")
    return content


def shipped_recipes(folder: str = "") -> dict[str, Path]:
    """The YAML files that come with the package, by name.

    Args:
        folder: Folder within that of the recipes.
    """
    for recipes in (files("fibottention") / "recipes", Path(__file__).parents[3] / "recipes"):
        if recipes.is_dir():
            return {path.stem: path for path in sorted((Path(str(recipes)) / folder).glob("*.yaml"))}
    return {}


def merge_options(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Groups of options, those of ``over`` in the place of those of ``base``; a spec's name replaces the whole spec."""
    merged = dict(base)
    for group, options in over.items():
        if not isinstance(options, dict) or (group.endswith("attention") and "name" in options):
            merged[group] = options  # the task's name; another spec, which has other fields
        else:
            merged[group] = dict(base.get(group, {}))
            for option, value in options.items():
                before = merged[group].get(option)
                if isinstance(before, dict) and isinstance(value, dict):  # the model's arguments, one by one
                    value = {**before, **value}
                merged[group][option] = value
    return merged


def make_config(recipe: dict[str, Any], overrides: list[str] | None = None) -> TaskConfig:
    """The configuration of a recipe's options and of command-line options, which win.

    Args:
        recipe: Options by group, and the name of the task; image classification if there is none.
        overrides: Words such as ``--optim.lr 1e-3`` or ``--attention.name=longformer``.

    Raises:
        UserError: If a task, group, option or value is not valid.
    """
    task = recipe.get("task", "classification")
    if task not in task_names():
        raise UserError(f"no task is named {task!r}{nearest(str(task), task_names())}")
    config = config_class(task)
    for group, options in recipe.items():
        if group != "task" and not isinstance(options, dict):
            raise UserError(f"{group} must hold options, got {options!r}")
    words, specs, chosen = list(overrides or []), {}, set()
    for group in config.spec_groups():
        given, words = spec_options(words, f"--{group}.")
        options = dict(recipe.get(group, getattr(config(), group)))
        if "name" in given:
            options = {}
        options.update(given)
        options.setdefault("name", getattr(config(), group)["name"])
        if group in recipe or given:
            chosen.add(group)
        spec = attention_spec(options, group)
        specs[group] = {"name": "none"} if spec is None else spec.to_dict()
    flat = []
    for group, options in recipe.items():
        if group == "task" or group in specs:
            continue
        for option, value in options.items():
            flat.append(f"--{group}.{option}={value if isinstance(value, str) else json.dumps(value, default=str)}")
    parser = group_parser("fibottention train", config)
    known = _options(config)
    for word in [*flat, *words]:
        option = word.split("=")[0]
        # The parser would take an unambiguous beginning of an option for the option.
        if (
            option.startswith("--")
            and option not in known
            and not option.startswith(("--model.options.", "--model.head_options."))
        ):
            raise UserError(_unknown(word, config))
    try:
        groups = parser.instantiate(parser.parse_args([*flat, *words]))
    except argparse.ArgumentError as error:
        message = str(error)
        if "nrecognized arguments:" in message:
            raise UserError(_unknown(message.split("arguments:")[1].split()[0], config)) from error
        raise UserError(_reworded(message)) from error
    made = config(**{group: groups[group] for group in config.groups()}, **specs)
    made.settle(chosen)
    return made


def _unknown(word: str, config: type[TaskConfig]) -> str:
    option = word.split("=")[0]
    if not option.startswith("--"):
        return f"unexpected word {word!r}; options are written --group.option value"
    valid = [*_options(config), *(f"--{group}.name" for group in config.spec_groups()), "--resume"]
    return f"there is no option {option}{nearest(option, valid, 'see fibottention train --help')}"


def _options(config: type[TaskConfig]) -> list[str]:
    defaults = config()
    return [f"--{group}.{field.name}" for group in config.groups() for field in fields(getattr(defaults, group))]


_TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}


def _reworded(message: str) -> str:
    """A parser message such as ``Parser key "optim.lr": Expected a <class 'float'>. Got value: x`` in plain words."""
    text = " ".join(message.split())
    key = re.search(r'Parser key "([^"]+)"', text)
    value = re.search(r"(?:Got value|Given value): (.*)$", text)
    if key is None or value is None:
        return text
    types = re.findall(r"<class '(\w+)'>|(?<![\w.])((?:tuple|list|dict)\[[^\]]*\])", text.split("Errors:")[0])
    choices = re.search(r"typing\.Literal\[(.*?)\]", text)
    allowed = [_TYPE_NAMES.get(name, name) or container for name, container in types]
    if choices is not None:
        allowed.insert(0, f"one of {choices[1]}")
    return f"{key[1]} must be {' or '.join(allowed) or 'of another type'}, got {value[1]}"


def spec_options(
    words: list[str], prefix: str, keep: frozenset[str] | set[str] = frozenset()
) -> tuple[dict[str, Any], list[str]]:
    """Split the options of a spec, such as ``--attention.w_min 3``, from the other words.

    Args:
        words: Words of a command line.
        prefix: What the options of the spec begin with.
        keep: Options that are not the spec's although they begin so.

    Returns:
        The options by name, their values read as YAML, and the remaining words.
    """
    options: dict[str, Any] = {}
    rest: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        if not word.startswith(prefix) or word.split("=")[0] in keep:
            rest.append(word)
            i += 1
            continue
        name, equals, value = word.removeprefix(prefix).partition("=")
        if not equals:
            i += 1
            if i == len(words):
                raise UserError(f"the option {word} needs a value")
            value = words[i]
        try:
            options[name.replace("-", "_")] = value if name in ("name", "fill") else yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"the value of {word} is not valid: {value}") from error
        i += 1
    return options, rest
