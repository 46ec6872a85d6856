import numpy as np
import pytest
import torch
from torch import nn

from fibottention.errors import UserError
from fibottention.tasks.video.crop import PersonDetector, crop_video, read_boxes, square_around
from fibottention.tasks.video.decode import open_video
from tests.videos import moving_square, write_clip


def test_boxes_of_a_video_are_joined(tmp_path):
    path = tmp_path / "boxes.csv"
    path.write_text("path,frame,x1,y1,x2,y2\na.mp4,0,10,20,30,40\na.mp4,5,5,25,28,50\nb/c.mp4,0,1,2,3,4.5\n")
    assert read_boxes(path) == {"a.mp4": (5, 20, 30, 50), "b/c.mp4": (1, 2, 3, 4.5)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no boxes"),
        ("path,x1,y1,x2\na,1,2,3\n", "line 2: a box needs path, x1, y1, x2 and y2"),
        ("path,x1,y1,x2,y2\na,1,2,3,4\nb,1,2,x,4\n", "line 3: a box needs path"),
        ("path,x1,y1,x2,y2\na,9,2,3,4\n", "line 2: a box needs x1 < x2 and y1 < y2, got \\(9.0, 2.0, 3.0, 4.0\\)"),
    ],
)
def test_bad_boxes(tmp_path, text, message):
    (tmp_path / "boxes.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_boxes(tmp_path / "boxes.csv")


def test_squares():
    assert square_around((40, 30, 60, 50), 100, 80, 0.0) == (40, 30, 60, 50)
    assert square_around((40, 30, 60, 70), 100, 80, 0.1) == (26, 26, 74, 74)
    assert square_around((0, 0, 10, 20), 100, 80, 0.0) == (0, 0, 20, 20)  # moved into the frame
    assert square_around((90, 60, 100, 80), 100, 80, 0.25) == (70, 50, 100, 80)
    assert square_around((0, 0, 100, 80), 100, 80, 0.5) == (0, 0, 100, 80)  # no more than there is


def test_crops_keep_picture_and_times(tmp_path):
    clip = np.zeros((7, 60, 80, 3), np.uint8)
    clip[:, 20:40, 30:50] = (200, 40, 40)
    times = [0, 0.1, 0.15, 0.4, 0.5, 0.9, 1.0]
    source = write_clip(tmp_path / "a.mp4", clip, times=times)
    target = tmp_path / "out/a.mp4"
    assert crop_video(source, target, box=(30, 20, 50, 40), detector=None, size=32, margin=0.0)
    with open_video(target) as video:
        assert video.times == pytest.approx(times, abs=1e-3)
        frames = video.frames([0, 3, 6])
    assert frames.shape == (3, 3, 32, 32)
    assert (frames.float().mean((0, 2, 3)) - torch.tensor([200.0, 40, 40])).abs().max() < 12
    assert crop_video(source, target, box=(0, 0, 80, 60), detector=None, size=40, margin=0.0)
    with open_video(target) as video:
        assert video.frames([0]).shape == (1, 3, 30, 40)  # the shape stays


class Boxes(nn.Module):
    """A detector that sees a person where it is bright, and a dog everywhere."""

    def forward(self, images):
        found = []
        for image in images:
            rows, columns = (image.mean(0) > 0.5).nonzero().unbind(1)
            boxes = [[0.0, 0.0, 80.0, 60.0]]
            if len(rows):
                boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            labels = [18, 1][: len(boxes)]
            found.append(
                {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels), "scores": torch.ones(len(boxes))}
            )
        return found


def test_a_detector_finds_the_person_in_all_frames(tmp_path):
    clip = np.zeros((9, 60, 80, 3), np.uint8)
    for number in range(9):
        clip[number, 20:32, 8 * number : 8 * number + 12] = 240
    source = write_clip(tmp_path / "a.mp4", clip)
    detector = PersonDetector(Boxes())
    with open_video(source) as video:
        box = detector.find(video.frames(list(range(9))))
    assert box == pytest.approx((0, 20, 76, 32), abs=1)
    assert crop_video(source, tmp_path / "b.mp4", box=None, detector=detector, size=38, margin=0.0)
    nobody = write_clip(tmp_path / "dark.mp4", 0 * clip)
    assert not crop_video(nobody, tmp_path / "c.mp4", box=None, detector=detector, size=38, margin=0.0)
    assert not (tmp_path / "c.mp4").exists()


def test_detectors_by_name(tmp_path):
    from torchvision.models import detection

    with pytest.raises(UserError, match="torchvision has no detector 'fasterrcnn_resnet50'; did you mean"):
        PersonDetector.load("fasterrcnn_resnet50", tmp_path / "w.pth", 0.5)
    name = "ssdlite320_mobilenet_v3_large"
    torch.save(
        detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).state_dict(), tmp_path / "w.pth"
    )
    detector = PersonDetector.load(name, tmp_path / "w.pth", 0.0)
    assert not detector.model.training
    torch.save({"a": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="--weights: .*other.pth does not fit ssdlite320"):
        PersonDetector.load(name, tmp_path / "other.pth", 0.5)


def test_an_unreadable_video_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"broken" * 50)
    with pytest.raises(UserError, match="not a video that can be opened"):
        crop_video(tmp_path / "a.mp4", tmp_path / "out/a.mp4", box=(0, 0, 5, 5), detector=None, size=32, margin=0)
    assert not list(tmp_path.glob("out/*"))
    whole = write_clip(tmp_path / "b.mp4", moving_square("down", 0, 60, (96, 96)))
    content = bytearray(whole.read_bytes())
    begin = content.index(b"mdat") + 400
    content[begin : begin + len(content) // 2] = bytes(len(content) // 2)
    whole.write_bytes(bytes(content))
    with pytest.raises(UserError):
        crop_video(whole, tmp_path / "out/b.mp4", box=(0, 0, 50, 50), detector=None, size=32, margin=0)
    assert not list(tmp_path.glob("out/*"))
