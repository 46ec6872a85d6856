"""Put attention specs into existing models."""

import sys
from importlib.util import find_spec

from torch import nn

from fibottention.adapters.report import LayerReport, SparsifyReport
from fibottention.ops.attention import Backend
from fibottention.specs import AttentionSpec

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    # A model of transformers cannot be there before transformers is.
    transformers = sys.modules.get("transformers")
    if transformers is not None and any(isinstance(m, transformers.PreTrainedModel) for m in model.modules()):
        from fibottention.adapters import transformers as adapter

        # A model of transformers may be a wrapper around one of timm.
        if adapter.sites(model) or not _holds_timm(model):
            return adapter.sparsify(model, spec, backend=backend)
    from fibottention.adapters.timm import sparsify as sparsify_timm

    return sparsify_timm(model, spec, backend=backend)


def _holds_timm(model: nn.Module) -> bool:
    if find_spec("timm") is None:
        return False
    from fibottention.adapters.timm import is_supported

    return any(is_supported(module) for module in model.modules())
