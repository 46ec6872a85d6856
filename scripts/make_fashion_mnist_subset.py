"""Make the embedded subset of Fashion-MNIST: the first 1,200 training and 200 test images of each class, in order.

    python scripts/make_fashion_mnist_subset.py /usr/share/datasets/fashion-mnist

The folder is that of Debian's package dataset-fashion-mnist. Writes src/fibottention/data/fashion_mnist_subset.npz.xz
and prints its SHA-256, which must be the one in the .sha256 file beside it.
"""

import gzip
import hashlib
import io
import lzma
import sys
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parents[1] / "src/fibottention/data/fashion_mnist_subset.npz.xz"


def read(path: Path, header: int) -> np.ndarray:
    """Bytes of a gzipped IDX file after its header."""
    return np.frombuffer(gzip.open(path).read()[header:], dtype=np.uint8)


def main(folder: Path) -> None:
    """Write the subset."""
    arrays = {}
    for split, stem, per_class in (("train", "train", 1200), ("test", "t10k", 200)):
        labels = read(folder / f"{stem}-labels-idx1-ubyte.gz", 8)
        images = read(folder / f"{stem}-images-idx3-ubyte.gz", 16).reshape(len(labels), 28, 28)
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in range(10)]))
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images[chosen], labels[chosen]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    TARGET.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    digest = hashlib.sha256(TARGET.read_bytes()).hexdigest()
    TARGET.with_suffix(".xz.sha256").write_text(f"{digest}  {TARGET.name}\n")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes, sha256 {digest}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
