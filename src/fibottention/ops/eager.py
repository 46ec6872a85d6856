"""The state of PyTorch around a call: what watches it, and autocast."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = [
    "cast_for_autocast",
    "full_precision",
    "is_plain",
    "refuse_forward_mode",
    "refuse_second_derivative",
    "static_size",
]


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing watches or transforms the operators of these tensors: no tracing, mode, functorch or subclass.

    Then a call may go straight to its kernel, past the dispatcher, which costs more than a short call.
    """
    return (
        not torch.compiler.is_compiling()
        and all(t is None or (type(t) in (Tensor, torch.nn.Parameter) and t.device.type != "meta") for t in tensors)
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
        and not torch.jit.is_tracing()
    )


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype of autocast, where it is on for them, as PyTorch's own attention casts them."""
    device, dtype = tensors[0].device.type, tensors[0].dtype
    if device == "meta" or dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(device)) for t in tensors)


def static_size(size: int) -> int:
    """A size as a plain number: in a graph that is compiled, a constant, for which it is compiled anew."""
    return len(range(size)) if torch.compiler.is_compiling() else int(size)


def refuse_second_derivative(backend: str) -> None:
    """Raise RuntimeError in a backward pass that is itself to be differentiated, which would be silently wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the backend {backend!r} of sparse_attention can be differentiated once only, but create_graph=True was "
            "given; use backend='reference'"
        )


def full_precision(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operation outside autocast, which would round its products to half precision."""

    @functools.wraps(operation)
    def run(first: Tensor, *rest: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return operation(first, *rest)

    return run


def refuse_forward_mode(backend: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError if a tensor carries a tangent, which PyTorch's custom operators would drop in silence."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            f"the backend {backend!r} of sparse_attention has no forward-mode derivative; use backend='reference'"
        )
