"""The report of runs: one self-contained HTML page with curves, masks, attention maps, costs and how to repeat it."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
import yaml
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor, nn

from fibottention.analysis.attention_maps import attention_maps
from fibottention.analysis.colours import COLOURS
from fibottention.analysis.masks import mask_figure
from fibottention.analysis.trivial_attention import draw_trivial_attention, trivial_attention
from fibottention.errors import UserError
from fibottention.layers.pattern_attention import PatternAttention
from fibottention.tasks.classification.config import ClassificationConfig
from fibottention.tasks.classification.data import eval_transform, normalization, open_image
from fibottention.tasks.config import TaskConfig
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.kinds import TaskKind, task_kind
from fibottention.tasks.runs import load_model
from fibottention.training.run import Run, write_atomically

__all__ = ["encode_figure", "write_page", "write_report"]

_LARGEST_CONFUSION = 30
_LOSSES = {"train_loss": "training loss", "val_loss": "validation loss"}
# Pictures of fibottention analyze.
_ANALYSES = {
    "diversity.png": "Distance between heads, by layer",
    "heads.png": "Similarity of heads and entropy of their weights",
    "coverage.png": "Which tokens heads and layers reach",
    "maps.png": "Attention of the last layer, and rollout, on images",
    "features.png": "Features with other attention, without training",
    "localisation.png": "Attention that stays in the object",
    **{f"clip_{number}.png": f"Where each head looks, frame by frame, in video {number}" for number in range(1, 7)},
}


@dataclass
class _RunPage:
    """What the page shows of one run."""

    name: str
    colour: str
    config: TaskConfig
    kind: TaskKind
    about: str
    records: list[dict[str, Any]]
    best: dict[str, Any]
    summary: dict[str, Any]
    command: str | None
    config_text: str
    confusion: str = ""
    found: list[str] = field(default_factory=list)
    masks: str = ""
    scales: str = ""
    trivial: str = ""
    maps: str = ""
    maps_note: str = ""
    analyses: dict[str, str] = field(default_factory=dict)


def write_report(runs: Sequence[str | Path], output: str | Path) -> Path:
    """Write one HTML page about one or several runs, side by side.

    Args:
        runs: Folders of runs with at least one finished epoch.
        output: HTML file to write.

    Returns:
        The file.

    Raises:
        UserError: If a folder is not that of a run with weights.
    """
    names = _short_names([Path(run) for run in runs])
    pages = [_page(Path(run), names[i], COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]
    first = next(iter(pages[0].kind.metrics))
    for page in pages:
        if first not in page.kind.metrics:
            raise UserError(f"{page.name} is a {page.config.task} run, which cannot stand beside {pages[0].name}")
    output = Path(output)
    if output.parent != Path() and not output.parent.is_dir():
        raise UserError(f"the folder {output.parent} of the report does not exist")
    return write_page(output, "report.html.j2", pages=pages, curves=encode_figure(_curves(pages)))


def write_page(output: Path, template: str, **content: Any) -> Path:
    """Write an HTML page from one of the package's templates."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fibottention.analysis", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    html = environment.get_template(template).render(**content)
    write_atomically(output, lambda path: path.write_text(html))
    return output


def _short_names(paths: list[Path]) -> list[str]:
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return names


