import importlib.util

import numpy as np
import pytest
import torch

from fibottention.errors import UserError
from fibottention.tasks.video.decode import open_video
from fibottention.tasks.video.encode import write_video
from tests.videos import moving_square, write_clip


def torchcodec_works():
    if importlib.util.find_spec("torchcodec") is None:
        return False
    try:
        import torchcodec.decoders  # noqa: F401
    except (RuntimeError, OSError):
        return False
    return True


BACKENDS = ["pyav", *(["torchcodec"] if torchcodec_works() else [])]


def numbered(count=20, size=(32, 48)):
    """Frames whose brightness is their number."""
    return np.stack([np.full((*size, 3), 10 * number + 20, np.uint8) for number in range(count)])


def numbers(frames):
    return ((frames.float().mean((1, 2, 3)) - 20) / 10).round().int().tolist()


def coded(count=60):
    """Frames with their number in six bars, dark for 0 and bright for 1."""
    bits = np.arange(count)[:, None] >> np.arange(6) & 1
    rows = np.where(bits, 230, 20).astype(np.uint8).repeat(10, 1)
    return np.broadcast_to(rows[:, None, :, None], (count, 48, 60, 3)).copy()


def codes(frames):
    bars = frames.float().mean((1, 2)).unflatten(1, (6, 10))[..., 3:7].mean(-1) > 128
    return (bars.int() << torch.arange(6)).sum(1).tolist()


CONTAINERS = [
    ("mp4", "libx264", {}),
    ("mp4", "libx264", {"x264opts": "keyint=12:open-gop=1"}),
    ("mkv", "libx264", {"x264opts": "keyint=12"}),
    ("mp4", "mpeg4", {"bf": "2"}),
    ("mov", "mpeg4", {"bf": "2"}),
    ("avi", "mpeg4", {"bf": "2"}),  # as data sets of some age are: without times, and frames out of order
    ("avi", "libx264", {}),
    ("flv", "libx264", {}),
    ("ts", "libx264", {}),
    ("mpg", "mpeg1video", {"bf": "2"}),
    ("mpg", "mpeg2video", {"bf": "2"}),
    ("webm", "libvpx-vp9", {}),
]


@pytest.mark.parametrize(("suffix", "codec", "options"), CONTAINERS)
def test_frames_by_their_place(tmp_path, suffix, codec, options):
    path = write_clip(tmp_path / f"a.{suffix}", coded(), codec=codec, options=options, fps=25)
    with open_video(path) as video:
        assert len(video.times) == 60
        assert video.times - video.times[0] == pytest.approx(np.arange(60) / 25, abs=1e-3)
        for wanted in ([0], [59], [3, 4, 11], [0, 0, 7, 7, 19], list(range(60))):
            frames = video.frames(wanted)
            assert frames.dtype == torch.uint8
            assert frames.shape == (len(wanted), 3, 48, 60)
            assert codes(frames) == wanted
        # Each alone, in an order that needs seeking backwards.
        assert [codes(video.frames([place]))[0] for place in range(58, -1, -5)] == list(range(58, -1, -5))


@pytest.mark.skipif("torchcodec" not in BACKENDS, reason="torchcodec does not work here")
@pytest.mark.parametrize(("suffix", "codec", "options"), [CONTAINERS[i] for i in (0, 2, 3, 11)])
def test_both_backends_give_the_same_frames(tmp_path, suffix, codec, options):
    path = write_clip(tmp_path / f"a.{suffix}", coded(), codec=codec, options=options, fps=25)
    with open_video(path, "torchcodec") as video:
        assert codes(video.frames([0, 5, 31, 59])) == [0, 5, 31, 59]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotation_variable_rate_and_sound(tmp_path, backend):
    clip = np.zeros((6, 32, 48, 3), np.uint8)
    clip[:, :10, :10] = (250, 0, 0)  # red in the upper left corner as stored
    times = [0, 0.1, 0.15, 0.4, 0.45, 0.9]
    corners = {0: (5, 5), 90: (5, 27), 180: (27, 43), 270: (43, 5)}  # where a player shows it
    for rotation, corner in corners.items():
        path = write_clip(tmp_path / f"{rotation}.mp4", clip, times=times, rotation=rotation, audio=True)
        with open_video(path, backend) as video:
            assert video.times == pytest.approx(times, abs=1e-3)
            frames = video.frames([0, 5])
        assert frames.shape[-2:] == ((32, 48) if rotation % 180 == 0 else (48, 32))
        red = frames[1, 0].float() - frames[1, 1].float()
        assert (red > 120).nonzero().float().mean(0).tolist() == pytest.approx(corner, abs=1.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frames_are_shrunk_with_their_shape_kept(tmp_path, backend):
    path = write_clip(tmp_path / "a.mp4", moving_square("across", 0, 5, (60, 90)))
    with open_video(path, backend) as video:
        assert video.frames([0, 4], 20).shape == (2, 3, 20, 30)
        assert video.frames([0], 60).shape == (1, 3, 60, 90)


def test_times_that_begin_late_and_frames_between_key_frames(tmp_path):
    path = write_clip(tmp_path / "a.mp4", numbered(12), times=[5 + number / 7 for number in range(12)])
    with open_video(path) as video:
        assert numbers(video.frames([10, 11])) == [10, 11]
        assert numbers(video.frames([1])) == [1]  # backwards


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_frame(tmp_path, backend):
    path = write_clip(tmp_path / "a.mp4", numbered(1))
    with open_video(path, backend) as video:
        assert len(video.times) == 1
        assert numbers(video.frames([0, 0])) == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_files_that_cannot_be_read_say_why(tmp_path, backend):
    import av

    def fails(path, message):
        with pytest.raises(UserError, match=message), open_video(path, backend) as video:
            video.frames(list(range(len(video.times))))

    fails(tmp_path / "none.mp4", "no such file")
    (tmp_path / "zero.mp4").touch()
    fails(tmp_path / "zero.mp4", "an empty file")
    (tmp_path / "text.mp4").write_text("no video " * 100)
    fails(tmp_path / "text.mp4", "not a video that can be opened")
    whole = write_clip(tmp_path / "whole.mp4", moving_square("down", 0, 40, (96, 96))).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])  # without its index
    fails(tmp_path / "cut.mp4", "not a video that can be opened")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        for packet in (*stream.encode(sound), *stream.encode()):
            container.mux(packet)
    fails(tmp_path / "sound.mp4", "a file without video")
    with (
        pytest.raises(UserError, match="backend must be one of pyav, torchcodec, got 'opencv'"),
        open_video(tmp_path / "whole.mp4", "opencv"),
    ):
        pass


def test_damage_in_the_middle_is_no_wrong_picture(tmp_path):
    path = write_clip(tmp_path / "a.mp4", moving_square("down", 0, 60, (96, 96)))
    content = bytearray(path.read_bytes())
    begin = content.index(b"mdat") + 400
    content[begin : begin + len(content) // 2] = bytes(len(content) // 2)
    path.write_bytes(bytes(content))
    with (
        pytest.raises(UserError, match="damaged|cannot be opened|not a readable"),
        open_video(path) as video,
    ):
        video.frames(list(range(60)))


def test_a_file_that_was_cut_is_read_as_far_as_it_goes(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (60, 48, 48, 3), np.uint8)
    path = write_clip(tmp_path / "a.avi", noise, codec="mpeg4")
    whole = path.read_bytes()
    (tmp_path / "cut.avi").write_bytes(whole[: len(whole) * 7 // 10])
    with open_video(tmp_path / "cut.avi") as video:
        count = len(video.times)
        assert 5 <= count < 60
        frames = video.frames(list(range(count - 1)))
    with open_video(path) as video:
        assert torch.equal(frames, video.frames(list(range(count - 1))))


def test_a_missing_torchcodec_is_named(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "a.mp4", numbered(2))
    monkeypatch.setitem(__import__("sys").modules, "torchcodec.decoders", None)
    monkeypatch.setitem(__import__("sys").modules, "torchcodec", None)
    with pytest.raises(UserError, match="needs the package torchcodec"), open_video(path, "torchcodec"):
        pass


def test_written_frames_are_read_back(tmp_path):
    write_video(tmp_path / "a.mp4", numbered(8, (33, 49)), fps=5)
    with open_video(tmp_path / "a.mp4") as video:
        assert video.times == pytest.approx(np.arange(8) / 5, abs=1e-3)
        frames = video.frames(list(range(8)))
    assert frames.shape == (8, 3, 32, 48)
    assert numbers(frames) == list(range(8))
