"""fibottention: sparse and diverse attention for vision transformers."""

import warnings as _warnings
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING
from typing import Any as _Any

from fibottention import layers, patterns, sequences
from fibottention.layers import (
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
    SparseAttention,
)
from fibottention.ops import BackendChoice, Twist, explain_backend, na1d, na2d, na3d, sparse_attention
from fibottention.patterns import Pattern
from fibottention.specs import (
    LSA,
    SATA,
    AttentionSpec,
    BigBird,
    CrissCross,
    Dense,
    DilatedWindow,
    EfficientAttention,
    Exponential,
    Fibonacci,
    Fibottention,
    GridAttention,
    Linformer,
    Longformer,
    Neighborhood,
    RandomPairs,
    SlidingWindow,
    SparseTransformer,
    TopK,
    WindowPartition,
    fit_macs,
    make_spec,
    spec_names,
)

if TYPE_CHECKING:
    from fibottention.adapters import sparsify

__all__ = [
    "LSA",
    "SATA",
    "AttentionSpec",
    "BackendChoice",
    "BigBird",
    "CrissCross",
    "Dense",
    "DilatedWindow",
    "EfficientAttention",
    "Exponential",
    "Fibonacci",
    "Fibottention",
    "GridAttention",
    "Linformer",
    "Longformer",
    "Neighborhood",
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "Pattern",
    "RandomPairs",
    "SlidingWindow",
    "SparseAttention",
    "SparseTransformer",
    "TopK",
    "Twist",
    "WindowPartition",
    "explain_backend",
    "fit_macs",
    "layers",
    "make_spec",
    "na1d",
    "na2d",
    "na3d",
    "patterns",
    "sequences",
    "sparse_attention",
    "sparsify",
    "spec_names",
]

__version__ = "0.1.0"

if _find_spec("timm") is not None:
    try:
        import fibottention.models.neighborhood_registry
        import fibottention.models.small_data
        import fibottention.models.timm_models  # noqa: F401  (registers the models with timm)
    except ImportError as _error:
        _warnings.warn(f"timm is too old for fibottention's models and sparsify ({_error})", stacklevel=2)


def __getattr__(name: str) -> _Any:
    if name != "sparsify":
        raise AttributeError(f"module 'fibottention' has no attribute {name!r}")
    if _find_spec("timm") is None and _find_spec("transformers") is None:
        raise ImportError(
            "fibottention.sparsify needs timm or transformers; install them with: pip install 'fibottention[train]' or "
            "'fibottention[transformers]'"
        )
    from fibottention.adapters import sparsify

    return sparsify