def _page(folder: Path, name: str, colour: str) -> _RunPage:
    model, config, best, run = load_model(folder)
    saved = run.read_yaml()
    saved.pop("given", None)
    page = _RunPage(
        name=name,
        colour=colour,
        config=config,
        kind=task_kind(config.task),
        about=_about(config, best),
        records=run.metrics(),
        best=best,
        summary=run.read_json("summary.json") or {},
        command=saved.pop("command", None),
        config_text=yaml.safe_dump(saved, sort_keys=False),
    )
    if "confusion" in best:
        page.confusion = encode_figure(_confusion(best["confusion"], best["classes"]))
    sparse = next((m for m in model.modules() if isinstance(m, PatternAttention)), None)
    if sparse is not None and sparse._patterns:
        pattern = next(iter(sparse._patterns.values()))
        page.masks = encode_figure(mask_figure(pattern, f"first layer: {pattern.density():.2%} of the pairs"))
    if "transform_scales" in page.records[-1]:
        page.scales = encode_figure(_scales(page.records))
    if isinstance(config, ClassificationConfig):
        page.maps, page.maps_note = _attention_figure(model, config, run)
        page.trivial = _trivial_figure(model, config, run)
    elif isinstance(config, DenseConfig):
        page.maps_note = "Not drawn for detectors and segmenters."
        page.found = _found(model, best, run)
    elif "classes" in best:
        page.maps_note = "fibottention analyze draws attention maps of videos."
    else:
        page.maps_note = "Not drawn for the cameras of a robot."
    for file, title in _ANALYSES.items():
        picture = run.folder / "analysis" / file
        if picture.is_file():
            page.analyses[title] = base64.b64encode(picture.read_bytes()).decode()
    return page


def _about(config: TaskConfig, best: dict[str, Any]) -> str:
    """What a run was trained on."""
    if isinstance(config, DenseConfig):
        return f"{config.data.format}, {config.data.target}, {len(best['classes'])} classes"
    if "classes" in best:
        return f"{config.data.name}, {len(best['classes'])} classes"
    return Path(config.data.path).name


def _found(model: Any, best: dict[str, Any], run: Run) -> list[str]:
    """What the model finds in the sample images, drawn into them."""
    from fibottention.tasks.dense.predict import predict_image  # needs packages that other runs do not

    pictures = []
    for sample in run.read_json("samples.json") or []:
        with Image.open(run.folder / sample["file"]) as image:
            picture, _ = predict_image(model, image.convert("RGB"), best["classes"])
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        pictures.append(base64.b64encode(buffer.getvalue()).decode())
    return pictures


def _attention_figure(model: nn.Module, config: ClassificationConfig, run: Run) -> tuple[str, str]:
    """Attention maps of the last layer on the sample images, and a note on what they show."""
    samples = run.read_json("samples.json") or []
    if not samples:
        return "", "No sample images were kept."
    try:
        inputs = _sample_inputs(config, run)
        maps = attention_maps(model, inputs)
    except ValueError as error:
        return "", f"No attention maps: {error}."
    if not maps:
        return "", "No attention maps: the model attends within windows or mixes its heads."
    last = maps[-1]
    grid = round(last.values.shape[-1] ** 0.5)
    if grid**2 != last.values.shape[-1]:
        return "", "No attention maps: the tokens form no square grid."
    heads = min(last.values.shape[1], 12)
    values = last.values[:, :heads].reshape(len(inputs), heads, grid, grid).float().cpu()
    figure = Figure(figsize=(1.15 * (heads + 1) + 0.2, 1.2 * len(inputs) + 0.5), layout="constrained")
    axes = figure.subplots(len(inputs), heads + 1, squeeze=False)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in normalization(config.data, config.model.in_chans))
    # What the model sees: resized, and cropped to the centre.
    seen = (inputs * std + mean).clamp(0, 1).permute(0, 2, 3, 1).squeeze(-1).numpy()
    for row in range(len(inputs)):
        axes[row, 0].imshow(seen[row], cmap="gray")
        axes[row, 0].set_ylabel(samples[row]["class"][:18], fontsize=7)
        for head in range(heads):
            axes[row, head + 1].imshow(values[row, head], cmap="viridis")
        for column, axis in enumerate(axes[row]):
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title("image" if column == 0 else f"head {column}", fontsize=8)
    query = "of the first prefix token (CLS)" if last.of_prefix else "averaged over all queries"
    return encode_figure(figure), f"Attention {query} in {last.layer}, each map on its own scale."


def _sample_inputs(config: ClassificationConfig, run: Run) -> Tensor:
    """The run's sample images as the model gets them."""
    transform = eval_transform(config.data, config.model.in_chans)
    inputs = []
    for sample in run.read_json("samples.json") or []:
        with Image.open(run.folder / sample["file"]) as image:
            inputs.append(transform(open_image(image, config.model.in_chans)))
    return torch.stack(inputs)


