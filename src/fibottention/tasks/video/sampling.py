"""Which frames of a video a clip takes."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["clip_indices", "view_starts"]


def clip_indices(
    times: NDArray[np.float64], start: float, num_frames: int, rate: float, fps: float | None = None
) -> NDArray[np.int64]:
    """Places of the frames that are on the screen at the times of a clip.

    The frames are ``rate`` apart at ``fps`` frames per second, or at the mean frame rate of the video, so that a video
    of variable frame rate is sampled evenly in time. What lies beyond the end repeats the last frame.

    Args:
        times: When each frame begins to be shown, in seconds, ascending.
        start: Where the clip begins, from 0 (as early as can be) to 1 (as late as can be).
        num_frames: Frames of the clip.
        rate: Distance of two frames of the clip, in frames.
        fps: Frames per second that ``rate`` counts in; those of the video if None.

    Returns:
        ``(num_frames,)`` places in ``times``.
    """
    step = rate / (fps or _mean_rate(times))
    room = max(0.0, times[-1] - times[0] - step * (num_frames - 1))
    moments = times[0] + start * room + step * np.arange(num_frames)
    # Files round the times of their frames, some to milliseconds.
    slack = 0.1 / _mean_rate(times)
    return np.clip(np.searchsorted(times, moments + slack, side="right") - 1, 0, len(times) - 1)


def view_starts(views: int) -> NDArray[np.float64]:
    """Where the clips of an evaluation begin: the middles of as many equal parts, so that one is in the centre."""
    return (np.arange(views) + 0.5) / views


def _mean_rate(times: NDArray[np.float64]) -> float:
    """Mean number of frames per second; of a single frame 1, which any distance leaves where it is."""
    length = times[-1] - times[0]
    return (len(times) - 1) / length if length > 0 else 1.0
