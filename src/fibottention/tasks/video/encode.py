"""Writing frames as a video file."""

import contextlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from fibottention.training.run import write_atomically

__all__ = ["VideoWriter", "write_video"]

_TICKS = 90_000  # per second


class VideoWriter:
    """An MP4 file (H.264) that frames are added to, each with its time.

    Args:
        path: The file.
        rate: Frames per second, of which the encoder takes note only.
        lossless: Keep every value, as RGB; few players show that.
    """

    def __init__(self, path: Path, rate: Fraction | int, lossless: bool = False) -> None:
        self.container = av.open(str(path), "w", format="mp4")
        # Without loss a key frame often, since such files are for reading frames here and there.
        options = {"crf": "0", "g": "10"} if lossless else {"crf": "17"}
        codec = "libx264rgb" if lossless else "libx264"
        stream: Any = self.container.add_stream(codec, rate=rate, options={**options, "threads": "1"})
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        stream.codec_context.time_base = Fraction(1, _TICKS)
        self.stream = stream

    def add(self, frame: NDArray[np.uint8], seconds: float) -> None:
        """Add a frame.

        Args:
            frame: ``(H, W, 3)``, H and W even.
            seconds: When it begins to be shown.
        """
        if not self.stream.codec_context.is_open:
            self.stream.height, self.stream.width = frame.shape[:2]
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture.pts, picture.time_base = round(seconds * _TICKS), Fraction(1, _TICKS)
        self.container.mux(self.stream.encode(picture))

    def close(self) -> None:
        """Finish the file."""
        try:
            if self.stream.codec_context.is_open:
                self.container.mux(self.stream.encode())
        finally:
            self.container.close()


def write_video(path: Path, frames: NDArray[np.uint8], fps: int) -> None:
    """Write frames ``(T, H, W, 3)`` as MP4, whole or not at all; odd sides lose a row or column."""
    height, width = (side // 2 * 2 for side in frames.shape[1:3])

    def write(temporary: Path) -> None:
        with contextlib.closing(VideoWriter(temporary, fps)) as writer:
            for index, frame in enumerate(frames):
                writer.add(frame[:height, :width], index / fps)

    write_atomically(path, write)