def _trivial_figure(model: nn.Module, config: ClassificationConfig, run: Run) -> str:
    """How much attention goes to keys that hardly matter, on the sample images; empty where that cannot be said."""
    if not run.read_json("samples.json"):
        return ""
    try:
        layers = trivial_attention(model, _sample_inputs(config, run))
    except ValueError:
        return ""
    return encode_figure(draw_trivial_attention(layers)) if layers else ""


def _curves(pages: list[_RunPage]) -> Figure:
    kind = pages[0].kind
    recorded = {key for page in pages for record in page.records for key in record}
    panels = [(key, label) for key, label in _LOSSES.items() if key in recorded]
    for page in pages:
        first = next((name for name in kind.metrics if any(name in record for record in page.records)), None)
        if first is not None and first not in dict(panels):
            label = kind.metrics[first]
            panels.append((first, label if first in kind.shares else f"{label} (%)"))
    figure = Figure(figsize=(11, 3.3 + 0.2 * ((len(pages) + 3) // 4)), layout="constrained")
    for axis, (key, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for page in pages:
            if key == "train_loss":
                curves = [(r["epoch"], r["loss_curve"]) for r in page.records if r["epoch"]]
                values = [loss for _, curve in curves for loss in curve]
                epochs = [e - 1 + (i + 0.5) / len(curve) for e, curve in curves for i in range(len(curve))]
                axis.plot(epochs, values, color=page.colour, label=page.name)
            else:
                known = [record for record in page.records if key in record]  # rollouts are not of every epoch
                values = [record[key] for record in known]
                if values and not any(record["epoch"] for record in known):  # it was not trained
                    axis.axhline(values[-1], linestyle="--", color=page.colour)
                axis.plot([r["epoch"] for r in known], values, "o-", markersize=3, color=page.colour, label=page.name)
        axis.set_xlabel("epoch")
        axis.set_ylabel(label)
        axis.set_xlim(0, 1.02 * max(len(page.records) for page in pages))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(pages)), fontsize=8)
    return figure


def _scales(records: list[dict[str, Any]]) -> Figure:
    """The scales of SATA's transforms: over training, and over depth at the end (arXiv 2210.12333, figure 3)."""
    values = np.array([record["transform_scales"] for record in records])
    epochs = [record["epoch"] for record in records]
    figure = Figure(figsize=(7.5, 3), layout="constrained")
    over_time, over_depth = figure.subplots(1, 2)
    colours = colormaps["viridis"](np.linspace(0, 0.9, values.shape[1]))
    for layer, colour in enumerate(colours):
        over_time.plot(epochs, values[:, layer], "o-", markersize=3, color=colour, label=f"layer {layer + 1}")
    over_time.set_xlabel("epoch")
    over_time.set_ylabel("s")
    over_time.xaxis.set_major_locator(MaxNLocator(integer=True))
    over_time.legend(fontsize=6, ncols=2)
    over_depth.plot(range(1, values.shape[1] + 1), values[-1], "o-", color=COLOURS[0])
    over_depth.set_xlabel("layer")
    over_depth.set_ylabel(f"s after epoch {epochs[-1]}")
    over_depth.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (over_time, over_depth):
        axis.grid(alpha=0.3)
    return figure


def _confusion(matrix: list[list[int]], classes: list[str]) -> Figure:
    counts = np.asarray(matrix, dtype=float)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    few = len(classes) <= _LARGEST_CONFUSION
    side = max(4.0, 0.42 * len(classes) + 1.5) if few else 7.0
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axis = figure.subplots()
    picture = axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axis.set_xlabel("predicted class")
    axis.set_ylabel("true class")
    if few:
        axis.set_xticks(range(len(classes)), classes, rotation=60, ha="right", fontsize=8)
        axis.set_yticks(range(len(classes)), classes, fontsize=8)
    if len(classes) <= 12:
        for (row, column), value in np.ndenumerate(share):
            if value >= 0.005:
                colour = "white" if value > 0.5 else "black"
                axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(picture, ax=axis, shrink=0.8, label="share of the true class")
    return figure


def encode_figure(figure: Figure) -> str:
    """A picture as PNG, in base64 for a page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
