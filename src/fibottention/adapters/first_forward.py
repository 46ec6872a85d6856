"""A check that every attention layer of a model takes part in its forward pass."""

import functools
from typing import Any

import torch
from torch import nn

__all__ = ["FirstForward"]


class FirstForward:
    """Checks in a model's first forward pass that every attention layer was used; then it is gone."""

    def __init__(self, layers: list[str]) -> None:
        self.unused = set(layers)
        self.handles: list[Any] = []

    @classmethod
    def watch(cls, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        """Watch the next forward pass of a model; earlier checks of it end."""
        cls.forget(model)
        check = cls(list(layers))
        for path, module in layers.items():
            check.handles.append(module.register_forward_hook(functools.partial(check.used, path)))
        check.handles.append(model.register_forward_hook(check.end))

    @classmethod
    def forget(cls, model: nn.Module) -> None:
        """End the checks of a model and of its parts that are still waiting for a forward pass."""
        for module in model.modules():
            for hook in list(module._forward_hooks.values()):
                check = getattr(hook, "__self__", None)
                if isinstance(check, cls):
                    check.stop()

    def stop(self) -> None:
        """Watch no longer."""
        for handle in self.handles:
            handle.remove()

    def used(self, path: str, *_: Any) -> None:
        """A layer was used."""
        self.unused.discard(path)

    def end(self, *_: Any) -> None:
        """The model's forward pass is over."""
        if torch.compiler.is_compiling():
            return
        self.stop()
        if self.unused:
            raise RuntimeError(
                f"{len(self.unused)} attention layers were not used in the forward pass, such as {min(self.unused)}: "
                "the model does not attend as its spec says"
            )
