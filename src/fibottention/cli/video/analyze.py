"""``fibottention analyze`` for a video run: where the heads look, frame by frame."""

from pathlib import Path

import numpy as np
import torch

from fibottention.analysis.clip_maps import clip_maps, draw_clip_maps, overlay_clip
from fibottention.cli.options import CommandParser, make_console
from fibottention.errors import UserError
from fibottention.tasks.runs import load_model
from fibottention.tasks.video.config import VideoConfig
from fibottention.tasks.video.data import ClipReader, EvalTransform, open_videos
from fibottention.tasks.video.encode import write_video
from fibottention.training.run import Run, write_figure

__all__ = ["run"]


def run(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        prog="fibottention analyze",
        description="Draw where the heads of a video model look, frame by frame: a contact sheet per video (all heads "
        "of one layer) and an MP4 (their mean beside the clip), into RUN/analysis, where fibottention report finds the "
        "sheets.",
    )
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="folder of a video run, or a checkpoint in it")
    parser.add_argument("--videos", type=Path, nargs="+", help="video files (default: validation videos of the run)")
    parser.add_argument("--count", type=int, default=3, help="number of validation videos (default 3)")
    parser.add_argument("--layer", type=int, help="number of the layer, from 1 (default: the last one)")
    parser.add_argument("--root", help="folder of the data in the place of the run's own")
    arguments = parser.parse_args(words)
    if arguments.count < 1:
        raise UserError(f"--count must be at least 1, got {arguments.count}")
    model, config, _, run_ = load_model(arguments.run)
    if not isinstance(config, VideoConfig):
        raise UserError(f"{arguments.run} is a {config.task} run, not one of videos")
    if arguments.root is not None:
        config.data.root = arguments.root
    config.data.views = config.data.crops = 1
    paths = arguments.videos
    if paths is None:
        samples = open_videos(config.data, train=False).samples
        count = min(arguments.count, len(samples))
        paths = [samples[index * len(samples) // count][0] for index in range(count)]
    reader, transform = ClipReader(config.data), EvalTransform(config.data)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (config.data.mean, config.data.std))
    folder, console = run_.folder / "analysis", make_console()
    layers = []
    for number, path in enumerate(paths, 1):
        try:
            clip = transform(reader.read(path))
        except UserError as error:
            raise UserError(f"cannot read {path}: {error}") from error
        try:
            maps = clip_maps(model, clip)
        except ValueError as error:
            raise UserError(str(error)) from error
        if not maps:
            raise UserError("this attention has no weights of pairs, so there is nothing to draw")
        if arguments.layer is not None and not 1 <= arguments.layer <= len(maps):
            raise UserError(f"--layer must be in 1 .. {len(maps)}, got {arguments.layer}")
        chosen = maps[(arguments.layer or len(maps)) - 1]
        frames = (clip[0] * std + mean).clamp(0, 1).permute(0, 2, 3, 1).double().numpy()
        write_figure(folder / f"clip_{number}.png", draw_clip_maps(frames, chosen.values[0]))
        larger = np.kron(overlay_clip(frames, chosen.values[0]), np.ones((1, 2, 2, 1), dtype=np.uint8))
        write_video(folder / f"clip_{number}.mp4", larger, 4)
        layers.append({"video": str(path), "layer": chosen.layer, "of": "CLS" if chosen.of_prefix else "all queries"})
        console.print(f"{path}: {folder / f'clip_{number}.png'} and .mp4", soft_wrap=True)
    written = {f"clip_{number}" for number in range(1, len(paths) + 1)}
    for old in folder.glob("clip_*"):
        if old.stem not in written:
            old.unlink()  # of more videos
    Run(folder).write_json("clips.json", layers)
    return 0
