"""The smallest models of each head and backbone, and scenes for them."""

import torch

from fibottention.tasks.dense.config import DenseConfig, DenseDataConfig, DenseModelConfig
from fibottention.tasks.dense.model import DenseModel, build_model

BACKBONES = {
    "dinat": (
        "dinat_mini",
        {
            "embed_dim": 16,
            "depths": [1, 1, 2, 1],
            "num_heads": [1, 1, 2, 4],
            "kernel_size": 3,
            "dilations": [[2], [1], [1, 2], [1]],
        },
        "none",
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 16, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 4], "window_size": 4, "img_size": 64},
        "fibottention",
    ),
    "vit": (
        "vit_tiny_patch16_224",
        {"patch_size": 8, "img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "fibottention",
    ),
}

RCNN = {
    "channels": 16,
    "box_features": 32,
    "mask_layers": 1,
    "anchor_sizes": [8, 16, 32, 64, 128],
    "train_proposals": 60,
    "proposals": 60,
}
MASK2FORMER = {
    "hidden_dim": 32,
    "feature_size": 32,
    "mask_feature_size": 32,
    "encoder_feedforward_dim": 32,
    "dim_feedforward": 32,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "num_attention_heads": 4,
    "num_queries": 8,
    "train_num_points": 128,
}
ONEFORMER = {
    "hidden_dim": 32,
    "conv_dim": 32,
    "mask_dim": 32,
    "encoder_feedforward_dim": 32,
    "dim_feedforward": 32,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "num_attention_heads": 4,
    "num_queries": 8,
    "train_num_points": 128,
}
HEADS = {
    "mask_rcnn": ("mask_rcnn", "instance", RCNN),
    "cascade": ("cascade_mask_rcnn", "instance", RCNN),
    "upernet": ("upernet", "semantic", {"hidden_size": 16, "auxiliary_channels": 8}),
    "mask2former_instance": ("mask2former", "instance", MASK2FORMER),
    "mask2former_semantic": ("mask2former", "semantic", MASK2FORMER),
    "mask2former_panoptic": ("mask2former", "panoptic", MASK2FORMER),
    "oneformer_panoptic": ("oneformer", "panoptic", ONEFORMER),
}
CLASSES = ["disc", "square", "ground"]
THINGS = [True, True, False]


def model_config(head: str, backbone: str = "dinat") -> DenseConfig:
    name, options, attention = BACKBONES[backbone]
    kind, target, head_options = HEADS[head]
    return DenseConfig(
        data=DenseDataConfig(target=target, test_size=None),
        model=DenseModelConfig(name=name, head=kind, options=dict(options), head_options=dict(head_options)),
        attention={"name": attention},
    )


def make(head: str, backbone: str = "dinat", seed: int = 0) -> DenseModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(model_config(head, backbone), CLASSES, THINGS)[0]


def image(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (3, height, width), generator=generator, dtype=torch.uint8)


def scene(head: str, height: int, width: int, empty: bool = False) -> dict[str, torch.Tensor]:
    """Two things, of which none if empty, and stuff."""
    target = HEADS[head][1]
    first, second = (torch.zeros(height, width, dtype=torch.bool) for _ in range(2))
    if not empty:
        first[4:20, 6:30] = True
        second[24:44, 20:40] = True
    if target == "semantic":
        pixels = torch.full((height, width), 255)
        if not empty:
            pixels[first], pixels[second], pixels[50:] = 0, 1, 2
        return {"map": pixels}
    if target == "panoptic":
        pixels = first.long() + 2 * second.long()
        labels = torch.tensor([0, 1])
        if not empty:
            pixels[50:] = 3
            labels = torch.tensor([0, 1, 2])
        return {"map": pixels, "labels": labels, "crowd": torch.zeros(len(labels), dtype=torch.bool)}
    masks = torch.stack([first, second])[: 0 if empty else 2]
    boxes = torch.tensor([[6.0, 4, 30, 20], [20, 24, 40, 44]])[: len(masks)]
    labels = torch.tensor([0, 1])[: len(masks)]
    return {"boxes": boxes, "labels": labels, "masks": masks, "crowd": torch.zeros(len(masks), dtype=torch.bool)}
