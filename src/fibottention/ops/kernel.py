"""The compiled CPU kernel: finding the library, its C structures, and a pattern's tables.

The library has a plain C interface (csrc/attention.h) and runs on torch's own thread pool, through the function
``torch_parallel_for`` of torch's stable ABI.
"""

import ctypes
import functools
import os
import struct
import sys
from ctypes import Structure, c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fibottention
from fibottention.patterns.pattern import Int64Array, Pattern, SparseRows

__all__ = ["Kernel", "PatternTables", "kernel", "missing", "tables"]

_INTERFACE = 1  # kInterface of csrc/attention.h

_ISA_NAMES = ("baseline", "AVX2", "AVX-512")
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_STATUS = {2: "the instruction set is not supported", 3: "torch's thread pool failed"}


class _Tables(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "stored_heads", "tokens", "prefix", "pairs")),
        *((name, c_int64) for name in ("longest_row", "longest_column")),
        *((name, c_void_p) for name in ("head_pairs", "row_starts", "offsets", "offset_starts", "row_base")),
        *((name, c_void_p) for name in ("row_keys", "column_starts", "column_queries", "column_pairs", "relation")),
        ("buckets", c_int64),
    )


# The fields of AttentionArguments in csrc/attention.h, all of eight bytes; a tensor is its address and three strides.
_TENSORS = frozenset(("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"))
_FIELDS = (
    *("pattern", "isa", "dtype", "batch", "head_dim", "value_dim", "q", "k", "v", "out", "scale"),
    *("bias", "bias_batch", "zero_fill", "twist", "twist_threshold", "twist_scale", "dropout_p", "seed"),
    *("probabilities", "weights", "rest", "value_sums", "grad_out", "grad_q", "grad_k", "grad_v"),
    *("grad_weights", "grad_scores", "grad_sums", "grad_twist_scale", "threads", "parallel_for"),
)
_DOUBLES = ("scale", "twist_threshold", "dropout_p")
_FORMAT = struct.Struct("=" + "".join("4q" if f in _TENSORS else "d" if f in _DOUBLES else "q" for f in _FIELDS))


class PatternTables:
    """A pattern as the kernel reads it, with the arrays that its pointers point to."""

    def __init__(self, pattern: Pattern) -> None:
        heads, tokens, length = pattern.stored_heads, pattern.num_tokens, pattern.sequence_length
        arrays: dict[str, Any] = {"head_pairs": np.asarray(pattern.patch_counts[:heads], np.int64)}
        if pattern.offsets is not None:
            row_counts, column_counts = self._add_offsets(arrays, pattern.offsets, tokens)
        else:
            assert pattern.row_form is not None
            row_counts, column_counts = self._add_rows(arrays, pattern.row_form, tokens)
        if pattern.relation is not None:
            arrays["relation"] = pattern.relation
        self.arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self.structure = _Tables(
            heads=pattern.num_heads,
            stored_heads=heads,
            tokens=tokens,
            prefix=pattern.prefix_tokens,
            pairs=pattern.stored_pairs,
            longest_row=length if pattern.prefix_tokens else int(row_counts.max()),
            longest_column=length if pattern.prefix_tokens else int(column_counts.max()),
            buckets=pattern.num_buckets,
            **{name: array.ctypes.data for name, array in self.arrays.items()},
        )
        self.address = ctypes.addressof(self.structure)

    @staticmethod
    def _add_offsets(
        arrays: dict[str, Any], offsets: tuple[tuple[int, ...], ...], tokens: int
    ) -> tuple[Int64Array, Int64Array]:
        """Add the arrays of the offset form, without listing its pairs; return the pairs of each row and column."""
        heads = [np.asarray(head, np.int64) for head in offsets]
        token = np.arange(tokens)
        low = np.concatenate([np.searchsorted(head, -token) for head in heads])
        row_counts = np.concatenate([np.searchsorted(head, tokens - token) for head in heads]) - low
        column_counts = np.concatenate(
            [np.searchsorted(head, token, "right") - np.searchsorted(head, token - tokens, "right") for head in heads]
        )
        # The kernel reads offsets eight at a time.
        arrays["offsets"] = np.pad(np.concatenate(heads), (0, 8)).astype(np.int32)
        arrays["offset_starts"] = np.cumsum([0, *(len(head) for head in heads)], dtype=np.int64)
        arrays["row_starts"] = np.concatenate([[0], np.cumsum(row_counts)]).astype(np.int64)
        arrays["row_base"] = arrays["row_starts"][:-1] - low
        return row_counts, column_counts

    @staticmethod
    def _add_rows(arrays: dict[str, Any], rows: SparseRows, tokens: int) -> tuple[Int64Array, Int64Array]:
        """Add the arrays of the row form; return the pairs of each row and column."""
        columns = rows.transposed(tokens)
        arrays["row_starts"] = rows.starts
        arrays["row_keys"] = rows.indices.astype(np.int32)
        arrays["column_starts"] = columns.starts
        arrays["column_queries"] = columns.indices.astype(np.int32)
        arrays["column_pairs"] = columns.pairs
        return np.diff(rows.starts), np.diff(columns.starts)


