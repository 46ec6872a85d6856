"""What happens to a model's features when its attention is changed without training."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fibottention.adapters import sparsify
from fibottention.analysis.attention_maps import captured_attention, evaluating
from fibottention.analysis.colours import COLOURS
from fibottention.specs import AttentionSpec

__all__ = [
    "FeatureComparison",
    "compare_features",
    "draw_features",
    "layer_features",
    "linear_cka",
    "nearest_neighbour_accuracy",
]


@dataclass(frozen=True)
class FeatureComparison:
    """The features of a model with another attention, by layer.

    Attributes:
        similarity: Linear CKA between the features and those of the model as it is, in [0, 1].
        accuracy: Leave-one-out accuracy of the nearest neighbour, in [0, 1]; None without labels.
    """

    similarity: list[float]
    accuracy: list[float] | None


@torch.no_grad()
def layer_features(model: nn.Module, images: Tensor, batch_size: int = 16) -> list[Tensor]:
    """One feature per image after each layer: the first prefix token, or the mean over the tokens without one.

    Args:
        model: A model of timm or transformers whose layers attend over whole images, made sparse or not.
        images: ``(B, C, H, W)``, normalized.
        batch_size: Images at a time.

    Returns:
        ``(B, D)`` per layer.

    Raises:
        ValueError: If the model is not one that `sparsify` supports, or has no such layer.
    """
    layers = captured_attention(model, images[:1], lambda layer: (layer.name, layer.module.prefix_tokens))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer that attends over whole images")
    found: dict[str, list[Tensor]] = {name: [] for name, _ in layers}

    def keep(name: str, prefix: int):
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            tokens = out[0] if isinstance(out, tuple) else out
            found[name].append(tokens[:, 0] if prefix else tokens.flatten(1, -2).mean(1))

        return hook

    # The attention's parent is the block with its residual connections and MLP.
    hooks = [
        model.get_submodule(name.rpartition(".")[0]).register_forward_hook(keep(name, prefix))
        for name, prefix in layers
    ]
    with evaluating(model, hooks):
        for part in images.split(batch_size):
            model(part)
    return [torch.cat(parts) for parts in found.values()]


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Linear centred kernel alignment of two sets of features ``(B, D)`` and ``(B, E)`` of the same samples.

    Source: Kornblith et al., arXiv 1905.00414, section 3.
    """
    first, second = (features.double() - features.double().mean(0) for features in (first, second))
    if len(first) < first.shape[1]:
        grams = [features @ features.T for features in (first, second)]
        product, sizes = (grams[0] * grams[1]).sum(), [gram.norm() for gram in grams]
    else:
        product, sizes = (first.T @ second).square().sum(), [(f.T @ f).norm() for f in (first, second)]
    return float(product / (sizes[0] * sizes[1]).clamp(min=torch.finfo(torch.float64).tiny))


def nearest_neighbour_accuracy(features: Tensor, targets: Tensor) -> float:
    """Share of the samples whose nearest other sample, by cosine, is of the same class.

    Args:
        features: ``(B, D)``.
        targets: ``(B,)``.
    """
    unit = nn.functional.normalize(features.double(), dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(float("-inf"))
    return float((targets[similarity.argmax(1).to(targets.device)] == targets).double().mean())


def compare_features(
    model: nn.Module, specs: Mapping[str, AttentionSpec], images: Tensor, targets: Tensor | None = None
) -> dict[str, FeatureComparison]:
    """The features of a model as it is, and with other attention but the same weights.

    Args:
        model: The model. It is not changed.
        specs: Specs by the name that they shall have; what they learn has its initial values.
        images: ``(B, C, H, W)``, normalized.
        targets: ``(B,)`` classes, for the nearest-neighbour accuracy.

    Returns:
        One comparison per spec, and ``"as it is"`` first.

    Raises:
        ValueError: If the model cannot take a spec.
    """
    own = layer_features(model, images)

    def compared(features: Sequence[Tensor]) -> FeatureComparison:
        similarity = [linear_cka(a, b) for a, b in zip(own, features, strict=True)]
        accuracy = None if targets is None else [nearest_neighbour_accuracy(f, targets) for f in features]
        return FeatureComparison(similarity, accuracy)

    results = {"as it is": compared(own)}
    for name, spec in specs.items():
        changed = copy.deepcopy(model)
        sparsify(changed, spec)
        results[name] = compared(layer_features(changed, images))
    return results


def draw_features(results: Mapping[str, FeatureComparison]) -> Figure:
    """Similarity to the model as it is, and nearest-neighbour accuracy, by layer."""
    with_accuracy = all(result.accuracy is not None for result in results.values())
    figure = Figure(figsize=(9 if with_accuracy else 4.8, 3.4 + 0.2 * -(-len(results) // 4)), layout="constrained")
    panels = figure.subplots(1, 2 if with_accuracy else 1, squeeze=False)[0]
    for index, (name, result) in enumerate(results.items()):
        line, colour = "o-" if index < len(COLOURS) else "s--", COLOURS[index % len(COLOURS)]
        numbers = range(1, len(result.similarity) + 1)
        panels[0].plot(numbers, result.similarity, line, markersize=4, color=colour, label=name)
        if with_accuracy and result.accuracy is not None:
            panels[1].plot(numbers, [100 * value for value in result.accuracy], line, markersize=4, color=colour)
    panels[0].set_ylabel("similarity to the model as it is (CKA)")
    panels[0].set_ylim(0, 1.03)
    if with_accuracy:
        panels[1].set_ylabel("nearest-neighbour accuracy (%)")
    for panel in panels:
        panel.set_xlabel("layer")
        panel.set_xticks(range(1, len(next(iter(results.values())).similarity) + 1))
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure
