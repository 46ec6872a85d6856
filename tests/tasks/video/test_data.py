import pickle
import shutil

import numpy as np
import pytest
import torch

from fibottention.errors import UserError
from fibottention.tasks.video.config import VideoAugmentConfig, VideoConfig, VideoDataConfig
from fibottention.tasks.video.data import ClipReader, EvalTransform, TrainTransform, VideoData, open_videos
from tests.videos import make_set, moving_square, write_clip


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return make_set(tmp_path_factory.mktemp("videos"))


def config(root, **data):
    options = {"num_frames": 4, "rate": 2, "image_size": 32, "workers": 0, **data}
    made = VideoConfig(data=VideoDataConfig(name="folder", root=str(root), **options))
    made.train.batch_size = 4
    return made


def test_batches(videos):
    data = VideoData(config(videos, views=2, crops=3))
    assert data.classes == ["across", "down", "slanted", "still"]
    clips, targets, unreadable = next(iter(data.train_loader))
    assert clips.shape == (4, 4, 3, 32, 32)
    assert unreadable.tolist() == [-1] * 4
    clips, targets, _ = next(iter(data.val_loader))
    assert clips.shape == (1, 6, 4, 3, 32, 32)  # a batch of evaluation has about as many clips as one of training
    assert targets.tolist() == [0]
    _, targets, _ = next(iter(VideoData(config(videos)).val_loader))
    assert targets.tolist() == [0, 0, 1, 1]


def test_samples_depend_on_seed_epoch_and_index_only(videos):
    def sample(index, seed=0, epoch=0, workers=0):
        made = config(videos, workers=workers)
        made.train.seed = seed
        data = VideoData(made)
        data.set_epoch(epoch)
        return data.train_dataset[index][0]

    state = torch.get_rng_state()
    first = sample(3)
    assert torch.equal(first, sample(3))
    assert not torch.equal(first, sample(3, epoch=1))
    assert not torch.equal(first, sample(3, seed=1))
    assert torch.equal(state, torch.get_rng_state())


def test_data_sets_can_be_sent_to_other_processes(videos):
    # As the workers of a loader get them on macOS and Windows.
    data = VideoData(config(videos))
    for dataset in (data.train_dataset, data.val_dataset):
        again = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(again[1][0], dataset[1][0])


def test_workers_give_the_same_batches(videos):
    batches = [list(VideoData(config(videos, workers=workers)).train_loader) for workers in (0, 2)]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_training_jitters_in_time_and_evaluation_does_not(tmp_path):
    # The brightness of a frame is its number.
    clip = np.stack([np.full((40, 60, 3), 10 * number + 20, np.uint8) for number in range(20)])
    path = write_clip(tmp_path / "a.mp4", clip)
    data = VideoDataConfig(num_frames=3, rate=2, image_size=32, views=3)

    def numbers(clips):
        return ((clips.float().mean((2, 3, 4)) - 20) / 10).round().int().tolist()

    starts = set()
    for seed in range(40):
        torch.manual_seed(seed)
        (one,) = numbers(ClipReader(data, (34, 40)).read(path))
        assert one == [one[0], one[0] + 2, one[0] + 4]
        starts.add(one[0])
    assert min(starts) <= 1
    assert max(starts) >= 14
    # 15 frames of room, views in the middles of its thirds.
    assert numbers(ClipReader(data).read(path)) == [[2, 4, 6], [7, 9, 11], [12, 14, 16]]


