"""``fibottention analyze``: heads, reach and localisation of trained models, as JSON and PNG."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fibottention.analysis.attention_maps import CapturedLayer, attention_maps, captured_attention
from fibottention.analysis.coverage import coverage, draw_coverage
from fibottention.analysis.features import compare_features, draw_features
from fibottention.analysis.heads import HeadStatistics, draw_diversity, draw_head_statistics, head_statistics
from fibottention.analysis.localisation import draw_localisation, localisation
from fibottention.analysis.rollout import attention_rollout, draw_attention_maps
from fibottention.cli.by_task import named_run
from fibottention.cli.options import CommandParser, make_console, parse_spec
from fibottention.errors import UserError
from fibottention.patterns.pattern import Pattern
from fibottention.specs import AttentionSpec
from fibottention.tasks.classification.config import ClassificationConfig
from fibottention.tasks.classification.data import normalization
from fibottention.tasks.classification.images import images_from_folder, validation_images
from fibottention.tasks.runs import load_model
from fibottention.training.run import Run, write_figure

__all__ = ["run"]

_PICTURES = 6


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    first = named_run(words)
    if first is not None and first.task == "video":
        from fibottention.cli.video.analyze import run as run_video

        return run_video(words)
    parser = CommandParser(
        prog="fibottention analyze",
        description="Look into the attention of trained models: how much the heads differ (distances and similarity "
        "of their outputs, entropy of their weights), which tokens heads and layers reach, and, with masks, how much "
        "of an object's attention stays in the object. Writes JSON and PNG into RUN/analysis, where fibottention "
        "report finds them. For a video run: where the heads look, frame by frame (fibottention analyze RUN --help).",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs, or checkpoints in them")
    parser.add_argument("--images", type=Path, help="folder of images (default: the run's validation images)")
    parser.add_argument(
        "--masks",
        type=Path,
        help="where the objects are: a folder with a PNG of the same name per image, 0 is outside; a folder of PASCAL "
        "VOC's XML files; or a JSON file of COCO's form",
    )
    parser.add_argument("--count", type=int, default=64, help="number of images, evenly spread (default 64)")
    parser.add_argument(
        "--specs",
        nargs="+",
        default=[],
        metavar="SPEC",
        help="also see what these do to the features, without training",
    )
    parser.add_argument("--root", help="folder of the data in the place of the run's own")
    parser.add_argument("--output", type=Path, help="folder of the comparison of several runs (default: analysis)")
    arguments = parser.parse_args(words)
    if arguments.count < 2:
        raise UserError(f"--count must be at least 2, got {arguments.count}")
    if arguments.output is not None and len(arguments.runs) == 1:
        raise UserError(
            "--output is for the comparison of several runs; what belongs to one run goes into RUN/analysis"
        )
    if arguments.output is not None and arguments.output.exists() and not arguments.output.is_dir():
        raise UserError(f"--output: {arguments.output} is a file, not a folder")
    if arguments.masks is not None and arguments.images is None:
        raise UserError("--masks needs --images: masks go by the names of the images")
    try:
        specs = {text: parse_spec(text) for text in arguments.specs}
    except ValueError as error:
        raise UserError(f"--specs: {error}") from error
    console = make_console()
    names = [str(path).rstrip("/") for path in arguments.runs]
    compared: dict[str, list[HeadStatistics]] = {}
    for name, path in zip(names, arguments.runs, strict=True):
        model, config, _, run_ = load_model(path)
        if not isinstance(config, ClassificationConfig):
            raise UserError(f"{path} is a {config.task} run, which cannot be analyzed beside runs of images")
        if arguments.root is not None and (arguments.images or config.data.name == "fashion-mnist-subset"):
            raise UserError("--root has no meaning for --images, nor for a run whose data are embedded in the package")
        if arguments.root is not None:
            config.data.root = arguments.root
        masks = targets = None
        if arguments.images is None:
            images, targets = validation_images(config, arguments.count)
        else:
            images, masks, left_out = images_from_folder(config, arguments.count, arguments.images, arguments.masks)
            for sentence in left_out:
                console.print(sentence, soft_wrap=True)
        folder = run_.folder / "analysis"
        compared[name] = _analyze(model, images, masks, folder)
        _draw_maps(model, images[:_PICTURES], config, folder)
        if specs:
            _compare(model, specs, images, targets, folder, console)
        console.print(f"{name}: {len(images)} images; written to {folder}", soft_wrap=True)
    if len(compared) > 1:
        folder = arguments.output or Path("analysis")
        write_figure(folder / "diversity.png", draw_diversity(compared))
        console.print(f"head diversity side by side: {folder / 'diversity.png'}", soft_wrap=True)
    return 0


def _analyze(model: nn.Module, images: Tensor, masks: Tensor | None, folder: Path) -> list[HeadStatistics]:
    try:
        layers = head_statistics(model, images)
        places = localisation(model, images, masks) if masks is not None else []
        patterns = captured_attention(model, images[:1], _pattern)
    except ValueError as error:
        raise UserError(str(error)) from error
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layer that attends over whole images, so there is nothing to see"
        )
    if masks is not None and not places:
        raise UserError("--masks: this attention has no weights of pairs, so nothing can be said of objects")
    for old in folder.glob("*"):
        if old.suffix in (".png", ".json"):
            old.unlink()  # of other images
    Run(folder).write_json("heads.json", [_plain_heads(layer) for layer in layers])
    write_figure(folder / "diversity.png", draw_diversity({"this run": layers}))
    write_figure(folder / "heads.png", draw_head_statistics(layers))
    if places:
        content = [
            {
                "layer": layer.layer,
                "share": layer.share.mean(0).tolist(),
                "mean": layer.mean.mean(0).tolist(),
                "variance": layer.variance.mean(0).tolist(),
                "area": layer.area.mean().item(),
            }
            for layer in places
        ]
        Run(folder).write_json("localisation.json", content)
        write_figure(folder / "localisation.png", draw_localisation(places))
    known = [pattern for pattern in patterns if pattern is not None]
    # Layers over different tokens (PiT) have no reach in common.
    if len({(pattern.prefix_tokens, pattern.num_tokens, pattern.num_heads) for pattern in known}) == 1:
        reach = coverage(known)
        content = {
            "union": reach.union,
            "reached": reach.reached,
            "reached_with_prefix": reach.reached_with_prefix,
            "layers_to_all": reach.layers_to_all,
        }
        Run(folder).write_json("coverage.json", content)
        write_figure(folder / "coverage.png", draw_coverage(reach))
    return layers


def _compare(
    model: nn.Module,
    specs: dict[str, AttentionSpec],
    images: Tensor,
    targets: Tensor | None,
    folder: Path,
    console: Console,
) -> None:
    """What other attention does to the features of the last layer, in a table; all layers in the files."""
    try:
        results = compare_features(model, specs, images, targets)
    except ValueError as error:
        raise UserError(f"--specs: {error}") from error
    Run(folder).write_json("features.json", {name: asdict(result) for name, result in results.items()})
    write_figure(folder / "features.png", draw_features(results))
    table = Table(title="features of the last layer")
    for column in ("attention", "similarity (CKA)", *(["nearest neighbour"] if targets is not None else [])):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for name, result in results.items():
        table.add_row(
            name, f"{result.similarity[-1]:.3f}", *([f"{result.accuracy[-1]:.1%}"] if result.accuracy else [])
        )
    console.print(table)


def _pattern(layer: CapturedLayer) -> Pattern | None:
    return layer.module.pattern(layer.q.shape[2]) if layer.module.spec.has_pattern else None


def _draw_maps(model: nn.Module, images: Tensor, config: ClassificationConfig, folder: Path) -> None:
    """The last layer's maps and the rollout on some images."""
    try:
        maps = attention_maps(model, images)
    except ValueError:
        return  # a spec without weights of pairs
    try:
        rollout = attention_rollout(model, images)
    except ValueError:
        rollout = None  # layers over different tokens
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalization(config.data, config.model.in_chans))
    seen = (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).squeeze(-1).double()
    write_figure(folder / "maps.png", draw_attention_maps([picture.numpy() for picture in seen], maps[-1], rollout))


def _plain_heads(layer: HeadStatistics) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "diversity": {"mean": layer.diversity.mean().item(), "sd": layer.diversity.std(correction=0).item()},
        "entropy_bits": None if layer.entropy is None else layer.entropy.tolist(),
        "similarity": layer.similarity.tolist(),
    }
