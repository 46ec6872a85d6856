"""Small videos that the tests make: their class is how a shape moves, so that one frame does not tell."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

MOTIONS = ("across", "down", "still", "slanted")
_STEPS = {"across": (0, 1), "down": (1, 0), "still": (0, 0), "slanted": (1, 1)}


def moving_square(motion: str, seed: int, frames: int = 12, size: tuple[int, int] = (48, 48)) -> NDArray[np.uint8]:
    """A bright square on noise, ``(T, H, W, 3)``, which moves round and round in one direction from a random place."""
    generator = np.random.default_rng(seed)
    height, width = size
    clip = generator.integers(0, 60, (1, height, width, 3)).repeat(frames, 0)
    place = generator.integers(0, min(size), 2)
    for number in range(frames):
        rows, columns = (
            (np.arange(12) + place[axis] + 4 * number * _STEPS[motion][axis]) % size[axis] for axis in (0, 1)
        )
        clip[number][np.ix_(rows, columns)] = 230
    return clip.astype(np.uint8)


def write_clip(
    path: Path,
    clip: NDArray[np.uint8],
    *,
    fps: int = 12,
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    rotation: int = 0,
    audio: bool = False,
) -> Path:
    """Encode frames with PyAV.

    Args:
        path: File; its suffix chooses the container.
        clip: ``(T, H, W, 3)``.
        fps: Frames per second.
        times: When each frame begins, in seconds, in the place of a constant rate.
        codec: FFmpeg's name of the encoder.
        options: Options of the encoder.
        rotation: Clockwise turn that a player makes, in degrees; MP4 only.
        audio: Whether to add a tone, as telephones do.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = clip.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if codec == "libx264":
            stream.options = {"crf": "10"}
        stream.options = {**stream.options, **(options or {})}
        base = Fraction(1, 90000) if times is not None else Fraction(1, fps)
        stream.codec_context.time_base = base
        tone = container.add_stream("aac", rate=8000) if audio else None
        for number, picture in enumerate(clip):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number if times is None else round(times[number] * 90000)
            frame.time_base = base
            container.mux(stream.encode(frame))
        if tone is not None:
            wave = np.sin(np.arange(8000) / 3).astype(np.float32)[None]
            sound = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
            sound.sample_rate, sound.pts = 8000, 0
            for packet in (*tone.encode(sound), *tone.encode()):
                container.mux(packet)
        container.mux(stream.encode())
    if rotation:
        _turn(path, rotation)
    return path


def _turn(path: Path, rotation: int) -> None:
    """Write a rotation into the matrix of the first track of an MP4 file."""
    content = bytearray(path.read_bytes())
    header = content.index(b"tkhd")
    begin = header + 4 + 4 + 20 + 16  # version and flags; times, number, length; place, layer, volume
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[rotation]
    matrix = [cos << 16, sin << 16, 0, -sin << 16, cos << 16, 0, 0, 0, 1 << 30]
    content[begin : begin + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    path.write_bytes(bytes(content))


def make_set(folder: Path, per_class: int = 4, frames: int = 12, size: tuple[int, int] = (48, 48)) -> Path:
    """Folders of videos by action, under ``train`` and ``val``."""
    for split, first in (("train", 0), ("val", 1000)):
        for number, motion in enumerate(MOTIONS):
            for index in range(per_class if split == "train" else max(1, per_class // 2)):
                seed = first + 100 * number + index
                write_clip(folder / split / motion / f"{index}.mp4", moving_square(motion, seed, frames, size))
    return folder