def test_training_scales_and_evaluation_has_one_size(tmp_path):
    path = write_clip(tmp_path / "a.mp4", moving_square("down", 0, 6, (60, 90)))
    data = VideoDataConfig(num_frames=2, rate=1, image_size=32, resize=36)
    sizes = set()
    for seed in range(30):
        torch.manual_seed(seed)
        clip = ClipReader(data, (40, 44)).read(path)
        assert clip.shape[:3] == (1, 2, 3)
        sizes.add(clip.shape[3])
    assert sizes == {40, 41, 42, 43, 44}
    assert ClipReader(data).read(path).shape == (1, 2, 3, 36, 54)


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (40, 40)])
def test_crops_lie_along_the_longer_side(shape):
    height, width = shape
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    clips = torch.stack([rows, columns, 0 * rows]).to(torch.uint8).expand(2, 5, 3, height, width)
    data = VideoDataConfig(image_size=30, crops=3, mean=[0, 0, 0], std=[1 / 255] * 3)
    crops = EvalTransform(data)(clips)
    assert crops.shape == (6, 5, 3, 30, 30)
    corners = [(int(crop[0, 0, 0, 0] + 0.5), int(crop[0, 1, 0, 0] + 0.5)) for crop in crops[:3]]
    expected = {
        (40, 60): [(5, 0), (5, 15), (5, 30)],
        (60, 40): [(0, 5), (15, 5), (30, 5)],
        (40, 40): [(5, 0), (5, 5), (5, 10)],
    }
    assert corners == expected[shape]
    assert torch.equal(
        EvalTransform(VideoDataConfig(image_size=30, mean=[0, 0, 0], std=[1 / 255] * 3))(clips), crops[1::3]
    )


