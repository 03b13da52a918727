"""Converts images when a data set is prepared: channels, size, statistics."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601, as Pillow and torchvision do it
_CHUNK = 1_000  # images at a time, so that the floating point copy stays small


def convert_images(images: Pixels, size: int | None, channels: int | None) -> Pixels:
    """Convert [samples, height, width, channels] to [samples, channels, size, size]; None leaves the size as it is.

    Images are resized by bilinear interpolation, with antialiasing if they shrink. One channel becomes three by
    repetition, three become one by luminance.
    """
    _, height, width, found = images.shape
    shape = (size or height, size or width)
    out = np.empty((len(images), channels or found, *shape), np.uint8)
    for start in range(0, len(images), _CHUNK):
        part = images[start : start + _CHUNK]
        if found == 3 and channels == 1:
            part = (part @ _LUMINANCE).round().astype(np.uint8)[..., None]
        part = part.transpose(0, 3, 1, 2)
        # the assignment repeats the single channel of a grey image for every channel of the result
        out[start : start + _CHUNK] = part if shape == (height, width) else _resize(part, shape)
    return out


def _resize(images: Pixels, shape: tuple[int, int]) -> Pixels:
    tensor = torch.from_numpy(images.astype(np.float32))
    resized = torch.nn.functional.interpolate(tensor, shape, mode="bilinear", align_corners=False, antialias=True)
    out: Pixels = resized.round().clamp(0, 255).to(torch.uint8).numpy()
    return out


def statistics(images: Pixels) -> tuple[list[float], list[float]]:
    """Return mean and deviation per channel, of pixels from 0 to 1; integer sums make them equal on every host."""
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), _CHUNK):
            counts += np.bincount(images[start : start + _CHUNK, channel].reshape(-1), minlength=256)
        per_level = counts.tolist()
        total = sum(per_level)
        first = sum(level * count for level, count in enumerate(per_level))
        second = sum(level * level * count for level, count in enumerate(per_level))
        means.append(first / (255 * total))
        deviations.append(math.sqrt(total * second - first * first) / (255 * total))
    return means, deviations