class Kernel:
    """The loaded library.

    Attributes:
        path: Where the library lies.
        isa: Number of the instruction set in use: 0 baseline, 1 AVX2, 2 AVX-512.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.fibottention_interface.restype = c_int64
        if library.fibottention_interface() != _INTERFACE * 10**6 + ctypes.sizeof(_Tables) * 1000 + _FORMAT.size:
            raise OSError(f"{path} was built from another version of the sources; install the package again")
        self._parallel_for = ctypes.cast(_torch_library().torch_parallel_for, c_void_p).value
        self._forward, self._backward = library.fibottention_forward, library.fibottention_backward
        self._forward.argtypes = self._backward.argtypes = [c_char_p]
        self._bucket_sums = library.fibottention_bucket_sums
        self._bucket_sums.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]
        library.fibottention_best_isa.restype = c_int64
        self.path = path
        self.isa: int = library.fibottention_best_isa()

    def __repr__(self) -> str:
        return f"Kernel({str(self.path)!r}, {_ISA_NAMES[self.isa]})"

    def forward(self, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, values: dict[str, Any]) -> None:
        """Run the forward pass; ``values`` are the fields that are not common to all calls."""
        _check(self._forward(self._pack(pattern, q, k, v, values)))

    def backward(self, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, values: dict[str, Any]) -> None:
        """Run the backward pass."""
        _check(self._backward(self._pack(pattern, q, k, v, values)))

    def _pack(self, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, values: dict[str, Any]) -> bytes:
        values |= {
            "pattern": tables(pattern).address,
            "isa": self.isa,
            "dtype": _DTYPES[q.dtype],
            "batch": q.shape[0],
            "head_dim": q.shape[3],
            "value_dim": v.shape[3],
            "q": q,
            "k": k,
            "v": v,
            "threads": torch.get_num_threads(),
            "parallel_for": self._parallel_for,
        }
        packed: list[float] = []
        for field in _FIELDS:
            value = values.get(field)
            if field in _TENSORS:
                packed += (0, 0, 0, 0) if value is None else (value.data_ptr(), *value.stride()[:3])
            elif isinstance(value, Tensor):
                packed.append(value.data_ptr())
            else:
                packed.append(value or 0)
        return _FORMAT.pack(*packed)

    def bucket_sums(self, pattern: Pattern, values: Tensor) -> Tensor:
        """Sums ``(H, buckets)`` of ``(B, G, pairs)`` numbers over the batch and the pairs of each bucket."""
        sums = values.new_empty(pattern.num_heads, pattern.num_buckets)
        is_double = values.dtype == torch.float64
        pointers = (values.data_ptr(), sums.data_ptr(), self._parallel_for)
        _check(self._bucket_sums(tables(pattern).address, is_double, values.shape[0], *pointers))
        return sums


def tables(pattern: Pattern) -> PatternTables:
    """The tables of a pattern, made once."""
    made = pattern.__dict__.get("_kernel_tables")
    if made is None:
        made = pattern.__dict__.setdefault("_kernel_tables", PatternTables(pattern))
    return made


def _check(status: int) -> None:
    if status == 1:
        raise MemoryError("sparse attention: the CPU kernel could not allocate its scratch memory")
    if status:
        raise RuntimeError(f"sparse attention: the CPU kernel failed: {_STATUS[status]}")


def _torch_library() -> ctypes.CDLL:
    """The library of torch's CPU code, which is loaded already, wherever it is installed."""
    name = _library_name("torch_cpu")
    path = Path(torch.__file__).parent / "lib" / name
    return ctypes.CDLL(str(path) if path.exists() else name)


def _library_name(name: str) -> str:
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


@functools.cache
def _load() -> Kernel | str:
    """The kernel, or why there is none."""
    name = _library_name("fibottention_kernel")
    if "FIBOTTENTION_KERNEL" in os.environ:
        path = Path(os.environ["FIBOTTENTION_KERNEL"])
    else:
        # An editable installation has its compiled files elsewhere than its sources.
        found = [Path(folder) / name for folder in fibottention.__path__ if (Path(folder) / name).exists()]
        if not found:
            return "the package was installed without a C++ compiler, so it has no CPU kernel"
        path = found[0]
    try:
        return Kernel(path)
    except (OSError, AttributeError) as error:
        return f"the CPU kernel cannot be loaded: {error}"


def kernel() -> Kernel:
    """The loaded kernel.

    Raises:
        RuntimeError: If there is none.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded


@torch.compiler.assume_constant_result
def missing() -> str | None:
    """Why there is no CPU kernel, or None if there is one."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None
