"""``fibottention predict`` for detectors and segmenters: draw what they find, and write it as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.predict import predict_image
from fibottention.tasks.dense.sources.base import to_rgb
from fibottention.tasks.runs import load_model
from fibottention.training.engine import make_accelerator
from fibottention.training.run import write_atomically

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention predict",
        description="Find objects, classes or segments in images: draws them into the images (PNG) and writes them as "
        "JSON, with masks in COCO's compressed form.",
    )
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a run, or a checkpoint in it")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="images")
    parser.add_argument("--threshold", type=float, default=0.5, help="smallest score of an object (default 0.5)")
    parser.add_argument("--output", type=Path, help="folder for the pictures and JSON files (default RUN/predictions)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="device")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line per image")
    arguments = parser.parse_args(words)
    if not 0 <= arguments.threshold <= 1:
        raise UserError(f"--threshold must be in 0 .. 1, got {arguments.threshold:g}")
    stems = [path.stem for path in arguments.files]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise UserError(f"two images are named {twice}, and so would be what is written about them")
    if arguments.output is not None and arguments.output.exists() and not arguments.output.is_dir():
        raise UserError(f"--output: {arguments.output} is a file, not a folder")
    model, config, saved, run_ = load_model(arguments.run)
    assert isinstance(config, DenseConfig)
    if arguments.device is not None:
        config.train.device = arguments.device
    folder = arguments.output or run_.folder / "predictions"
    given = {path.resolve() for path in arguments.files}
    if own := next((p for s in stems if (p := (folder / f"{s}.png").resolve()) in given), None):
        raise UserError(f"the drawing would be written over the image {own}; name another folder with --output")
    model.to(make_accelerator(config.train).device)
    predictions, unread = [], []
    console = make_console()
    for path in arguments.files:
        try:
            image = _read(path)
        except UserError as error:
            unread.append(f"cannot read {path}: {error}")
            continue
        picture, found = predict_image(model, image, saved["classes"], arguments.threshold)
        content = {"image": str(path), "height": image.height, "width": image.width, **found}
        _write(folder, path.stem, picture, content)
        predictions.append(content)
        if not arguments.json:
            console.print(f"{path}: {_told(found)}; {folder / path.stem}.png and .json", soft_wrap=True)
    if arguments.json:
        sys.stdout.write(json.dumps(predictions, indent=1) + "\n")
    for sentence in unread:
        sys.stderr.write(f"fibottention: {sentence}\n")
    return 2 if unread else 0


def _read(path: Path) -> Image.Image:
    if not path.is_file():
        raise UserError("a folder, not an image" if path.is_dir() else "no such file")
    try:
        with Image.open(path) as file:
            return to_rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError as error:
        raise UserError("not an image") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(" ".join(str(error).split())) from error


def _write(folder: Path, stem: str, picture: Image.Image, content: dict[str, Any]) -> None:
    write_atomically(folder / f"{stem}.png", lambda path: picture.save(path, "PNG"))
    write_atomically(folder / f"{stem}.json", lambda path: path.write_text(json.dumps(content) + "\n"))


def _told(found: dict[str, Any]) -> str:
    """What was found, in a few words."""
    (kind, entries), counts = next(iter(found.items())), {}
    if kind == "classes":
        largest = sorted(entries, key=lambda entry: -entry["share"])[:5]
        return ", ".join(f"{entry['class']} {entry['share']:.0%}" for entry in largest)
    for entry in entries:
        counts[entry["class"]] = counts.get(entry["class"], 0) + 1
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    kind = kind.removesuffix("s") if len(entries) == 1 else kind
    return f"{len(entries)} {kind}" + (f" ({listed})" if listed else "")
