"""Rebuild emulator/data/fashion-mini.npz: make_fashion_mini.py IDX_FOLDER OUT.npz

IDX_FOLDER holds the four gzipped idx files of Fashion-MNIST. The part is the first 1,000 training and the
first 200 test images of each class, in stored order, so every rebuild gives the same file.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np

CLASSES = 10
PARTS = {"train": ("train", 1_000), "test": ("t10k", 200)}


def idx(path: Path, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)


def main(source: Path, out: Path) -> None:
    arrays = {}
    for split, (prefix, each) in PARTS.items():
        labels = idx(source / f"{prefix}-labels-idx1-ubyte.gz", 8)
        images = idx(source / f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == c)[:each] for c in range(CLASSES)]))
        arrays[f"x_{split}"] = images[chosen]
        arrays[f"y_{split}"] = labels[chosen]
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
