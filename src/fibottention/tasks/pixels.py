"""Depth of the pixels of images."""

import numpy as np
from PIL import Image

__all__ = ["to_eight_bits"]


def to_eight_bits(image: Image.Image) -> Image.Image:
    """An image of 16 bits scaled to 8, which a conversion would cut off; others as they are."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
