"""Letting a trained model attend otherwise, as options say."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fibottention.errors import UserError
from fibottention.specs import AttentionSpec
from fibottention.tasks.config import attention_spec

__all__ = ["changed_spec"]


def changed_spec(
    options: dict[str, Any], group: str, model: nn.Module, seed: int, put: Callable[[AttentionSpec], object]
) -> dict[str, Any]:
    """Let a model attend as options say; returns those of the spec.

    Args:
        options: Name and fields of the spec.
        group: Name of the group of options.
        model: The model.
        seed: Seed of what the spec learns, which may start at random.
        put: Puts the spec into the model.
    """
    if "name" not in options:
        raise UserError(f"--{group}.name must be given with other options of --{group}")
    spec = attention_spec(options, group)
    if spec is None:
        raise UserError(f"--{group}.name=none changes nothing; leave it out, or take dense")
    before = set(model.state_dict())
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            put(spec)
    except ValueError as error:
        raise UserError(f"{group} {spec.name}: {error}") from error
    if added := len(set(model.state_dict()) - before):
        sys.stderr.write(f"fibottention: {added} tensors that {spec.name} learns have their initial values\n")
    return spec.to_dict()
