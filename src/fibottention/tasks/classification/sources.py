"""Where images and labels come from: arrays, folders and other libraries' data sets, behind one small interface."""

import gzip
import io
import lzma
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fibottention.errors import UserError
from fibottention.specs import nearest
from fibottention.tasks.classification.config import DataConfig
from fibottention.tasks.classification.torchvision_data import is_torchvision_name, open_torchvision
from fibottention.tasks.labelled_data import LabelledSource

__all__ = ["ImageSource", "data_names", "open_source"]

_FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


class ImageSource(LabelledSource, Protocol):
    """A numbered collection of labelled images."""

    def load(self, index: int) -> tuple[Image.Image, int]:
        """Decode one image; may raise any exception if it cannot be read."""
        ...


class ArraySource:
    """Images held in memory, ``(N, H, W)`` or ``(N, H, W, C)`` of uint8."""

    def __init__(self, images: NDArray[np.uint8], targets: NDArray[Any], classes: Sequence[str]) -> None:
        self.images, self.targets, self.classes = images, targets, classes

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSource`."""
        return Image.fromarray(self.images[index]), int(self.targets[index])

    def name(self, index: int) -> str:
        """See `ImageSource`."""
        return f"image {index}"


class FileSource:
    """Image files with their labels."""

    def __init__(self, samples: Sequence[tuple[str, int]], classes: Sequence[str]) -> None:
        self.samples, self.classes = samples, classes

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSource`."""
        path, target = self.samples[index]
        with Image.open(path) as image:
            image.load()
            return image, target

    def name(self, index: int) -> str:
        """See `ImageSource`."""
        return self.samples[index][0]


class TimmSource:
    """A map-style data set of timm (torch/ and hfds/ readers)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        reader = getattr(dataset, "reader", None)
        to_index = getattr(reader, "class_to_idx", None) or getattr(dataset, "class_to_idx", None)
        if to_index:
            self.classes: Sequence[str] = [str(name) for name in sorted(to_index, key=to_index.get)]
        else:
            known = next((x for n in ("targets", "labels") if (x := getattr(dataset, n, None)) is not None), None)
            labels = [self.dataset[i][1] for i in range(len(dataset))] if known is None else known
            self.classes = [str(i) for i in range(int(max(labels)) + 1)]

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSource`."""
        reader = getattr(self.dataset, "reader", None)
        if reader is None:
            image, target = self.dataset[index]
        else:
            # The data set itself would hide an unreadable image by another one.
            file, target = reader[index]
            with Image.open(file) as image:
                image.load()
        return image, int(target)

    def name(self, index: int) -> str:
        """See `ImageSource`."""
        filename = getattr(self.dataset, "filename", None)
        return str(filename(index)) if filename else f"image {index}"


class Subset:
    """Evenly spread images of a source, the same number of each class where the classes are equally large."""

    def __init__(self, source: ImageSource, targets: Sequence[int], limit: int) -> None:
        self.source, self.classes = source, source.classes
        order = np.argsort(np.asarray(targets), kind="stable")
        self.indices = np.sort(order[np.arange(limit) * len(order) // limit])

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, index: int) -> tuple[Image.Image, int]:
        """See `ImageSource`."""
        return self.source.load(int(self.indices[index]))

    def name(self, index: int) -> str:
        """See `ImageSource`."""
        return self.source.name(int(self.indices[index]))


def open_source(config: DataConfig, train: bool) -> ImageSource:
    """The training or validation images of a configuration.

    Raises:
        UserError: If the data set is unknown or its files are missing or empty.
    """
    opener = _OPENERS.get(config.name)
    if opener is not None:
        if config.root is None and config.name != "fashion-mnist-subset":
            raise UserError(f"data.root must be given for data.name={config.name}: the folder that holds the data")
        if config.root is not None and config.name == "fashion-mnist-subset":
            raise UserError(
                f"data.root={config.root} has no meaning for the embedded images; name the data too, as in "
                "data.name=folder (videos: take a video recipe, or --task video)"
            )
        if config.name != "folder" and (config.train_split or config.val_split):
            raise UserError(f"data.train_split and data.val_split have no meaning for data.name={config.name}")
        source = opener(config, train)
    elif config.name.split("/")[0].lower() in ("torch", "hfds"):
        source = _timm(config, train)
    else:
        raise UserError(f"data.name must be a known data set, got {config.name!r}{nearest(config.name, data_names())}")
    if not len(source):
        raise UserError(f"data.root={config.root} holds no {'training' if train else 'validation'} images")
    if config.limit is not None:
        limit = config.limit if train else max(1, config.limit // 6)
        if config.limit < 1:
            raise UserError(f"data.limit must be at least 1, got {config.limit}")
        if limit < len(source):
            source = Subset(source, _targets(source), limit)
    return source


def data_names() -> list[str]:
    """Names for data.name, the prefixes of timm's readers included."""
    return [*_OPENERS, "torch/NAME", "hfds/NAME", "hfids/NAME", "wds/NAME"]


def _targets(source: ImageSource) -> Sequence[int]:
    if isinstance(source, ArraySource):
        return source.targets.tolist()
    if isinstance(source, FileSource):
        return [target for _, target in source.samples]
    return [source.load(i)[1] for i in range(len(source))]


def _root(config: DataConfig) -> Path:
    root = Path(config.root or "").expanduser()
    if not root.is_dir():
        raise UserError(f"data.root={config.root} is not a folder")
    return root


def _embedded(config: DataConfig, train: bool) -> ImageSource:
    packed = files("fibottention").joinpath("data/fashion_mnist_subset.npz.xz").read_bytes()
    split = "train" if train else "test"
    with np.load(io.BytesIO(lzma.decompress(packed))) as arrays:
        return ArraySource(arrays[f"{split}_images"], arrays[f"{split}_labels"], _FASHION_CLASSES)


def _idx(config: DataConfig, train: bool) -> ImageSource:
    root = _root(config)
    stem = "train" if train else "t10k"
    images = _read_idx(root, f"{stem}-images-idx3-ubyte")
    labels = _read_idx(root, f"{stem}-labels-idx1-ubyte")
    if len(images) != len(labels):
        raise UserError(f"data.root={root}: {len(images)} images but {len(labels)} labels in the {stem} files")
    classes = _FASHION_CLASSES if config.name == "fashion-mnist" else [str(digit) for digit in range(10)]
    return ArraySource(images, labels, classes)


def _read_idx(root: Path, name: str) -> NDArray[np.uint8]:
    found = sorted(path for pattern in (name, f"{name}.gz") for path in root.rglob(pattern))
    if not found:
        raise UserError(f"data.root={root} holds no {name} or {name}.gz")
    try:
        with (gzip.open if found[0].suffix == ".gz" else open)(found[0], "rb") as file:
            header = file.read(4)
            shape = [int.from_bytes(file.read(4), "big") for _ in range(header[3])]
            return np.frombuffer(file.read(), dtype=np.uint8).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UserError(f"{found[0]} is not a whole IDX file: {error}") from error


def _cifar(config: DataConfig, train: bool) -> ImageSource:
    from torchvision import datasets

    loader = datasets.CIFAR10 if config.name == "cifar10" else datasets.CIFAR100
    root = _root(config)
    # Both the folder that holds cifar-10-batches-py and that folder itself are accepted.
    if not (root / loader.base_folder).is_dir() and root.name == loader.base_folder:
        root = root.parent
    try:
        dataset = loader(str(root), train=train, download=False)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"data.root={config.root} holds no whole {loader.base_folder}, the Python version of {config.name}"
        ) from error
    return ArraySource(dataset.data, np.asarray(dataset.targets), dataset.classes)


def _folder(config: DataConfig, train: bool) -> ImageSource:
    from torchvision.datasets import ImageFolder

    root = _root(config)
    folder = _split_folder(root, config, train)
    try:
        dataset = ImageFolder(str(folder))
    except FileNotFoundError as error:
        message = str(error).split(" Supported extensions")[0].rstrip(".")
        raise UserError(f"{folder} needs one folder of images per class: {message[0].lower()}{message[1:]}") from error
    train_folder = root / (config.train_split or "train")
    if not train and train_folder.is_dir():
        expected = sorted(p.name for p in train_folder.iterdir() if p.is_dir())
        if dataset.classes != expected:
            differing = sorted(set(expected) ^ set(dataset.classes))
            raise UserError(f"{folder} and {train_folder} differ in their classes: {', '.join(differing)}")
    return FileSource(dataset.samples, dataset.classes)


def _split_folder(root: Path, config: DataConfig, train: bool) -> Path:
    if train:
        names = [config.train_split or "train"]
    else:
        names = [config.val_split] if config.val_split else ["val", "validation", "test"]
    for name in names:
        if (root / name).is_dir():
            return root / name
    option = "train_split" if train else "val_split"
    there = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())[:8]) or "no folders"
    raise UserError(f"data.root={root} has no folder {' or '.join(names)} (it has {there}); name it with data.{option}")


def _tiny_imagenet(config: DataConfig, train: bool) -> ImageSource:
    root = _root(config)
    if not (root / "wnids.txt").is_file():
        raise UserError(f"data.root={root} is not tiny-imagenet-200 in its original layout: it has no wnids.txt")
    ids = sorted((root / "wnids.txt").read_text().split())
    number = {wnid: i for i, wnid in enumerate(ids)}
    words = {}
    if (root / "words.txt").is_file():
        words = dict(line.split("\t", 1) for line in (root / "words.txt").read_text().splitlines() if "\t" in line)
    if train:
        samples = [
            (str(path), number[wnid]) for wnid in ids for path in sorted((root / "train" / wnid / "images").glob("*"))
        ]
    else:
        annotations = root / "val" / "val_annotations.txt"
        if not annotations.is_file():
            raise UserError(f"data.root={root} has no val/val_annotations.txt")
        rows = [line.split("\t") for line in annotations.read_text().splitlines() if line.strip()]
        unknown = [row[1] for row in rows if len(row) < 2 or row[1] not in number]
        if unknown:
            raise UserError(f"{annotations} names the class {unknown[0]}, which is not in wnids.txt")
        samples = [(str(root / "val" / "images" / row[0]), number[row[1]]) for row in rows]
    return FileSource(samples, [words.get(wnid, wnid).split(",")[0] for wnid in ids])


def _timm(config: DataConfig, train: bool) -> ImageSource:
    try:
        return TimmSource(timm_dataset(config, train))
    except UserError:
        # timm's reader comes first, since it also knows data sets by names of its own.
        if not is_torchvision_name(config.name):
            raise
    return TimmSource(open_torchvision(config, train))


def timm_dataset(config: DataConfig, train: bool, batch_size: int = 1, seed: int = 0) -> Any:
    """The data set that timm makes of a prefixed name, with errors in one sentence."""
    from timm.data import create_dataset

    split = (config.train_split or "train") if train else (config.val_split or "validation")
    try:
        return create_dataset(
            config.name,
            root=config.root,
            split=split,
            is_training=train,
            batch_size=batch_size,
            seed=seed,
            download=False,
        )
    except ImportError as error:
        raise UserError(f"data.name={config.name} needs another package: {error}") from error
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data.name={config.name}, data.root={config.root} cannot be opened: {message}") from error


_OPENERS: dict[str, Callable[[DataConfig, bool], ImageSource]] = {
    "fashion-mnist-subset": _embedded,
    "fashion-mnist": _idx,
    "mnist": _idx,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "tiny-imagenet": _tiny_imagenet,
    "folder": _folder,
}
