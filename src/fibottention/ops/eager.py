"""Whether a call may go straight to a kernel, past the dispatcher of operators, which costs more than a short call."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["is_plain"]


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing watches or transforms the operators of these tensors: no tracing, mode, functorch or subclass."""
    return (
        not torch.compiler.is_compiling()
        and all(t is None or (type(t) in (Tensor, torch.nn.Parameter) and t.device.type != "meta") for t in tensors)
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
        and not torch.jit.is_tracing()
    )
