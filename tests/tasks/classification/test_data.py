import random

import numpy as np
import pytest
import torch
from PIL import Image

from fibottention.errors import UserError
from fibottention.tasks.classification.config import (
    AugmentConfig,
    ClassificationConfig,
    DataConfig,
    ModelConfig,
)
from fibottention.tasks.classification.data import (
    ClassificationData,
    eval_transform,
    normalization,
    open_image,
    train_transform,
)
from fibottention.tasks.classification.sources import open_source
from fibottention.training.config import TrainConfig
from tests.pictures import break_images, photo_folder
from tests.tasks.classification.test_sources import webdataset


def config(root=None, workers=0, batch_size=5, strict=False, **augment) -> ClassificationConfig:
    augment = {"auto_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5, **augment}
    return ClassificationConfig(
        data=DataConfig(name="folder", root=str(root), image_size=32, workers=workers, strict=strict),
        augment=AugmentConfig(**augment),
        train=TrainConfig(batch_size=batch_size, seed=7),
    )


def epoch_of(data: ClassificationData, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    data.set_epoch(epoch)
    images, targets, _ = zip(*data.train_loader, strict=True)
    return torch.cat(images), torch.cat(targets)


def test_samples_depend_on_seed_epoch_and_index_only(tmp_path):
    root = photo_folder(tmp_path)
    alone, workers = ClassificationData(config(root)), ClassificationData(config(root, workers=2))
    first = epoch_of(alone, 0)
    torch.manual_seed(99)
    random.seed(99)
    again = epoch_of(workers, 0)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    other = epoch_of(alone, 1)
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


def test_transforms_leave_the_global_generators_alone(tmp_path):
    data = ClassificationData(config(photo_folder(tmp_path)))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    data.train_dataset[3]
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_every_validation_image_comes_once(tmp_path):
    data = ClassificationData(config(photo_folder(tmp_path)))
    targets = torch.cat([batch[1] for batch in data.val_loader])
    assert torch.bincount(targets).tolist() == [4, 4, 4]


def test_unreadable_images_are_named_and_replaced_or_left_out(tmp_path):
    root = photo_folder(tmp_path)
    broken = {str(path) for path in break_images(root / "train")} | {str(path) for path in break_images(root / "val")}
    data = ClassificationData(config(root, workers=2))
    data.set_epoch(0)
    named, targets = set(), []
    for split, loader in (("train", data.train_loader), ("val", data.val_loader)):
        for images, labels, unreadable in loader:
            assert images.isfinite().all()
            named |= {data.name(i, split == "train") for i in unreadable.tolist() if i >= 0}
            if split == "train":
                assert (labels >= 0).all()
            else:
                assert ((labels == -1) == (unreadable >= 0)).all()
                targets += labels.tolist()
    assert named <= broken
    assert {name for name in broken if "/val/" in name} <= named
    assert targets.count(-1) == 3


def test_strict_stops_at_the_first_unreadable_image(tmp_path):
    root = photo_folder(tmp_path)
    break_images(root / "val")
    data = ClassificationData(config(root, strict=True))
    with pytest.raises(UserError, match=r"cannot read .*\.png"):
        list(data.val_loader)


def test_a_folder_of_unreadable_images_is_an_error(tmp_path):
    root = photo_folder(tmp_path)
    for path in (root / "train").rglob("*.*"):
        path.write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot read 20 samples in a row"):
        list(ClassificationData(config(root)).train_loader)


def test_small_sets_train_and_larger_ones_drop_the_last_batch(tmp_path):
    root = photo_folder(tmp_path)
    assert [len(b[1]) for b in ClassificationData(config(root, batch_size=10)).train_loader] == [10, 10]
    assert [len(b[1]) for b in ClassificationData(config(root, batch_size=100)).train_loader] == [24]


@pytest.mark.parametrize("crop", ["resized", "padded", "none"])
@pytest.mark.parametrize("channels", [1, 3])
def test_transforms_give_the_size_and_statistics(crop, channels):
    data = DataConfig(image_size=28)
    source = open_source(data, train=True)
    augment = AugmentConfig(crop=crop, random_erasing=0.3)
    image = source.load(0)[0].convert("L" if channels == 1 else "RGB")
    assert train_transform(data, augment, channels)(image).shape == (channels, 28, 28)
    transform = eval_transform(data, channels)
    pixels = torch.stack([transform(source.load(i)[0].convert("L" if channels == 1 else "RGB")) for i in range(300)])
    assert abs(float(pixels.mean())) < 0.05
    assert abs(float(pixels.std()) - 1) < 0.05


def test_evaluation_crops_the_centre():
    from PIL import Image

    picture = Image.new("RGB", (512, 256))
    picture.paste((255, 255, 255), (144, 16, 368, 240))  # the central 224 x 224
    config = DataConfig(name="folder", image_size=224, resize=256)
    tensor = eval_transform(config, 3)(picture)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in normalization(config, 3))
    assert (tensor * std + mean - 1).abs().max() < 1e-5


def test_the_published_policy_takes_every_level_it_draws():
    # timm's RandAugment posterizes down to 0 bits, which Pillow 13 refuses.
    transform = train_transform(DataConfig(image_size=32), AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1"), 3)
    image = open_source(DataConfig(), train=True).load(0)[0].convert("RGB")
    for _ in range(400):
        assert transform(image).isfinite().all()


def test_repeated_augmentation_shows_images_several_times_each_time_otherwise(tmp_path):
    root = photo_folder(tmp_path)
    data = ClassificationData(config(root, repeats=3, batch_size=6))
    data.set_epoch(0)
    indices = list(data.sampler)
    length = len(data.train_dataset)
    assert len(indices) == len(data.sampler) == length == 24
    assert all(len({i % length for i in indices[k : k + 3]}) == 1 for k in range(0, length, 3))
    assert len({i % length for i in indices}) == length // 3
    (a, target, _), (b, same_target, _) = (data.train_dataset[i] for i in indices[:2])
    assert target == same_target
    assert not torch.equal(a, b)
    data.set_epoch(1)
    assert {i % length for i in data.sampler} != {i % length for i in indices}


def test_the_policy_for_cifar():
    image = open_source(DataConfig(), train=True).load(0)[0].convert("RGB")
    options = {"crop": "none", "flip": 0.0}
    plain = train_transform(DataConfig(image_size=28), AugmentConfig(**options), 3)
    policy = train_transform(DataConfig(image_size=28), AugmentConfig(auto_augment="cifar", **options), 3)
    torch.manual_seed(0)
    changed = [not torch.equal(policy(image), plain(image)) for _ in range(20)]
    assert sum(changed) > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c.augment, "repeats", 0), "augment.repeats must be at least 1, got 0"),
        (lambda c: setattr(c.data, "image_size", 0), "data.image_size must be at least 1"),
        (lambda c: setattr(c.data, "resize", 16), "data.resize must be at least data.image_size=32, got 16"),
        (lambda c: (setattr(c.augment, "mixup", 0.4), setattr(c.train, "batch_size", 100)), "larger than the 24"),
        (lambda c: setattr(c.data, "mean", [0.5, 0.5]), r"data.mean must have 1 or model.in_chans=3 numbers"),
        (lambda c: setattr(c.data, "std", [0.0]), "data.std must be above 0"),
        (lambda c: setattr(c.train, "batch_size", 0), "train.batch_size must be at least 1, got 0"),
        (lambda c: setattr(c.model, "in_chans", 1), "augment.auto_augment needs colour images"),
        (lambda c: setattr(c.augment, "auto_augment", "nonsense"), "augment.auto_augment must be a policy .*nonsense"),
    ],
)
def test_bad_options_are_named(tmp_path, change, message):
    bad = config(photo_folder(tmp_path))
    change(bad)
    with pytest.raises(UserError, match=message):
        ClassificationData(bad)


