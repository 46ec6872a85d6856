"""Make tests/ops/natten_golden.npz: outputs of natten's own forward pass on the CPU, for small inputs.

Needs natten 0.21.7 (pip install --no-build-isolation natten==0.21.7), which the tests do not.
"""

import itertools
from pathlib import Path

import natten
import numpy as np
import torch

GRIDS = ((13,), (9, 8), (3, 4, 5))
TARGET = Path(__file__).parents[1] / "tests" / "ops" / "natten_golden.npz"


def main() -> None:
    """Write the inputs of each grid, and the output and log-sum-exp of each case."""
    generator = torch.Generator().manual_seed(0)
    arrays: dict[str, np.ndarray] = {"version": np.array(natten.__version__)}
    for grid in GRIDS:
        axes, heads, dim = len(grid), 1, 8
        q, k, v = (torch.randn(1, *grid, heads, dim, generator=generator) for _ in range(3))
        more_k, more_v = (torch.randn(1, 3, heads, dim, generator=generator) for _ in range(2))
        for name, tensor in (("q", q), ("k", k), ("v", v), ("more_k", more_k), ("more_v", more_v)):
            arrays[f"{axes}d {name}"] = tensor.numpy()
        for kernel, stride, dilation, causal, more in itertools.product(
            (2, 3, 4, 5), (1, 2, 3), (1, 2), (False, True), (False, True)
        ):
            if stride > kernel or kernel * dilation > min(grid):
                continue
            extra = {"additional_keys": more_k, "additional_values": more_v} if more else {}
            out, log_sums = getattr(natten, f"na{axes}d")(
                q,
                k,
                v,
                kernel_size=kernel,
                stride=stride,
                dilation=dilation,
                is_causal=causal,
                return_lse=True,
                **extra,
            )
            case = f"{axes}d {kernel} {stride} {dilation} {int(causal)} {int(more)}"
            arrays[f"{case} out"], arrays[f"{case} lse"] = out.numpy(), log_sums.numpy()
    # One case with its own numbers along each axis.
    q, k, v = (torch.from_numpy(arrays[f"3d {name}"]) for name in "qkv")
    out = natten.na3d(
        q, k, v, kernel_size=(2, 3, 2), stride=(1, 2, 1), dilation=(1, 1, 2), is_causal=(True, False, False)
    )
    arrays["3d mixed out"] = out.numpy()
    np.savez_compressed(TARGET, **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
