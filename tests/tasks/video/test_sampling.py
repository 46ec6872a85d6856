import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibottention.tasks.video.sampling import clip_indices, view_starts


def even(count, fps=25.0, start=0.0):
    return start + np.arange(count) / fps


def test_frames_are_a_fixed_distance_apart():
    assert clip_indices(even(100), 0.0, 4, 8).tolist() == [0, 8, 16, 24]
    assert clip_indices(even(100), 1.0, 4, 8).tolist() == [75, 83, 91, 99]
    assert clip_indices(even(100), 0.5, 4, 8).tolist() == [37, 45, 53, 61]


def test_times_need_not_begin_at_zero():
    assert clip_indices(even(100, start=3.2), 0.0, 4, 8).tolist() == [0, 8, 16, 24]


def test_short_videos_repeat_their_last_frame():
    assert clip_indices(even(10), 0.7, 4, 4).tolist() == [0, 4, 8, 9]
    assert clip_indices(even(1), 0.5, 4, 4).tolist() == [0, 0, 0, 0]


def test_rate_in_frames_per_second_of_ones_own():
    # Every 4th frame at 12.5 per second is every 8th at 25.
    assert clip_indices(even(100), 0.0, 4, 4, fps=12.5).tolist() == [0, 8, 16, 24]


def test_variable_frame_rate_is_sampled_evenly_in_time():
    # 1 s with 50 frames, then 1 s with 10: the mean rate is 59 frames in 1.9 s.
    times = np.concatenate([np.arange(50) / 50, 1 + np.arange(10) / 10])
    places = clip_indices(times, 0.0, 5, 0.4 * 59 / 1.9)
    assert times[places].round(2).tolist() == [0.0, 0.4, 0.8, 1.2, 1.6]


def test_times_that_a_container_rounds():
    times = (even(240, fps=30000 / 1001) * 1000).round() / 1000
    assert clip_indices(times, 0.0, 8, 16).tolist() == list(range(0, 128, 16))


def test_views_are_spread_evenly_and_one_is_in_the_centre():
    assert view_starts(1).tolist() == [0.5]
    assert view_starts(3) == pytest.approx([1 / 6, 1 / 2, 5 / 6])


@given(
    st.integers(1, 300), st.floats(0, 1), st.integers(1, 32), st.floats(0.1, 64), st.floats(1, 120), st.floats(-5, 100)
)
def test_indices_ascend_and_are_in_the_video(count, start, frames, rate, fps, begin):
    places = clip_indices(even(count, fps, begin), start, frames, rate)
    assert len(places) == frames
    assert (np.diff(places) >= 0).all()
    assert places.min() >= 0
    assert places.max() < count
