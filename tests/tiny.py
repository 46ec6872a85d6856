"""The smallest run that is still a real one: a two-layer ViT on a few embedded images."""

from fibottention.tasks.classification.config import (
    AugmentConfig,
    ClassificationConfig,
    DataConfig,
    ModelConfig,
)
from fibottention.training.config import OptimConfig, TrainConfig

TINY_OPTIONS = {"patch_size": 7, "embed_dim": 32, "depth": 2, "num_heads": 2}

TINY_WORDS = [
    "demo", "--data.limit=240", "--data.workers=0", "--model.options.patch_size=7", "--model.options.embed_dim=32",
    "--model.options.depth=2", "--model.options.num_heads=2", "--train.batch_size=40", "--train.epochs=2",
    "--optim.warmup_epochs=0.5",
]  # fmt: skip


SPARSE_WORDS = [
    "--model.options.patch_size=2",
    "--model.options.num_heads=4",
    "--data.limit=120",
    "--train.batch_size=20",
]
"""After TINY_WORDS: 196 tokens, at which `auto` computes just the kept pairs, and fewer images."""


def sparse_config(epochs: int = 2, drop_path: float = 0.0) -> ClassificationConfig:
    """196 tokens, at which `auto` computes just the kept pairs."""
    config = tiny_config(epochs, drop_path)
    config.model.options.update(patch_size=2, num_heads=4)
    config.data.limit = 120
    config.train.batch_size = 20
    return config


def tiny_config(epochs: int = 2, drop_path: float = 0.0) -> ClassificationConfig:
    """16 tokens, at which `auto` masks dense attention."""
    return ClassificationConfig(
        data=DataConfig(image_size=28, workers=0, limit=240),
        model=ModelConfig(name="vit_tiny_patch16_224", in_chans=1, drop_path=drop_path, options=dict(TINY_OPTIONS)),
        optim=OptimConfig(lr=2e-3, warmup_epochs=0.5, clip_grad=1.0),
        augment=AugmentConfig(crop="none"),
        train=TrainConfig(epochs=epochs, batch_size=40, device="cpu"),
    )
