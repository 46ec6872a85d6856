"""Cutting the persons out of videos: boxes from a file or a detector, one crop per video, resized and encoded."""

import contextlib
import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.transforms.v2 import functional as transforms

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.video.decode import open_video
from fibottention.tasks.video.encode import VideoWriter
from fibottention.training.run import load_weights, write_atomically

__all__ = ["Box", "PersonDetector", "crop_video", "read_boxes", "square_around"]

Box = tuple[float, float, float, float]

_PERSON = 1  # in COCO, which torchvision's detectors are trained on
_BATCH = 32  # frames in memory at a time


def read_boxes(path: Path) -> dict[str, Box]:
    """Boxes of persons by video: the union of all boxes that a file has for it.

    Args:
        path: CSV with a header and the columns ``path``, ``x1``, ``y1``, ``x2``, ``y2`` in pixels of the upright frame;
            others, such as ``frame``, are not looked at.

    Raises:
        UserError: If the file cannot be read, or a box is not one.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--boxes: {path} cannot be read: {getattr(error, 'strerror', None) or 'not CSV'}") from error
    boxes: dict[str, Box] = {}
    for number, row in enumerate(rows, 2):
        try:
            name = row["path"]
            x1, y1, x2, y2 = (float(row[key]) for key in ("x1", "y1", "x2", "y2"))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}, line {number}: a box needs path, x1, y1, x2 and y2, got {dict(row)}") from error
        if not (x1 + 1 <= x2 < math.inf and y1 + 1 <= y2 < math.inf and -math.inf < min(x1, y1)):
            raise UserError(f"{path}, line {number}: a box needs x1 < x2 and y1 < y2, got {(x1, y1, x2, y2)}")
        a = boxes.get(name, (x1, y1, x2, y2))
        boxes[name] = (min(a[0], x1), min(a[1], y1), max(a[2], x2), max(a[3], y2))
    if not boxes:
        raise UserError(f"--boxes: {path} holds no boxes")
    return boxes


@dataclass
class PersonDetector:
    """A detector of torchvision that finds persons.

    Args:
        model: The detector.
        score: Least score of a detection.
        frames: Frames looked at per video, evenly spread.
    """

    model: nn.Module
    score: float = 0.7
    frames: int = 8

    @classmethod
    def load(cls, name: str, weights: Path, score: float) -> "PersonDetector":
        """A detector with weights from a file, which torchvision's own download would give.

        Args:
            name: Name of the detector in ``torchvision.models.detection``.
            weights: File of weights for COCO's 91 classes.
            score: Least score of a detection.

        Raises:
            UserError: If there is no such detector, or the weights are not its.
        """
        known = [
            n
            for n in detection.__dict__
            if n.startswith(("fasterrcnn", "fcos", "retinanet", "ssd"))
            and callable(getattr(detection, n))
            and n.islower()
        ]
        if name not in known:
            raise UserError(f"--detector: torchvision has no detector {name!r}{nearest(name, known)}")
        model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=91)
        try:
            model.load_state_dict(load_weights(weights))
        except RuntimeError as error:
            raise UserError(f"--weights: {weights} does not fit {name}: {str(error).splitlines()[0]}") from error
        return cls(model.eval(), score)

    @torch.no_grad()
    def find(self, frames: Tensor) -> Box | None:
        """The union of the persons in frames ``(T, 3, H, W)`` of uint8, None if there is none."""
        found = []
        for frame in frames:
            result: Mapping[str, Tensor] = self.model([frame.float() / 255])[0]
            keep = (result["labels"] == _PERSON) & (result["scores"] >= self.score)
            found.append(result["boxes"][keep])
        boxes = torch.cat(found)
        if not len(boxes):
            return None
        low, high = boxes[:, :2].amin(0).tolist(), boxes[:, 2:].amax(0).tolist()
        return low[0], low[1], high[0], high[1]


def square_around(box: Box, width: int, height: int, margin: float) -> tuple[int, int, int, int]:
    """The square around a box, with a margin, moved into the frame where it fits; left, top, right, bottom.

    Args:
        box: Left, top, right and bottom in pixels.
        width: Width of the frame.
        height: Height of the frame.
        margin: Share of the longer side that is added all around.
    """
    side = max(box[2] - box[0], box[3] - box[1]) * (1 + 2 * margin)
    across, down = min(round(side), width), min(round(side), height)
    left = round((box[0] + box[2]) / 2 - across / 2)
    top = round((box[1] + box[3]) / 2 - down / 2)
    left, top = min(max(left, 0), width - across), min(max(top, 0), height - down)
    return left, top, left + across, top + down


def crop_video(
    source: Path,
    target: Path,
    *,
    box: Box | None,
    detector: PersonDetector | None,
    size: int,
    margin: float,
) -> bool:
    """Write the part of a video that shows the person, as MP4 with the longer side resized to ``size``.

    Args:
        source: The video.
        target: The file to write; whole or not at all.
        box: The person; found by the detector if None.
        detector: Finds the person.
        size: Length of the longer side of the result, in pixels, even.
        margin: Share of the person's longer side that is added all around.

    Returns:
        Whether a person was found; without one nothing is written.

    Raises:
        UserError: If the video cannot be read.
    """
    with open_video(source) as video:
        count = len(video.times)
        if box is None:
            assert detector is not None
            looked_at = np.unique(np.linspace(0, count - 1, min(count, detector.frames)).round().astype(int))
            box = detector.find(video.frames(looked_at.tolist()))
            if box is None:
                return False
        times = video.times
        rate = Fraction((count - 1) / (times[-1] - times[0])).limit_denominator(1001) if count > 1 else Fraction(1)

        def write(temporary: Path) -> None:
            with contextlib.closing(VideoWriter(temporary, rate)) as writer:
                for begin in range(0, count, _BATCH):
                    part = range(begin, min(begin + _BATCH, count))
                    frames = video.frames(list(part))
                    height, width = frames.shape[-2:]
                    left, top, right, bottom = square_around(box, width, height, margin)
                    scale = size / max(right - left, bottom - top)
                    shape = [max(2, round(side * scale / 2) * 2) for side in (bottom - top, right - left)]
                    resized = transforms.resize(frames[..., top:bottom, left:right], shape, antialias=True)
                    for index, frame in zip(part, resized.permute(0, 2, 3, 1).numpy(), strict=True):
                        # The times of the source stay, also where its frame rate varies.
                        writer.add(frame, times[index] - times[0])

        write_atomically(target, write)
    return True
