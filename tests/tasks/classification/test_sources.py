import gzip
import hashlib
import json
import pickle
import shutil
import tarfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fibottention.errors import UserError
from fibottention.tasks.classification.config import DataConfig
from fibottention.tasks.classification.sources import open_source
from tests.pictures import photo_folder

# The package is only looked up: importing it would bring its attacks along.
SAMPLES = Path(find_spec("foolbox").submodule_search_locations[0]) / "data"


def samples(name: str) -> list[tuple[Path, int]]:
    """Real images of a data set that foolbox ships, with their labels."""
    return sorted((path, int(path.stem.split("_")[-1])) for path in SAMPLES.glob(f"{name}_*"))


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(header + array.tobytes())


def test_embedded_set_is_whole_and_balanced():
    for train, count in ((True, 12_000), (False, 2_000)):
        source = open_source(DataConfig(), train)
        assert len(source) == count
        assert np.bincount(source.targets).tolist() == [count // 10] * 10
        image, target = source.load(0)
        assert image.size == (28, 28)
        assert source.classes[target] == "Ankle boot"  # the first image of Fashion-MNIST, in both parts
    packed = files("fibottention").joinpath("data/fashion_mnist_subset.npz.xz").read_bytes()
    digest = files("fibottention").joinpath("data/fashion_mnist_subset.npz.xz.sha256").read_text().split()[0]
    assert hashlib.sha256(packed).hexdigest() == digest
    assert "Zalando" in files("fibottention").joinpath("data/LICENSE").read_text()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["fashion-mnist", "mnist"])
def test_idx_folders(tmp_path, name, suffix):
    source = open_source(DataConfig(), train=False)
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for stem, count in (("train", 30), ("t10k", 20)):
        write_idx(folder / f"{stem}-images-idx3-ubyte{suffix}", source.images[:count])
        write_idx(folder / f"{stem}-labels-idx1-ubyte{suffix}", source.targets[:count].astype(np.uint8))
    for train, count in ((True, 30), (False, 20)):
        read = open_source(DataConfig(name=name, root=str(tmp_path)), train)
        assert len(read) == count
        assert (np.asarray(read.load(7)[0]) == source.images[7]).all()
        assert [read.load(i)[1] for i in range(count)] == source.targets[:count].tolist()
        assert len(read.classes) == 10
    path = folder / f"t10k-images-idx3-ubyte{suffix}"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="is not a whole IDX file"):
        open_source(DataConfig(name=name, root=str(tmp_path)), train=False)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_in_its_published_layout(tmp_path, name, monkeypatch):
    from torchvision.datasets import CIFAR10, CIFAR100

    chosen = samples(name)
    assert len(chosen) == 20
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in chosen])
    labels = [label for _, label in chosen]
    data = pixels.transpose(0, 3, 1, 2).reshape(20, -1)
    loader = CIFAR10 if name == "cifar10" else CIFAR100
    folder = tmp_path / loader.base_folder
    folder.mkdir()
    classes = [f"class {i}" for i in range(10 if name == "cifar10" else 100)]
    key, meta_key = ("labels", "label_names") if name == "cifar10" else ("fine_labels", "fine_label_names")
    batches = [f[0] for f in loader.train_list]
    for batch in [*batches, *(f[0] for f in loader.test_list)]:
        (folder / batch).write_bytes(pickle.dumps({"data": data, key: labels}))
    (folder / loader.meta["filename"]).write_bytes(pickle.dumps({meta_key: classes}))
    monkeypatch.setattr(loader, "_check_integrity", lambda self: True)  # our files have checksums of their own
    monkeypatch.setattr(loader, "meta", {**loader.meta, "md5": None})
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    for root in (tmp_path, folder):
        for train, count in ((True, 20 * len(batches)), (False, 20)):
            source = open_source(DataConfig(name=name, root=str(root)), train)
            assert len(source) == count
            assert (np.asarray(source.load(3)[0]) == pixels[3]).all()
            assert source.load(3)[1] == labels[3]
            assert list(source.classes) == classes
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"holds no whole {loader.base_folder}"):
        open_source(DataConfig(name=name, root=str(tmp_path)), train=True)


