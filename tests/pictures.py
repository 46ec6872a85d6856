"""Small real picture folders for the tests, cut from scikit-image's photographs."""

from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

PHOTOGRAPHS = {"cat": data.chelsea, "coffee": data.coffee, "rocket": data.rocket}


def photo_folder(root: Path, train: int = 8, val: int = 4, size: int = 48) -> Path:
    """A folder with train/ and val/, and a folder of crops of one photograph per class."""
    generator = np.random.default_rng(0)
    for name, load in PHOTOGRAPHS.items():
        photo = load()
        for split, count in (("train", train), ("val", val)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                y, x = (int(generator.integers(side - 2 * size)) for side in photo.shape[:2])
                Image.fromarray(photo[y : y + 2 * size, x : x + 2 * size]).resize((size, size)).save(
                    folder / f"{i}.{'png' if i % 2 else 'jpg'}"
                )
    return root


def break_images(folder: Path) -> list[Path]:
    """Damage three images of a folder in three ways: cut off, empty, not an image."""
    paths = sorted(folder.rglob("*.png"))[:3]
    paths[0].write_bytes(paths[0].read_bytes()[:100])
    paths[1].write_bytes(b"")
    paths[2].write_text("this is not an image")
    return paths
