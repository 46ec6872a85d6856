"""``fibottention video crop``: cut the persons out of a folder of videos."""

import multiprocessing
from functools import partial
from pathlib import Path

import torch
from rich.progress import track

from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.video.crop import Box, PersonDetector, crop_video, read_boxes
from fibottention.tasks.video.lists import find_videos
from fibottention.training.run import write_atomically

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention video crop",
        description="Cut the person out of each video of a folder and resize the crop, into the same places of another "
        "folder, as MP4. Boxes come from a file, or from a detector of torchvision whose weights you have. What is "
        "there already is not made again; what cannot be read or shows no person is listed in OUTPUT/left_out.txt.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder with the videos, at any depth")
    parser.add_argument("--output", type=Path, required=True, help="folder for the crops")
    parser.add_argument("--boxes", type=Path, help="CSV: path,x1,y1,x2,y2 with a header; the union of a video's boxes")
    parser.add_argument("--detector", default="fasterrcnn_mobilenet_v3_large_320_fpn", help="torchvision's name of it")
    parser.add_argument("--weights", type=Path, help="weights of the detector, trained on COCO")
    parser.add_argument("--score", type=float, default=0.7, help="least score of a detection (default 0.7)")
    parser.add_argument("--margin", type=float, default=0.1, help="share added around the person (default 0.1)")
    parser.add_argument("--size", type=int, default=256, help="longer side of the crops in pixels (default 256)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    arguments = parser.parse_args(words)
    folder, output = arguments.folder, arguments.output
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    if (arguments.boxes is None) == (arguments.weights is None):
        raise UserError("give --boxes FILE, or --weights FILE of a detector; one of the two")
    if arguments.size < 16 or arguments.size % 2:
        raise UserError(f"--size must be an even number from 16 on, got {arguments.size}")
    if arguments.workers < 1:
        raise UserError(f"--workers must be at least 1, got {arguments.workers}")
    if not 0 <= arguments.score <= 1 or arguments.margin < 0:
        raise UserError(f"--score must be in 0 .. 1 and --margin at least 0, got {arguments.score}, {arguments.margin}")
    if output.resolve() == folder.resolve():
        raise UserError("--output must be another folder than that of the videos")
    videos = [path for path in find_videos(folder) if output.resolve() not in path.resolve().parents]
    if not videos:
        raise UserError(f"{folder} holds no videos")
    targets: dict[Path, Path] = {}
    for path in videos:
        other = targets.setdefault(_target(path, folder, output), path)
        if other != path:
            raise UserError(f"{other} and {path} would become the same file; rename one of them")
    boxes = None if arguments.boxes is None else read_boxes(arguments.boxes)
    if arguments.weights is not None:  # a mistake in these is no video's
        PersonDetector.load(arguments.detector, arguments.weights, arguments.score)
    pending = [path for path in videos if not _target(path, folder, output).is_file()]
    console = make_console()
    work = partial(_crop, folder=folder, output=output, size=arguments.size, margin=arguments.margin)
    start = (boxes, arguments.detector, arguments.weights, arguments.score)
    left_out = []
    # Processes are started anew, since torch's threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(min(arguments.workers, max(1, len(pending))), _start, start) as pool:
        for path, reason in track(
            pool.imap(work, pending), "cropping", total=len(pending), console=console, disable=not console.is_terminal
        ):
            if reason is not None:
                left_out.append(f"{path.relative_to(folder)}: {reason}")
    made = len(pending) - len(left_out)
    console.print(
        f"{made} videos cropped into {output}, {len(videos) - len(pending)} were there already", soft_wrap=True
    )
    listed = output / "left_out.txt"
    listed.unlink(missing_ok=True)
    if left_out:
        write_atomically(listed, lambda path: path.write_text("".join(f"{line}\n" for line in left_out)))
        console.print(f"{len(left_out)} were left out (listed in {listed}), such as {left_out[0]}", soft_wrap=True)
    return 0


def _target(path: Path, folder: Path, output: Path) -> Path:
    return (output / path.relative_to(folder)).with_suffix(".mp4")


# Of each process: the boxes, or the detector.
_boxes: dict[str, Box] | None = None
_detector: PersonDetector | None = None


def _start(boxes: dict[str, Box] | None, name: str, weights: Path | None, score: float) -> None:
    global _boxes, _detector
    torch.set_num_threads(1)
    _boxes = boxes
    _detector = None if weights is None else PersonDetector.load(name, weights, score)


def _crop(path: Path, *, folder: Path, output: Path, size: int, margin: float) -> tuple[Path, str | None]:
    """Crop one video; returns its path and why it was left out, if so."""
    box = None
    if _boxes is not None:
        box = _boxes.get(path.relative_to(folder).as_posix()) or _boxes.get(str(path))
        if box is None:
            return path, "there is no box for it"
    target = _target(path, folder, output)
    try:
        found = crop_video(path, target, box=box, detector=_detector, size=size, margin=margin)
    except Exception as error:  # one bad video must not end the work on the others
        return path, " ".join(str(error).split()) or type(error).__name__
    return path, None if found else "no person was found"
