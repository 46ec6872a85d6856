"""Frames of a video at given times: upright, each shrunk as it is decoded, so that memory stays small."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
import torch
from av.error import FFmpegError
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from fibottention.errors import UserError

__all__ = ["Video", "check_backend", "open_video"]


class Video(Protocol):
    """A video that is open for reading.

    Attributes:
        times: When each frame begins to be shown, in seconds, ascending.
    """

    times: NDArray[np.float64]

    def frames(self, indices: Sequence[int], short_side: int | None = None) -> Tensor:
        """Frames by their place in ``times``.

        Args:
            indices: Places in ascending order, which may repeat.
            short_side: Length to which the shorter side is resized, in pixels; None leaves frames as they are.

        Returns:
            ``(T, 3, H, W)`` of uint8, upright as a player shows them.

        Raises:
            UserError: If a frame cannot be decoded.
        """
        ...

    def close(self) -> None:
        """Give the file back."""
        ...


@contextlib.contextmanager
def open_video(path: str | Path, backend: str = "pyav") -> Iterator[Video]:
    """Open a video file.

    Args:
        path: The file.
        backend: ``"pyav"`` or ``"torchcodec"``.

    Raises:
        UserError: If there is no such file, no video that can be decoded in it, or the backend is not there.
    """
    check_backend(backend)
    path = Path(path)
    try:
        if not path.is_file():
            raise UserError("no such file")
        if not path.stat().st_size:
            raise UserError("an empty file")
    except OSError as error:
        raise UserError(error.strerror or "no such file") from error
    video = _BACKENDS[backend](path)
    try:
        yield video
    finally:
        video.close()


# Containers whose frames have reliable times and can be sought by them. Of the others a video is read from its start.
_SEEKABLE = ("mp4", "matroska")
_MOST_LOST = 2  # frames that a decoder may leave out; the one before is shown instead, as players do


class _PyAVVideo:
    """A video read with PyAV, on one thread: the processes of a loader are parallel already."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.converter = VideoReformatter()  # one for all frames: making it takes longer than using it
        self.container = self._open()
        try:
            self._read_times()
        except BaseException:
            self.container.close()
            raise

    def _open(self) -> Any:
        try:
            container = av.open(str(self.path))
        except (FFmpegError, ValueError, UnicodeError) as error:
            raise UserError(f"not a video that can be opened ({_reason(error)})") from error
        reason = None
        if not container.streams.video:
            reason = "a file without video"
        elif container.streams.video[0].codec_context is None:
            reason = "a video whose codec is not known"
        elif container.streams.video[0].time_base is None:
            reason = "a video without times"
        if reason is not None:
            container.close()
            raise UserError(reason)
        container.streams.video[0].codec_context.thread_count = 1
        return container

    def _read_times(self) -> None:
        """Read the times of all frames from the packets, without decoding."""
        stream = self.container.streams.video[0]
        packets = []
        try:
            for packet in self.container.demux(stream):
                if packet.size and not packet.is_discard:
                    packets.append((packet.pts, packet.dts, packet.is_keyframe))
        except FFmpegError as error:
            if not packets:
                raise UserError(f"not a readable video ({_reason(error)})") from error
        # Frames before 0 prepare the decoder and are not shown, unless all times are so.
        stamps = [pts for pts, _, _ in packets if pts is not None]
        shown = sorted({stamp for stamp in stamps if stamp >= 0} or set(stamps))
        # AVI has no times of its own, and a packet of MPEG need not have one; their frames are counted.
        container = self.container.format.name
        self.is_counted = container == "avi" or len(stamps) < len(packets)
        self.is_seekable = not self.is_counted and any(name in container for name in _SEEKABLE)
        if self.is_counted:
            rate = float(stream.average_rate or stream.guessed_rate or 25)
            self.times: NDArray[np.float64] = np.arange(len(packets)) / rate
        else:
            self.times = np.asarray(shown, dtype=np.float64) * float(stream.time_base)
        self.place_of = {stamp: place for place, stamp in enumerate(shown)}
        # Where decoding may begin: place of the key frame, and the time to seek.
        self.starts = sorted(
            (self.place_of[pts], dts)
            for pts, dts, is_key in packets
            if is_key and pts in self.place_of and dts is not None
        )
        if not len(self.times):
            raise UserError("a video without frames")

    def frames(self, indices: Sequence[int], short_side: int | None = None) -> Tensor:
        """See `Video`."""
        wanted = [int(index) for index in indices]
        found: dict[int, tuple[int, Tensor]] = {}
        problem = None
        start = max((start for start in self.starts if start[0] <= wanted[0]), default=None)
        if self.is_seekable and start is not None:
            problem = self._decode(wanted, found, short_side, start[1])
        if problem is not None or any(place not in found or found[place][0] != place for place in wanted):
            found.clear()
            problem = self._decode(wanted, found, short_side, None)
        pictures = []
        for place in wanted:
            shown, picture = found.get(place, (-1, None))
            if picture is None or place - shown > (0 if problem is not None else _MOST_LOST):
                reason = f" ({problem})" if problem else ""
                raise UserError(f"a damaged video: the frame at {self.times[place]:.2f} s cannot be decoded{reason}")
            pictures.append(picture)
        if any(picture.shape != pictures[0].shape for picture in pictures):
            raise UserError("a video whose frames change their size")
        return torch.stack(pictures)

    def _decode(
        self, wanted: Sequence[int], found: dict[int, tuple[int, Tensor]], short_side: int | None, seek: int | None
    ) -> str | None:
        """Decode until the last wanted place; says what went wrong, if so.

        Args:
            wanted: Places of frames, ascending.
            found: Gets, by wanted place, the place that was decoded for it and the picture: the place itself, or the
                last one before it.
            short_side: As for `frames`.
            seek: Time of the packet to begin at; None begins at the start.
        """
        waiting = sorted(set(wanted), reverse=True)
        previous: tuple[int, Any] | None = None
        try:
            if seek is None:
                self.container.close()
                self.container = self._open()
            stream = self.container.streams.video[0]
            if seek is not None:
                self.container.seek(seek, stream=stream, backward=True)
            for number, frame in enumerate(self.container.decode(stream)):
                place = number if self.is_counted else self.place_of.get(frame.pts)
                if place is None or (previous is not None and place <= previous[0]):
                    continue  # not to be shown
                while waiting and waiting[-1] < place:
                    passed = waiting.pop()
                    if previous is not None:
                        found[passed] = previous[0], _picture(previous[1], short_side, self.converter)
                if waiting and waiting[-1] == place:
                    found[waiting.pop()] = place, _picture(frame, short_side, self.converter)
                previous = place, frame
                if not waiting:
                    return None
        except (FFmpegError, ValueError, RuntimeError) as error:
            return _reason(error)
        for passed in waiting:
            if previous is not None:
                found[passed] = previous[0], _picture(previous[1], short_side, self.converter)
        return None

    def close(self) -> None:
        """See `Video`."""
        self.container.close()