def test_all_frames_of_a_clip_are_changed_alike():
    made = VideoConfig(data=VideoDataConfig(image_size=16), augment=VideoAugmentConfig(flip=0.5, color_jitter=0.4))
    frame = torch.randint(0, 255, (3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    transform = TrainTransform(made)
    seen = []
    for seed in range(8):
        torch.manual_seed(seed)
        clip = transform(frame.expand(1, 5, 3, 24, 24))
        assert clip.shape == (5, 3, 16, 16)
        assert torch.equal(clip, clip[:1].expand_as(clip))
        seen.append(clip[0])
    assert not torch.equal(seen[0], seen[1])


def test_normalization_is_as_published():
    made = VideoDataConfig(image_size=8)
    clips = torch.full((1, 2, 3, 8, 8), 255, dtype=torch.uint8)
    assert EvalTransform(made)(clips) == pytest.approx((1 - 0.45) / 0.225)


def test_unreadable_videos_are_noted_and_no_wrong_label(tmp_path):
    root = make_set(tmp_path)
    broken = root / "train/slanted/0.mp4"
    broken.write_bytes(b"broken")
    (root / "val/still/0.mp4").write_bytes(b"")
    data = VideoData(config(root))
    index = next(i for i, (path, _) in enumerate(data.train_dataset.source.samples) if path == broken)
    clip, target, unreadable = data.train_dataset[index]
    assert (target, unreadable) == (2, index)  # the next video of the class
    other = data.train_dataset[index + 1][1]
    assert target == other
    bad = len(data.val_dataset) - 2
    clip, target, unreadable = data.val_dataset[bad]
    assert (target, unreadable) == (-1, bad)
    assert clip.shape == data.val_dataset[0][0].shape
    assert data.name(bad, train=False).endswith("val/still/0.mp4")
    with pytest.raises(UserError, match="slanted/0.mp4: not a video that can be opened"):
        VideoData(config(root, strict=True)).train_dataset[index]


def test_lists_and_where_they_are_looked_for(videos, tmp_path):
    for name, folder in (("train.csv", "train"), ("test.csv", "val")):
        paths = sorted((videos / folder).rglob("*.mp4"))
        (tmp_path / name).write_text("".join(f"{path} {index % 4}\n" for index, path in enumerate(paths)))
    data = VideoDataConfig(root=str(tmp_path))
    assert len(open_videos(data, train=True).samples) == 16
    assert len(open_videos(data, train=False).samples) == 8
    (tmp_path / "val.csv").write_text((tmp_path / "test.csv").read_text().splitlines()[0])
    assert len(open_videos(data, train=False).samples) == 1
    assert len(open_videos(VideoDataConfig(root=str(tmp_path), val_split="test.csv"), train=False).samples) == 8
    assert len(open_videos(VideoDataConfig(val_split=str(tmp_path / "test.csv")), train=False).samples) == 8
    limited = open_videos(VideoDataConfig(root=str(tmp_path), limit=8), train=True)
    assert sorted(label for _, label in limited.samples) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert limited.classes == ("0", "1", "2", "3")


def test_labels_mean_the_same_in_training_and_validation(tmp_path):
    root = make_set(tmp_path)
    for motion in ("across", "down"):
        shutil.rmtree(root / "val" / motion)
    data = VideoData(config(root))
    assert data.classes == ["across", "down", "slanted", "still"]
    assert sorted({data.val_dataset[i][1] for i in range(4)}) == [2, 3]
    # Without training data the classes of the model hold.
    alone = VideoData(config(root), train=False, classes=data.classes)
    assert sorted({alone.val_dataset[i][1] for i in range(4)}) == [2, 3]
    (root / "val/jump").mkdir()
    with pytest.raises(UserError, match="has the action jump, which the training videos do not have"):
        VideoData(config(root))


def test_labels_of_lists_mean_the_same(videos, tmp_path):
    paths = sorted(videos.rglob("*.mp4"))
    (tmp_path / "train.csv").write_text("".join(f"{path} {i % 3}\n" for i, path in enumerate(paths)))
    (tmp_path / "val.csv").write_text(f"{paths[0]} 1\n")
    made = config(None)
    made.data.name, made.data.root = "list", str(tmp_path)
    assert VideoData(made).classes == ["0", "1", "2"]
    assert VideoData(made, train=False, classes=["a", "b", "c"]).classes == ["a", "b", "c"]
    (tmp_path / "val.csv").write_text(f"{paths[0]} 3\n")
    with pytest.raises(UserError, match="has a label 3, but the training videos have 3 classes"):
        VideoData(made)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/val.csv").write_text(f"{paths[0]} 1\n")
    (tmp_path / "other/classes.txt").write_text("x\ny\nz\n")
    made.data.val_split = "other/val.csv"
    with pytest.raises(UserError, match="classes.txt has other classes than the training videos, such as x"):
        VideoData(made)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "folder"}, "data.root must be given for data.name=folder"),
        ({"root": "/nowhere"}, "data.root=/nowhere is not a folder"),
        ({"root": "."}, "data.train_split: there is no list train.csv in data.root=.; name it with data.train_split"),
        ({"root": ".", "train_split": "x.csv"}, "data.train_split: there is no list x.csv in data.root=."),
        ({}, "data.train_split: there is no list train.csv here"),
        ({"backend": "opencv"}, "data.backend must be one of pyav, torchcodec, got 'opencv'"),
    ],
)
def test_data_that_are_not_there(data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        open_videos(VideoDataConfig(**data), train=True)


@pytest.mark.parametrize(
    ("group", "option", "value", "message"),
    [
        ("data", "resize", 20, "data.resize must be at least data.image_size=224, got 20"),
        ("data", "mean", [0.5], "data.mean must have 3 numbers"),
        ("data", "std", [0.1, 0, 0.1], "data.std must be above 0"),
        ("data", "views", 0, "data.views must be at least 1, got 0"),
        ("data", "rate", 0, "data.rate must be at least 0.001, got 0"),
        ("augment", "scale", (200, 300), "augment.scale must be two lengths from data.image_size=224 on"),
        ("augment", "scale", (300, 250), "augment.scale must be two lengths"),
        ("model", "drop_path", 1.5, "model.drop_path must be in 0 .. 0.99"),
    ],
)
def test_ranges(group, option, value, message):
    made = VideoConfig()
    setattr(getattr(made, group), option, value)
    with pytest.raises(UserError, match=message):
        made.check()


def test_scale_is_published_or_in_proportion():
    assert VideoConfig().train_scale == (256, 320)
    assert VideoConfig(data=VideoDataConfig(image_size=112)).train_scale == (128, 160)


def test_one_frame_and_many_frames_asked(tmp_path):
    path = write_clip(tmp_path / "a.mp4", moving_square("down", 0, 1))
    clips = ClipReader(VideoDataConfig(num_frames=5, rate=4, image_size=24, views=2)).read(path)
    assert clips.shape == (2, 5, 3, 24, 24)
    assert torch.equal(clips, clips[:1, :1].expand_as(clips))
