"""The papers' augmentations, on a batch of images at once. Every draw comes from the generator that is given."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDING = 4
HOLE = 16

Images = NDArray[Any]


def crop(images: Images, rng: np.random.Generator) -> Images:
    """A window of the same size at a random place of the image padded by 4 black pixels."""
    count, channels, height, width = images.shape
    padded = np.zeros((count, channels, height + 2 * PADDING, width + 2 * PADDING), images.dtype)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    top, left = rng.integers(0, 2 * PADDING + 1, (2, count))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped: Images = windows[np.arange(count), :, top, left]
    return cropped


def flip(images: Images, rng: np.random.Generator) -> Images:
    """Mirrored left to right, each with probability one half."""
    mirrored = rng.random(len(images)) < 0.5
    return np.where(mirrored[:, None, None, None], images[..., ::-1], images)


def cutout(images: Images, rng: np.random.Generator) -> None:
    """Set a square of 16 pixels around a random pixel to 0 in place; at the border only what is inside."""
    count, _, height, width = images.shape
    rows, columns = rng.integers(0, height, count), rng.integers(0, width, count)
    half = HOLE // 2
    for image, row, column in zip(images, rows, columns, strict=True):
        image[:, max(row - half, 0) : row + half, max(column - half, 0) : column + half] = 0
