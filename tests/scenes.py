"""Small scenes with exact masks, in every layout that is read: shapes of three classes before a ground and a sky."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from PIL import Image, ImageDraw

THINGS = ("disc", "square", "triangle")
STUFF = ("sky", "ground")
_COLORS = {"disc": (200, 60, 60), "square": (60, 180, 75), "triangle": (70, 90, 210)}
_CATEGORY_IDS = {"disc": 2, "square": 7, "triangle": 31, "sky": 40, "ground": 55}  # with gaps, as COCO's are


class Drawn:
    """One scene: an image, and the visible mask of each of its objects, the nearest last.

    Attributes:
        image: ``(H, W, 3)`` of uint8.
        stuff: Class of the background of each pixel, by number in STUFF.
        objects: Class and visible mask of each object.
    """

    def __init__(self, seed: int, size: int) -> None:
        rng = np.random.default_rng(seed)
        height, width = size, size + int(rng.integers(0, 2)) * size // 4
        horizon = int(rng.integers(height // 3, 2 * height // 3))
        self.stuff = (np.arange(height)[:, None] >= horizon).repeat(width, 1).astype(int)
        shades = np.array([[120, 160, 215], [130, 120, 95]])
        pixels = shades[self.stuff] + rng.normal(0, 12, (height, width, 3))
        owner = np.full((height, width), -1)
        labels = []
        for number in range(int(rng.integers(2, 5))):
            label = THINGS[rng.integers(len(THINGS))]
            radius = rng.uniform(0.1, 0.22) * size
            centre = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            mask = _shape(label, centre, radius, rng.uniform(0, 2 * math.pi), (width, height))
            color = np.array(_COLORS[label]) + rng.integers(-35, 36, 3)
            pixels[mask] = color + rng.normal(0, 12, (int(mask.sum()), 3))
            owner[mask] = number
            labels.append(label)
        self.image = pixels.clip(0, 255).astype(np.uint8)
        seen = [(label, owner == number) for number, label in enumerate(labels)]
        self.objects = [(label, mask) for label, mask in seen if mask.sum() >= 20]
        self.stuff[owner >= 0] = -1


def _shape(label: str, centre: tuple[float, float], radius: float, turn: float, size: tuple[int, int]) -> np.ndarray:
    picture = Image.new("1", size)
    draw = ImageDraw.Draw(picture)
    x, y = centre
    if label == "disc":
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=1)
    else:
        corners = 4 if label == "square" else 3
        angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
        draw.polygon([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], fill=1)
    return np.asarray(picture)


def draw_scenes(count: int, size: int, seed: int = 0) -> list[Drawn]:
    return [Drawn(seed * 100_000 + number, size) for number in range(count)]


def _rle(mask: np.ndarray) -> dict[str, Any]:
    rle = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode()}


def _images(scenes: list[Drawn], folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    images = []
    for number, scene in enumerate(scenes):
        name = f"{number:06d}.png"
        Image.fromarray(scene.image).save(folder / name)
        height, width = scene.image.shape[:2]
        images.append({"id": 10 * number + 3, "file_name": name, "height": height, "width": width})
    return images


def write_coco(root: Path, train: int, val: int, size: int) -> Path:
    """Instances in COCO's layout."""
    for seed, (split, count) in enumerate((("train", train), ("val", val)), 1):
        scenes = draw_scenes(count, size, seed)
        images = _images(scenes, root / f"{split}2017")
        annotations: list[dict[str, Any]] = []
        for image, scene in zip(images, scenes, strict=True):
            for label, mask in scene.objects:
                rle = _rle(mask)
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": image["id"],
                        "category_id": _CATEGORY_IDS[label],
                        "bbox": [float(x) for x in coco_mask.toBbox(rle)],
                        "area": int(mask.sum()),
                        "segmentation": rle,
                        "iscrowd": 0,
                    }
                )
        categories = [{"id": _CATEGORY_IDS[name], "name": name} for name in THINGS]
        path = root / "annotations" / f"instances_{split}2017.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return root


