"""What a trained model finds in one image."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from fibottention.tasks.dense.augment import TestTransform
from fibottention.tasks.dense.config import DenseConfig
from fibottention.tasks.dense.draw import draw_prediction, prediction_to_dict

__all__ = ["predict_image"]


def predict_image(
    model: Any, config: DenseConfig, image: Image.Image, classes: Sequence[str], threshold: float = 0.5
) -> tuple[Image.Image, dict[str, Any]]:
    """What a model finds in an image, drawn into it, and as plain data.

    Args:
        model: A `fibottention.tasks.dense.model.DenseModel` in evaluation mode.
        config: Its configuration.
        image: An image in RGB.
        classes: Names of the classes.
        threshold: Smallest score of an object.
    """
    pixels, _ = TestTransform(config.data.test_size, config.data.max_size)((image, {}))
    device = next(model.parameters()).device
    with torch.no_grad():
        found = model.predict([pixels.to(device)], [(image.height, image.width)])[0]
    found = {name: value.cpu() for name, value in found.items()}
    drawn = draw_prediction(F.pil_to_tensor(image), found, classes, threshold)
    return F.to_pil_image(drawn), prediction_to_dict(found, classes, threshold)
