"""Action recognition from video: model, loss and metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from fibottention.adapters.report import SparsifyReport
from fibottention.errors import UserError
from fibottention.tasks.recognition import RecognitionTask
from fibottention.tasks.video.config import VideoConfig
from fibottention.tasks.video.data import VideoData
from fibottention.tasks.video.decode import open_video
from fibottention.tasks.video.models import build_model
from fibottention.training.run import Run

__all__ = ["VideoTask", "film_strip"]

_SAMPLES, _STRIP_FRAMES, _STRIP_SIDE = 6, 8, 96


class VideoTask(RecognitionTask):
    """Action recognition for the `Trainer`; see `RecognitionTask`."""

    sample_name = "videos"

    def __init__(self, config: VideoConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.label_smoothing = config.augment.label_smoothing
        self.input_shape = (config.data.num_frames, 3, config.data.image_size, config.data.image_size)

    @staticmethod
    def make_data(config: VideoConfig, train: bool, classes: Sequence[str] | None) -> VideoData:
        """See `RecognitionTask`."""
        return VideoData(config, train=train, classes=classes)

    @staticmethod
    def build_model(config: VideoConfig, num_classes: int) -> tuple[nn.Module, SparsifyReport | None]:
        """See `RecognitionTask`."""
        return build_model(config, num_classes)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """See `Task`."""
        clips, targets, unreadable = batch
        self.note(unreadable, train=True)
        return F.cross_entropy(model(clips).logits, targets, label_smoothing=self.label_smoothing)

    @staticmethod
    def logits(model: nn.Module, samples: Tensor) -> Tensor:
        """Mean logits over the clips of ``(B, clips, T, 3, S, S)``, which rank the classes as their sum does."""
        # One clip of each video at a time, so that memory does not grow with their number.
        return torch.stack([model(clips).logits.float() for clips in samples.unbind(1)]).mean(0)

    def metrics(self, confusion: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Mean class accuracy over the classes that there are, and the names of those that there are not."""
        counts = confusion.sum(1)
        recall = confusion.diagonal()[counts > 0] / counts[counts > 0]
        absent = [name for name, count in zip(self.data.classes, counts.tolist(), strict=True) if not count]
        return {"mca": 100 * recall.mean().item()}, {"absent": absent}

    def save_samples(self, run: Run) -> None:
        """See `RecognitionTask`; a video is kept as a strip of frames."""
        source, classes, saved = self.data.val_dataset.source, self.data.classes, []
        seen: set[int] = set()
        for path, target in source.samples:
            if len(saved) == _SAMPLES:
                break
            if target in seen:
                continue
            try:
                strip = film_strip(path, source.reader.data.backend)
            except UserError:
                continue  # reported by the evaluation
            seen.add(target)
            file = run.folder / "samples" / f"{len(saved)}.png"
            file.parent.mkdir(exist_ok=True)
            strip.save(file)
            saved.append({"file": f"samples/{file.name}", "class": classes[target]})
        run.write_json("samples.json", saved)


def film_strip(path: Path, backend: str = "pyav") -> Image.Image:
    """Some frames of a video side by side.

    Raises:
        UserError: If it cannot be read.
    """
    with open_video(path, backend) as video:
        last = len(video.times) - 1
        places = [round(last * (i + 0.5) / _STRIP_FRAMES) for i in range(_STRIP_FRAMES)]
        frames = video.frames(places, _STRIP_SIDE)
    return Image.fromarray(np.concatenate(frames.permute(0, 2, 3, 1).numpy(), axis=1))
