"""Put attention specs into existing models."""

import sys
from typing import TYPE_CHECKING, cast

from torch import nn

from fibottention.adapters.report import LayerReport, SparsifyReport
from fibottention.ops.attention import Backend
from fibottention.specs import AttentionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LayerReport", "SparsifyReport", "sparsify"]


def sparsify(model: nn.Module, spec: AttentionSpec, *, backend: Backend = "auto") -> SparsifyReport:
    """Make a model of timm or transformers attend as a spec says, in place.

    See `fibottention.adapters.timm.sparsify` and `fibottention.adapters.transformers.sparsify` for the models.

    Args:
        model: The model.
        spec: How to attend; ``Dense()`` gives back ordinary attention.
        backend: As in `fibottention.sparse_attention`.

    Returns:
        A report of every layer, which prints as a table.

    Raises:
        ValueError: If the model holds no attention that can be replaced, or some that cannot.
        TypeError: If ``model`` is not a module or ``spec`` not a spec.
    """
    # A model of transformers cannot be there before transformers is.
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from fibottention.adapters.transformers import sparsify as sparsify_transformers

        return sparsify_transformers(cast("PreTrainedModel", model), spec, backend=backend)
    from fibottention.adapters.timm import sparsify as sparsify_timm

    return sparsify_timm(model, spec, backend=backend)
