"""Time and peak memory of a call."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["peak_mib", "seconds_of"]


def seconds_of(function: Callable[[], object], device: str) -> float:
    """Seconds that a call takes, the device's work included."""
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def peak_mib(function: Callable[[], object], device: str) -> float | None:
    """Peak memory of a call above what was in use before it, in MiB; on the CPU only under Linux."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
        before = _status("VmRSS")
        function()
        return max(0.0, (_status("VmHWM") - before) / 1024)
    except (OSError, AttributeError):
        function()
        return None


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")
