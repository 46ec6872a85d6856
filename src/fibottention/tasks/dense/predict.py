"""What a trained model finds in one image."""

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torchvision.transforms.v2 import functional as F

from fibottention.tasks.dense.draw import draw_prediction, prediction_to_dict

__all__ = ["predict_image"]


def predict_image(
    model: Any, image: Image.Image, classes: Sequence[str], threshold: float = 0.5
) -> tuple[Image.Image, dict[str, Any]]:
    """What a model finds in an image, drawn into it, and as plain data.

    Args:
        model: A `fibottention.tasks.dense.model.DenseModel` in evaluation mode.
        image: An image in RGB.
        classes: Names of the classes.
        threshold: Smallest score of an object.
    """
    pixels = F.pil_to_tensor(image)
    device = next(model.parameters()).device
    found = model.predict([pixels.to(device)])[0]
    found = {name: value.cpu() for name, value in found.items()}
    drawn = draw_prediction(pixels, found, classes, threshold)
    return F.to_pil_image(drawn), prediction_to_dict(found, classes, threshold)