def test_tiny_imagenet_in_its_original_layout(tmp_path):
    source_images = photo_folder(tmp_path / "photos")
    root = tmp_path / "tiny-imagenet-200"
    ids = {"cat": "n02124075", "coffee": "n07920052", "rocket": "n04008634"}
    rows, words = [], []
    (root / "val" / "images").mkdir(parents=True)
    for name, wnid in ids.items():
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for i, path in enumerate(sorted((source_images / "train" / name).iterdir())):
            shutil.copy(path, folder / f"{wnid}_{i}.JPEG")
        for i, path in enumerate(sorted((source_images / "val" / name).iterdir())):
            shutil.copy(path, root / "val" / "images" / f"val_{name}_{i}.JPEG")
            rows.append(f"val_{name}_{i}.JPEG\t{wnid}\t0\t0\t62\t62")
        words.append(f"{wnid}\t{name}, another word")
    (root / "wnids.txt").write_text("\n".join(reversed(ids.values())))
    (root / "words.txt").write_text("\n".join(words))
    (root / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    config = DataConfig(name="tiny-imagenet", root=str(root))
    train, val = open_source(config, True), open_source(config, False)
    assert (len(train), len(val)) == (24, 12)
    assert list(train.classes) == list(val.classes) == ["cat", "rocket", "coffee"]  # sorted by WordNet id
    for i in range(12):
        name = val.name(i)
        assert f"val_{val.classes[val.load(i)[1]]}_" in name
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn00000000\t0\t0\t1\t1\n")
    with pytest.raises(UserError, match="names the class n00000000, which is not in wnids.txt"):
        open_source(config, False)
    with pytest.raises(UserError, match="has no wnids.txt"):
        open_source(DataConfig(name="tiny-imagenet", root=str(tmp_path)), True)


def test_image_folder(tmp_path):
    root = photo_folder(tmp_path)
    config = DataConfig(name="folder", root=str(root))
    train, val = open_source(config, True), open_source(config, False)
    assert (len(train), len(val)) == (24, 12)
    assert list(train.classes) == ["cat", "coffee", "rocket"]
    assert Path(train.name(0)).parent.name == train.classes[train.load(0)[1]]
    (root / "val").rename(root / "holdout")
    with pytest.raises(UserError, match=r"has no folder val or validation or test \(it has holdout, train\)"):
        open_source(config, False)
    config.val_split = "holdout"
    assert len(open_source(config, False)) == 12
    (root / "holdout" / "dog").mkdir()
    with pytest.raises(UserError, match="one folder of images per class: found no valid file for the classes dog"):
        open_source(config, False)
    shutil.rmtree(root / "holdout" / "dog")
    (root / "train").rename(root / "elsewhere")
    assert len(open_source(config, False)) == 12  # evaluation needs no training images
    with pytest.raises(UserError, match="has no folder train"):
        open_source(config, True)
    (root / "elsewhere").rename(root / "train")
    shutil.rmtree(root / "holdout" / "cat")
    with pytest.raises(UserError, match="differ in their classes: cat"):
        open_source(config, False)


def test_timm_reader_of_torchvision_data(tmp_path):
    source = open_source(DataConfig(), train=False)
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for stem in ("train", "t10k"):
        write_idx(folder / f"{stem}-images-idx3-ubyte", source.images[:20])
        write_idx(folder / f"{stem}-labels-idx1-ubyte", source.targets[:20].astype(np.uint8))
    read = open_source(DataConfig(name="torch/fashion_mnist", root=str(tmp_path)), train=True)
    assert len(read) == 20
    assert [read.load(i)[1] for i in range(20)] == source.targets[:20].tolist()
    with pytest.raises(UserError, match="torch/fashion_mnist, .* cannot be opened"):
        open_source(DataConfig(name="torch/fashion_mnist", root=str(tmp_path / "no")), train=True)


def test_torchvision_data_that_timm_does_not_read(tmp_path):
    for split, count in (("Training", 3), ("Final_Test/Images", 2)):
        for label in range(3):
            folder = tmp_path / "gtsrb/GTSRB" / split / (f"{label:05d}" if split == "Training" else "")
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                name = f"{number}.ppm" if split == "Training" else f"{label * count + number:05d}.ppm"
                Image.new("RGB", (30, 30), (80 * label, 9, 9)).save(folder / name)
    rows = "".join(f"{i:05d}.ppm;30;30;0;0;9;9;{i // 2}\n" for i in range(6))
    head = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"
    (tmp_path / "gtsrb/GT-final_test.csv").write_text(head + rows)
    config = DataConfig(name="torch/gtsrb", root=str(tmp_path))
    assert [open_source(config, train=True).load(i)[1] for i in range(9)] == [0] * 3 + [1] * 3 + [2] * 3
    held = open_source(config, train=False)
    assert [held.load(i)[1] for i in range(6)] == [0, 0, 1, 1, 2, 2]
    assert held.load(5)[0].getpixel((0, 0)) == (160, 9, 9)
    assert held.classes == ["0", "1", "2"]
    for name, change, message in (
        ("torch/svhn", {}, "torch/svhn, .* cannot be opened: Dataset not found or corrupted"),
        ("torch/gtsrb", {"train_split": "all"}, "name the split with data.train_split: .*all"),
        (
            "torch/usps",
            {"train_split": "all"},
            "has no meaning for data.name=torch/usps, which has two splits of its own",
        ),
        ("torch/emnist", {}, "torch/emnist, .* cannot be opened: Unknown torchvision dataset"),
        ("torch/food_101", {"root": None}, "data.root must be given for data.name=torch/food_101"),
        ("torch/nothing", {}, "torch/nothing, .* cannot be opened"),
    ):
        with pytest.raises(UserError, match=message):
            open_source(DataConfig(**{"name": name, "root": str(tmp_path), **change}), train=True)


def test_limit_takes_evenly_from_all_classes():
    source = open_source(DataConfig(limit=600), train=True)
    assert np.bincount([source.load(i)[1] for i in range(600)]).tolist() == [60] * 10
    assert len(open_source(DataConfig(limit=600), train=False)) == 100


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(name="cifr10"), "data.name must be a known data set, got 'cifr10'; did you mean 'cifar10'"),
        (DataConfig(name="cifar10"), "data.root must be given for data.name=cifar10"),
        (DataConfig(name="folder", root="/no/such"), "data.root=/no/such is not a folder"),
        (DataConfig(name="mnist", root=str(Path(__file__).parent)), "holds no train-images-idx3-ubyte or"),
        (DataConfig(limit=0), "data.limit must be at least 1, got 0"),
        (DataConfig(val_split="test"), "have no meaning for data.name=fashion-mnist-subset"),
    ],
)
def test_bad_options_are_named(config, message):
    with pytest.raises(UserError, match=message):
        open_source(config, train=True)


def webdataset(root: Path) -> Path:
    """Two shards of real images as timm's wds reader expects them."""
    root.mkdir()
    for split in ("train", "validation"):
        for shard in range(2):
            with tarfile.open(root / f"{split}-{shard:04d}.tar", "w") as tar:
                for path, label in samples("cifar10")[shard * 10 : shard * 10 + 10]:
                    target = root / f"{path.stem}.cls"
                    target.write_text(str(label))
                    tar.add(path, f"{path.stem}.png")
                    tar.add(target, f"{path.stem}.cls")
                    target.unlink()
    splits = {
        split: {
            "name": split,
            "num_samples": 20,
            "filenames": [f"{split}-0000.tar", f"{split}-0001.tar"],
            "shard_lengths": [10, 10],
        }
        for split in ("train", "validation")
    }
    (root / "_info.json").write_text(json.dumps({"splits": splits}))
    return root
