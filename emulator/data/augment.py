"""The papers' augmentations of a batch of images; every random draw comes from the given generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetbed.emulator.data.images import Pixels

PADDING = 4
HOLE = 16


def crop(images: Pixels, rng: np.random.Generator) -> Pixels:
    """Cut a window of the same size at a random position out of each image padded by 4 black pixels."""
    count, channels, height, width = images.shape
    padded = np.zeros((count, channels, height + 2 * PADDING, width + 2 * PADDING), images.dtype)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    corners = rng.integers(0, 2 * PADDING + 1, (count, 2)).tolist()
    cropped = np.empty_like(images)
    # slices copy whole rows, which is several times faster than one gather over all images
    for out, image, (top, left) in zip(cropped, padded, corners, strict=True):
        out[:] = image[:, top : top + height, left : left + width]
    return cropped


def flip(images: Pixels, rng: np.random.Generator) -> Pixels:
    """Mirror images left to right, each with probability one half."""
    mirrored = rng.random(len(images)) < 0.5
    flipped: Pixels = images.copy()
    flipped[mirrored] = images[mirrored, :, :, ::-1]
    return flipped


def cutout(images: NDArray[np.float32], rng: np.random.Generator) -> None:
    """Set a square of 16 x 16 pixels around a random pixel to 0, in place; it is cut off at the border."""
    count, _, height, width = images.shape
    centres = rng.integers(0, (height, width), (count, 2)).tolist()
    half = HOLE // 2
    for image, (row, column) in zip(images, centres, strict=True):
        image[:, max(row - half, 0) : row + half, max(column - half, 0) : column + half] = 0
