"""Images and what is in them are changed together."""

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from PIL import Image

from fibottention.tasks.dense.augment import TrainTransform, fitted, to_pixels
from fibottention.tasks.dense.config import DenseAugmentConfig, DenseConfig, DenseDataConfig, DenseModelConfig
from fibottention.tasks.dense.sources.base import VOID, mask_boxes

HEADS = {"instance": "mask_rcnn", "semantic": "upernet", "panoptic": "mask2former"}
COLORS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)


def sample(target, height=60, width=90):
    """Rectangles of plain colours on black, the colour saying which one it is."""
    numbers = np.full((height, width), -1)
    for number, (left, top, right, bottom) in enumerate([(5, 5, 40, 30), (30, 20, 80, 50), (60, 2, 88, 15)]):
        numbers[top:bottom, left:right] = number
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[numbers >= 0] = COLORS[numbers[numbers >= 0]]
    if target == "semantic":
        scene = {"map": torch.from_numpy(np.where(numbers < 0, VOID, numbers))}
    elif target == "panoptic":
        scene = {"map": torch.from_numpy(numbers + 1), "labels": torch.tensor([4, 5, 6]), "crowd": torch.zeros(3) > 0}
    else:
        masks = torch.from_numpy(numbers == np.arange(3)[:, None, None])
        crowd = torch.tensor([False, False, True])
        scene = {"boxes": mask_boxes(masks), "labels": torch.tensor([4, 5, 6]), "masks": masks, "crowd": crowd}
    return Image.fromarray(pixels), scene


def transform(target, **options):
    data = DenseDataConfig(target=target, max_size=2000)
    return TrainTransform(
        DenseConfig(data=data, model=DenseModelConfig(head=HEADS[target]), augment=DenseAugmentConfig(**options))
    )


OPTIONS = [
    {"sizes": [60], "flip": 1.0},
    {"sizes": [37, 81]},
    {"sizes": [60], "crop": (40, 50)},
    {"sizes": [30], "crop": (70, 64)},
    {"jitter": (0.3, 2.0), "crop": (64, 64)},
]


def inside(mask):
    """Pixels two or more from the edge."""
    return functional.max_pool2d((~mask)[None].float(), 5, 1, 2)[0] == 0


@pytest.mark.parametrize("target", HEADS)
@pytest.mark.parametrize("options", OPTIONS)
def test_colours_and_labels_go_together(target, options):
    for seed in range(4):
        torch.manual_seed(seed)
        image, scene = transform(target, **options)(sample(target))
        assert image.dtype == torch.uint8
        if "crop" in options:
            assert tuple(image.shape[1:]) == options["crop"]
        # Far from the edges, where colours mix, each pixel has the colour of its label and the other way round.
        plain = [(image == torch.tensor(color)[:, None, None].expand_as(image)).all(0) for color in COLORS.tolist()]
        for number, pixels in enumerate(plain):
            if target == "semantic":
                labelled = scene["map"] == number
            elif target == "panoptic":
                labelled = scene["map"] == number + 1
            elif number == 2:  # the crowd
                continue
            else:
                places = (scene["labels"] == 4 + number).nonzero().flatten()
                labelled = scene["masks"][places].any(0) if len(places) else torch.zeros_like(pixels)
            assert labelled.shape == pixels.shape
            assert not (inside(pixels) & ~labelled).any()
            assert not (inside(labelled) & ~pixels).any()


@pytest.mark.parametrize("options", OPTIONS)
def test_boxes_are_those_of_the_masks(options):
    for seed in range(4):
        torch.manual_seed(seed)
        _, scene = transform("instance", **options)(sample("instance"))
        assert 6 not in scene["labels"]  # crowds are not learned
        assert scene["masks"].flatten(1).any(1).all()
        torch.testing.assert_close(scene["boxes"], mask_boxes(scene["masks"]), atol=1.01, rtol=0)


def test_without_changes_nothing_changes():
    image, scene = sample("instance")
    found, left = transform("instance", sizes=[60], flip=0.0)((image, scene))
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), np.asarray(image))
    for name in ("boxes", "labels", "masks"):
        assert torch.equal(left[name], scene[name][:2])


def test_padding_is_void():
    torch.manual_seed(0)
    options = {"sizes": [30], "crop": (64, 80), "flip": 0.0}
    image, scene = transform("semantic", **options)(sample("semantic"))
    assert (scene["map"][30:] == VOID).all()
    assert (scene["map"][:, 45:] == VOID).all()
    assert image[:, 40, 60].tolist() == [124, 116, 104]
    _, scene = transform("panoptic", **options)(sample("panoptic"))
    assert (scene["map"][30:] == 0).all()


def test_a_crop_is_not_filled_by_one_class():
    pixels = torch.zeros(60, 90, dtype=torch.int64)
    pixels[:, 60:] = 1
    picture = Image.new("RGB", (90, 60))

    def share(limit):
        torch.manual_seed(0)
        change = transform("semantic", sizes=[60], crop=(40, 40), max_class_share=limit)
        parts = [change((picture, {"map": pixels}))[1]["map"] for _ in range(30)]
        return sum(part.unique().numel() == 1 for part in parts)

    assert share(1.0) > 6
    assert share(0.95) == 0


def test_half_of_the_images_are_cropped_first():
    torch.manual_seed(0)
    change = transform("instance", sizes=[100], crop_first=True)
    image = Image.new("RGB", (900, 700))
    masks = torch.zeros(1, 700, 900, dtype=torch.bool)
    masks[0, 100:600, 100:800] = True
    one = torch.zeros(1, dtype=torch.int64)
    scene = {"boxes": mask_boxes(masks), "labels": one, "masks": masks, "crowd": one.bool()}
    shapes = [tuple(change((image, scene))[0].shape[1:]) for _ in range(30)]
    whole = sum(shape == (100, 129) for shape in shapes)
    assert 8 <= whole <= 22
    assert len(set(shapes)) > 5


def test_photometric_distortion_changes_the_image_alone():
    change, changed = transform("semantic", sizes=[60], flip=0.0, color=True), 0
    for seed in range(8):
        torch.manual_seed(seed)
        image, scene = change(sample("semantic"))
        assert torch.equal(scene["map"], sample("semantic")[1]["map"])
        changed += not np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(sample("semantic")[0]))
    assert changed > 4
    # A colour never becomes another one: strongest is what was strongest.
    red = Image.new("RGB", (8, 8), (180, 60, 30))
    for seed in range(20):
        torch.manual_seed(seed)
        pixels, _ = change((red, {"map": torch.zeros(8, 8, dtype=torch.int64)}))
        assert pixels[0].float().mean() >= pixels[1:].float().mean((1, 2)).max()


def test_sizes():
    assert fitted(480, 640, 800, 1333) == (800, 1067)
    assert fitted(400, 1000, 800, 1333) == (533, 1333)
    image, scene = sample("instance")
    found, left = to_pixels((image, scene))
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), np.asarray(image))
    assert left is scene
