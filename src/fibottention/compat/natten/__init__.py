"""The names of natten 0.14 to 0.17 that code imports, with gradients, on the CPU and on any GPU.

`install` makes ``import natten`` find this module, so that such code runs unchanged.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fibottention import layers
from fibottention.compat.natten import functional
from fibottention.compat.natten.functional import na1d, na2d, na3d

__all__ = [
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "functional",
    "has_bfloat",
    "has_cuda",
    "has_fna",
    "has_fused_na",
    "has_half",
    "has_natten",
    "install",
    "is_fna_enabled",
    "is_fused_na_enabled",
    "na1d",
    "na2d",
    "na3d",
    "use_autotuner",
    "use_fna",
    "use_fused_na",
]

# The last version in which a relative bias is the default and padding is done, as the published models need.
__version__ = "0.15.1"


class _OldArguments:
    """The arguments of natten up to 0.17 for the layers of `fibottention.layers`.

    Args:
        dim: Size of the token embeddings.
        num_heads: Number of heads.
        kernel_size: Keys along each axis.
        dilation: Step between keys; 1 if None.
        bias: Whether to learn a relative bias (0.14 and 0.15).
        rel_pos_bias: The same under its name in 0.17; overrules ``bias``.
        is_causal: Whether no key after the query is seen.
        qkv_bias: Whether the qkv projection has a bias.
        qk_scale: Factor of the scores; ``head_dim ** -0.5`` if None.
        attn_drop: Dropout probability of the weights.
        proj_drop: Dropout probability after the output projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kernel_size: int | Sequence[int],
        dilation: int | Sequence[int] | None = 1,
        *,
        bias: bool = True,
        rel_pos_bias: bool | None = None,
        is_causal: bool | Sequence[bool] = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        options: dict[str, Any] = {
            "dilation": 1 if dilation is None else dilation,
            "rel_pos_bias": bias if rel_pos_bias is None else rel_pos_bias,
            "is_causal": is_causal,
            "qkv_bias": qkv_bias,
            "qk_scale": qk_scale,
            "attn_drop": attn_drop,
            "proj_drop": proj_drop,
        }
        super().__init__(dim, num_heads, kernel_size, **options)  # pyright: ignore[reportCallIssue]


class NeighborhoodAttention1D(_OldArguments, layers.NeighborhoodAttention1D):
    """Neighborhood attention on sequences ``(B, N, dim)``, with the arguments of natten up to 0.17."""


class NeighborhoodAttention2D(_OldArguments, layers.NeighborhoodAttention2D):
    """Neighborhood attention on images ``(B, H, W, dim)``, with the arguments of natten up to 0.17."""


class NeighborhoodAttention3D(_OldArguments, layers.NeighborhoodAttention3D):
    """Neighborhood attention on volumes ``(B, D, H, W, dim)``, with the arguments of natten up to 0.17.

    What follows ``kernel_size`` goes by name: 0.15 had other arguments there than 0.17.

    Args:
        dim: Size of the token embeddings.
        num_heads: Number of heads.
        kernel_size: Keys along each axis.
        kernel_size_d: Keys along the depth (0.15); as along the others if None.
        dilation: Step between keys; 1 if None.
        dilation_d: Step between keys along the depth (0.15); as along the others if None.
        **options: As for the other layers.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kernel_size: int | Sequence[int],
        *,
        kernel_size_d: int | None = None,
        dilation: int | Sequence[int] | None = 1,
        dilation_d: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            dim, num_heads, _with_depth(kernel_size, kernel_size_d), _with_depth(dilation, dilation_d), **options
        )


def _with_depth(value: int | Sequence[int] | None, depth: int | None) -> Any:
    """One number per axis, where the depth has its own."""
    if depth is None:
        return value
    if not isinstance(value, int | None):
        raise ValueError(f"with a number of its own for the depth there must be one for height and width, got {value}")
    return (depth, value or 1, value or 1)


def has_natten() -> bool:
    """Whether a real natten is installed."""
    spec = sys.modules["natten"].__spec__ if "natten" in sys.modules else importlib.util.find_spec("natten")
    # A folder that happens to have the name has no loader of its own.
    return spec is not None and spec.name == "natten" and spec.origin is not None


def has_cuda() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def has_half(device_index: int | None = None) -> bool:
    """Whether float16 works: it does everywhere."""
    return True


def has_bfloat(device_index: int | None = None) -> bool:
    """Whether bfloat16 works: it does everywhere."""
    return True


def has_fna(device_index: int | None = None) -> bool:
    """Whether `na1d`, `na2d` and `na3d` work: they do everywhere."""
    return True


def use_fna(mode: bool = True, kv_parallel: bool = False) -> None:
    """Accepted for old code; the layers always use one fused operation."""


def is_fna_enabled() -> bool:
    """Whether the layers use one fused operation: always."""
    return True


def use_autotuner(*args: Any, **kwargs: Any) -> None:
    """Accepted for old code; there is nothing to tune."""


has_fused_na, use_fused_na, is_fused_na_enabled = has_fna, use_fna, is_fna_enabled


class _Distribution(importlib.metadata.Distribution):
    """What ``importlib.metadata`` says of natten, which some libraries ask before they import it."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        message = Message()
        message["Name"], message["Version"] = "natten", __version__
        return str(message)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _Finder:
    @staticmethod
    def find_spec(*args: Any) -> None:
        return None

    @staticmethod
    def find_distributions(context: importlib.metadata.DistributionFinder.Context) -> Iterator[_Distribution]:
        if context.name in (None, "natten"):
            yield _Distribution()


def _of_axes(axes: int) -> ModuleType:
    """The module ``natten.natten2d`` of old versions, or that of other axes: its layer, and its functions."""
    module = ModuleType(f"natten.natten{axes}d")
    for source in (functional, sys.modules[__name__]):
        for name in source.__all__:
            if f"{axes}d" in name.lower():
                setattr(module, name, getattr(source, name))
    return module


def install(replace: bool = False) -> None:
    """Make this module what ``import natten`` gives, in this process.

    Call it before the code that imports natten is imported.

    Args:
        replace: Take the place of a natten that is installed, for code that needs names which it no longer has.

    Raises:
        RuntimeError: If natten is installed and ``replace`` is False.
    """
    this = sys.modules[__name__]
    if sys.modules.get("natten") is this:
        return
    if has_natten() and not replace:
        raise RuntimeError("natten is installed; uninstall it, or take its place in this process with replace=True")
    sys.modules["natten"] = this
    sys.modules["natten.functional"] = functional
    for axes in (1, 2, 3):
        module = sys.modules[f"natten.natten{axes}d"] = _of_axes(axes)
        setattr(this, f"natten{axes}d", module)
    sys.meta_path.insert(0, _Finder)  # pyright: ignore[reportArgumentType]
