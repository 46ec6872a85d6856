"""Loading weights into a model, with a sentence about what does not fit."""

from torch import Tensor, nn

from fibottention.errors import UserError

__all__ = ["check_classes", "load_into"]


def check_classes(source: object, theirs: int, ours: int) -> None:
    """Check that a model that is not trained has the classifier of its weights.

    Args:
        source: What to call the weights in a message.
        theirs: Classes of the weights; 0 if they have no classifier.
        ours: Classes of the data.

    Raises:
        UserError: If the classifier would be a new one.
    """
    if theirs != ours:
        found = f"are for {theirs} classes" if theirs else "have no classifier"
        raise UserError(
            f"the weights of {source} {found}, the data have {ours}: with train.epochs=0 the new classifier would "
            "learn nothing"
        )


def load_into(model: nn.Module, weights: dict[str, Tensor], source: object, *, new_classifier: bool = False) -> None:
    """Load weights into a model, or say which do not fit.

    Args:
        model: The model.
        weights: Tensors by name.
        source: What to call the weights in a message.
        new_classifier: Leave out classifier weights of another shape (another number of classes).

    Raises:
        UserError: If names or shapes differ.
    """
    own = model.state_dict()
    classifier = getattr(model, "default_cfg", {}).get("classifier") or "classifier"  # as transformers calls it
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)

    def is_classifier(name: str) -> bool:
        return any(name.startswith(f"{head}.") for head in heads)

    kept = {
        k: v
        for k, v in weights.items()
        if not (new_classifier and is_classifier(k) and k in own and own[k].shape != v.shape)
    }
    missing = [k for k in own if k not in kept and not (new_classifier and is_classifier(k))]
    unexpected = [k for k in kept if k not in own]
    shapes = [k for k in kept if k in own and own[k].shape != kept[k].shape]
    if shapes and not missing and not unexpected and all(map(is_classifier, shapes)):
        counts = [len(tensors[shapes[0]]) for tensors in (kept, own)]
        raise UserError(f"the weights in {source} are for {counts[0]} classes, the model is for {counts[1]}")
    problems = []
    for label, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(f"{len(names)} {label} ({shown})")
    if problems:
        raise UserError(f"the weights in {source} do not fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(kept, strict=False)