def test_streamed_shards(tmp_path):
    pytest.importorskip("webdataset")
    root = webdataset(tmp_path / "shards")
    stream = ClassificationConfig(
        data=DataConfig(name="wds/cifar10", root=str(root), image_size=32, workers=1),
        model=ModelConfig(options={"num_classes": 10}),
        train=TrainConfig(batch_size=5),
    )
    data = ClassificationData(stream)
    images, targets, unreadable = next(iter(data.train_loader))
    assert images.shape == (5, 3, 32, 32)
    assert (targets >= 0).all()
    assert (unreadable == -1).all()
    assert sum(len(batch[1]) for batch in data.val_loader) == 20
    stream.model.options = {}
    with pytest.raises(UserError, match="model.options.num_classes must be given"):
        ClassificationData(stream)


def test_training_images_are_resized_as_told():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), dtype=np.uint8))
    data, augment = DataConfig(image_size=18, interpolation="nearest"), AugmentConfig(crop="none", flip=0.0)
    pixels = train_transform(data, augment, 3)(image)
    assert torch.equal(pixels[:, ::2, ::2], pixels[:, 1::2, 1::2])  # each pixel twice in each direction
    data.interpolation = "random"
    with pytest.raises(UserError, match="data.interpolation=random is for augment.crop=resized, got augment.crop=none"):
        train_transform(data, augment, 3)


@pytest.mark.parametrize("in_chans", [1, 3])
def test_images_of_16_bits_are_scaled(in_chans):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    assert deep.mode.startswith("I;16")
    assert np.array_equal(open_image(deep, in_chans), open_image(Image.fromarray(grey), in_chans))