def write_coco_panoptic(root: Path, train: int, val: int, size: int) -> Path:
    """Segments of things and stuff in COCO's layout."""
    for seed, (split, count) in enumerate((("train", train), ("val", val)), 1):
        scenes = draw_scenes(count, size, seed)
        images = _images(scenes, root / f"{split}2017")
        maps = root / "annotations" / f"panoptic_{split}2017"
        maps.mkdir(parents=True)
        annotations = []
        for image, scene in zip(images, scenes, strict=True):
            parts = [(name, scene.stuff == number) for number, name in enumerate(STUFF)] + scene.objects
            ids = np.zeros(scene.stuff.shape, int)
            segments = []
            for place, (label, mask) in enumerate(parts, 1):
                number = 1000 * place + 77  # more than a byte
                ids[mask] = number
                if mask.any():
                    segments.append({"id": number, "category_id": _CATEGORY_IDS[label], "iscrowd": 0})
            colors = np.stack([ids % 256, ids // 256 % 256, ids // 65536], -1).astype(np.uint8)
            Image.fromarray(colors).save(maps / image["file_name"])
            annotations.append({"image_id": image["id"], "file_name": image["file_name"], "segments_info": segments})
        categories = [
            {"id": number, "name": name, "isthing": int(name in THINGS)} for name, number in _CATEGORY_IDS.items()
        ]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"panoptic_{split}2017.json").write_text(json.dumps(content))
    return root


def class_map(scene: Drawn, names: tuple[str, ...], void: int) -> np.ndarray:
    """The number of the class of each pixel among the names."""
    pixels = np.full(scene.stuff.shape, void)
    for number, name in enumerate(STUFF):
        pixels[scene.stuff == number] = names.index(name)
    for label, mask in scene.objects:
        pixels[mask] = names.index(label)
    return pixels


def write_ade20k(root: Path, train: int, val: int, size: int) -> Path:
    """The class of each pixel, in ADE20K's layout, with five classes."""
    names = (*STUFF, *THINGS)
    for seed, (split, count) in enumerate((("training", train), ("validation", val)), 1):
        images, maps = root / "images" / split, root / "annotations" / split
        images.mkdir(parents=True)
        maps.mkdir(parents=True)
        for number, scene in enumerate(draw_scenes(count, size, seed)):
            Image.fromarray(scene.image).save(images / f"ADE_{split}_{number:08d}.jpg", quality=95)
            pixels = class_map(scene, names, -1) + 1
            Image.fromarray(pixels.astype(np.uint8)).save(maps / f"ADE_{split}_{number:08d}.png")
    rows = [f"{number}\t0.1\t1\t1\t{name}" for number, name in enumerate(names, 1)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]) + "\n")
    return root


_CITYSCAPES_IDS = {"sky": 23, "ground": 7, "disc": 26, "square": 24, "triangle": 33}  # sky, road, car, person, bicycle


def write_cityscapes(root: Path, train: int, val: int, size: int) -> Path:
    """Scenes in Cityscapes' layout; the first object of each image is a group without borders."""
    for seed, (split, count) in enumerate((("train", train), ("val", val)), 1):
        images, maps = root / "leftImg8bit" / split / "town", root / "gtFine" / split / "town"
        images.mkdir(parents=True)
        maps.mkdir(parents=True)
        for number, scene in enumerate(draw_scenes(count, size, seed)):
            stem = f"town_{number:06d}_000019"
            Image.fromarray(scene.image).save(images / f"{stem}_leftImg8bit.png")
            ids = np.zeros(scene.stuff.shape, np.int32)
            for place, name in enumerate(STUFF):
                ids[scene.stuff == place] = _CITYSCAPES_IDS[name]
            for place, (label, mask) in enumerate(scene.objects):
                ids[mask] = _CITYSCAPES_IDS[label] * (1 if place == 0 else 1000) + (0 if place == 0 else place)
            Image.fromarray(ids.astype(np.uint16)).save(maps / f"{stem}_gtFine_instanceIds.png")
    return root


_WRITERS = {
    "coco": write_coco,
    "coco_panoptic": write_coco_panoptic,
    "ade20k": write_ade20k,
    "cityscapes": write_cityscapes,
}


def main() -> None:
    """Write scenes for a try of the commands: ``python -m tests.scenes coco DIR``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("layout", choices=_WRITERS)
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument("--train", type=int, default=600, help="number of training images")
    parser.add_argument("--val", type=int, default=100, help="number of validation images")
    parser.add_argument("--size", type=int, default=96, help="shorter side of an image")
    arguments = parser.parse_args()
    _WRITERS[arguments.layout](arguments.folder, arguments.train, arguments.val, arguments.size)


if __name__ == "__main__":
    main()