class _TorchCodecVideo:
    """A video whose frames torchcodec decodes; the times are read with PyAV, since torchcodec does not tell them."""

    def __init__(self, path: Path) -> None:
        decoder = _torchcodec()
        timeline = _PyAVVideo(path)
        self.times = timeline.times
        timeline.close()
        try:
            self.decoder = decoder(str(path), num_ffmpeg_threads=1)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"not a video that can be opened ({_reason(error)})") from error
        if len(self.decoder) != len(self.times):
            raise UserError(
                f"a video of {len(self.times)} frames, of which torchcodec counts {len(self.decoder)}; "
                "data.backend=pyav reads it"
            )

    def frames(self, indices: Sequence[int], short_side: int | None = None) -> Tensor:
        """See `Video`."""
        try:
            frames = [_resized(self.decoder.get_frame_at(int(index)).data, short_side) for index in indices]
            return torch.stack(frames)
        except (RuntimeError, IndexError) as error:
            raise UserError(f"a damaged video ({_reason(error)})") from error

    def close(self) -> None:
        """See `Video`."""
        del self.decoder


def _torchcodec() -> Any:
    """Torchcodec's decoder.

    Raises:
        UserError: If it is not there or does not work.
    """
    try:
        from torchcodec import decoders  # pyright: ignore[reportMissingImports]
        from torchcodec._core import ops  # noqa: F401  # pyright: ignore[reportMissingImports]  (loads FFmpeg)
    except ImportError as error:
        raise UserError("data.backend=torchcodec needs the package torchcodec: pip install torchcodec") from error
    except (RuntimeError, OSError) as error:
        reason = "its libraries do not load; is FFmpeg installed?"
        raise UserError(f"data.backend=torchcodec does not work here: {reason}") from error
    return decoders.VideoDecoder


def check_backend(name: str) -> None:
    """Check that videos can be decoded in a way.

    Raises:
        UserError: If there is no such backend, or it does not work here.
    """
    if name not in _BACKENDS:
        raise UserError(f"data.backend must be one of {', '.join(_BACKENDS)}, got {name!r}")
    if name == "torchcodec":
        _torchcodec()


_BACKENDS: dict[str, Callable[[Path], Any]] = {"pyav": _PyAVVideo, "torchcodec": _TorchCodecVideo}


def _picture(frame: Any, short_side: int | None, converter: VideoReformatter) -> Tensor:
    """A decoded frame, ``(3, H, W)`` of uint8, turned as its display matrix says."""
    picture = torch.from_numpy(converter.reformat(frame, format="rgb24").to_ndarray()).permute(2, 0, 1)
    turns = round(frame.rotation / 90) % 4  # counter-clockwise
    return _resized(torch.rot90(picture, turns, (1, 2)), short_side)


def _resized(picture: Tensor, short_side: int | None) -> Tensor:
    if short_side is None or min(picture.shape[-2:]) == short_side:
        return picture.contiguous()
    return transforms.resize(picture, [short_side], antialias=True)


def _reason(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__)[:200]
