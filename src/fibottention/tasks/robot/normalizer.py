"""What the network sees of images and vectors, scaled by the training data; the scales are kept with the weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fibottention.errors import UserError

__all__ = ["Normalizer"]

_LEAST_RANGE = 1e-4  # a number that changes less is left at its place


class Normalizer(nn.Module):
    """Scales vectors to -1 .. 1 and back, and the channels of images to mean 0 and deviation 1.

    The statistics are buffers, so that they are saved with the weights; until they are known they are not numbers.

    Args:
        sizes: Length of each vector by name; 3 for an image.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_buffer(f"{name}_scale", torch.full((size,), torch.nan))
            self.register_buffer(f"{name}_offset", torch.full((size,), torch.nan))

    @torch.no_grad()
    def fit(self, name: str, values: Tensor, fixed: slice | None = None) -> None:
        """Take the least and the largest of each number of ``(count, numbers)`` as -1 and 1.

        Args:
            name: The vector.
            values: All its values in the training data.
            fixed: Numbers that are left as they are, such as those of a rotation.
        """
        low, high = values.amin(0), values.amax(0)
        moves = high - low > _LEAST_RANGE
        scale = torch.where(moves, 2 / (high - low).clamp(min=_LEAST_RANGE), torch.ones_like(low))
        offset = torch.where(moves, -1 - low * scale, -low)
        if fixed is not None:
            scale[fixed], offset[fixed] = 1.0, 0.0
        self.get_buffer(f"{name}_scale").copy_(scale)
        self.get_buffer(f"{name}_offset").copy_(offset)

    @torch.no_grad()
    def fit_images(self, name: str, images: Tensor) -> None:
        """Take the mean and the deviation of each channel of ``(count, H, W, 3)`` as 0 and 1.

        Most pixels of a simulator's image are background, which would otherwise outweigh what moves in front of it.

        Args:
            name: The camera.
            images: Some of its images in the training data.
        """
        total, squares, count = torch.zeros(3).double(), torch.zeros(3).double(), 0
        for image in images:
            values = image.flatten(0, -2).double()
            total, squares, count = total + values.sum(0), squares + values.square().sum(0), count + len(values)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=1.0).sqrt()  # of 255
        self.get_buffer(f"{name}_scale").copy_(1 / deviation)
        self.get_buffer(f"{name}_offset").copy_(-mean / deviation)

    def normalize_images(self, name: str, images: Tensor) -> Tensor:
        """``(..., 3, H, W)`` of uint8 to floats of mean 0 and deviation 1."""
        scale, offset = (self.get_buffer(f"{name}_{part}")[:, None, None] for part in ("scale", "offset"))
        return images.to(scale.dtype) * scale + offset

    def check(self) -> None:
        """Check that the statistics are known.

        Raises:
            UserError: If they are not.
        """
        for name, buffer in self.named_buffers():
            if not torch.isfinite(buffer).all():
                raise UserError(f"the policy has no normalisation statistics ({name}): it was not trained")

    def normalize(self, name: str, values: Tensor) -> Tensor:
        """``(..., numbers)`` to about -1 .. 1."""
        return values * self.get_buffer(f"{name}_scale") + self.get_buffer(f"{name}_offset")

    def restore(self, name: str, values: Tensor) -> Tensor:
        """Back from about -1 .. 1."""
        return (values - self.get_buffer(f"{name}_offset")) / self.get_buffer(f"{name}_scale")
