"""TWIST, the weight transform of SATA: suppresses trivial attention weights row by row."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

__all__ = ["Twist", "TwistMode"]

TwistMode = Literal["relative", "absolute"]


class Twist(nn.Module):
    """Suppress the trivial weights of each attention row; the other weights stay as they are.

    With m the largest weight of a row, the weights A_j <= t * m are trivial (t the threshold); with S their sum, they
    become s * A_j^2 / S (s the scale). Rows are not normalized again. The backend `cpu` does this in the same pass as
    the attention.

    Source: arXiv 2210.12333, section 3.2.

    Args:
        threshold: Limit t of the trivial weights, in [0, 1].
        scale: Initial value of s.
        learnable: Make s a parameter; else it is a buffer.
        mode: ``"relative"``: trivial is at most t times the largest weight of the row; ``"absolute"``: at most t.

    Raises:
        ValueError: If the threshold or the mode is not one of those allowed.
    """

    scale: Tensor

    def __init__(
        self, threshold: float = 0.1, scale: float = 0.5, learnable: bool = True, mode: TwistMode = "relative"
    ) -> None:
        super().__init__()
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must be in [0, 1], got {threshold}")
        if mode not in get_args(TwistMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(TwistMode))}, got {mode!r}")
        self.threshold = threshold
        self.mode: TwistMode = mode
        self.initial_scale = float(scale)
        value = torch.tensor(self.initial_scale)
        if learnable:
            self.scale = nn.Parameter(value)
        else:
            self.register_buffer("scale", value)

    def reset_parameters(self) -> None:
        """Set s to its initial value."""
        nn.init.constant_(self.scale, self.initial_scale)

    def forward(self, weights: Tensor) -> Tensor:
        """Transform attention weights ``(..., keys)``; computed in float32 or better."""
        exact = weights if weights.dtype == torch.float64 else weights.float()
        detached = exact.detach()
        limit = self.threshold * detached.amax(-1, keepdim=True) if self.mode == "relative" else self.threshold
        trivial = detached <= limit
        small = exact.masked_fill(~trivial, 0.0)
        total = small.sum(-1, keepdim=True)
        # A row without trivial weight, or next to none, has nothing to divide by.
        enough = total >= torch.finfo(total.dtype).tiny
        share = small / torch.where(enough, total, torch.ones_like(total))
        return torch.where(trivial & enough, self.scale.to(exact.dtype) * small * share, exact).to(weights.dtype)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        learnable = isinstance(self.scale, nn.Parameter)
        return f"threshold={self.threshold}, scale={self.scale.item():g}, learnable={learnable}, mode={self.mode!r}"
