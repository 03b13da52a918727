"""Similarity of representations (CKA), and their projection to the plane (PCA, t-SNE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def linear_cka(first: Floats, second: Floats) -> float:
    """Return the linear CKA of two [samples, values] matrices (Kornblith et al. 2019), from 0 to 1."""
    return float(cka_matrix([first, second])[0, 1])


def cka_matrix(representations: Sequence[Floats]) -> Floats:
    """Return the CKA of each pair. Gram matrices are [samples, samples], so that the widths may differ."""
    grams = []
    for values in representations:
        centred = values - values.mean(axis=0)
        gram = centred @ centred.T
        norm = np.linalg.norm(gram)
        grams.append((gram / norm if norm > 0 else gram).ravel())
    stacked = np.array(grams)
    matrix: Floats = stacked @ stacked.T
    return matrix


def off_diagonal_mean(matrix: Floats) -> float:
    """Return the mean similarity of different models; NaN for a single model."""
    pairs = matrix[~np.eye(len(matrix), dtype=bool)]
    return float(pairs.mean()) if len(pairs) else float("nan")


def pca(values: Floats, dimensions: int = 2) -> tuple[Floats, Floats]:
    """Return coordinates along the axes of largest variance, and the fraction of the variance of each."""
    centred = values - values.mean(axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    variance = singular**2
    total = variance.sum()
    return left[:, :dimensions] * singular[:dimensions], variance[:dimensions] / (total if total > 0 else 1.0)


def tsne(values: Floats, perplexity: float = 30.0, steps: int = 500, seed: int = 0) -> Floats:
    """Return exact t-SNE (van der Maaten and Hinton 2008) in the plane, for up to about a thousand points.

    It starts from PCA, so that it is repeatable and keeps the large structure; the first quarter of the steps
    exaggerates.
    """
    count = len(values)
    joint = _joint(values, min(perplexity, max(1.0, (count - 1) / 3)))
    place: Floats = pca(values)[0]
    place = place / (place.std(axis=0)[0] + 1e-12) * 1e-4
    place += np.random.default_rng(seed).normal(0, 1e-6, place.shape)  # so that equal points can separate
    velocity, gain = np.zeros_like(place), np.ones_like(place)
    rate = max(count / 12.0 / 4.0, 50.0)
    early = steps // 4
    for step in range(steps):
        near = 1.0 / (1.0 + _squared_distances(place))
        np.fill_diagonal(near, 0.0)
        weight = (joint * (12.0 if step < early else 1.0) - near / near.sum()) * near
        gradient = 4.0 * (weight.sum(axis=1)[:, None] * place - weight @ place)
        gain = np.clip(np.where(np.sign(gradient) != np.sign(velocity), gain + 0.2, gain * 0.8), 0.01, None)
        velocity = (0.5 if step < early else 0.8) * velocity - rate * gain * gradient
        place = place + velocity
        place -= place.mean(axis=0)
    return place


def _squared_distances(values: Floats) -> Floats:
    squares = (values**2).sum(axis=1)
    distances: Floats = np.maximum(squares[:, None] + squares[None, :] - 2 * values @ values.T, 0.0)
    return distances


def _joint(values: Floats, perplexity: float) -> Floats:
    """Return symmetric neighbour probabilities with the requested perplexity around each point."""
    distances = _squared_distances(values)
    count = len(values)
    low, high = np.zeros(count), np.full(count, np.inf)
    precision = 1.0 / np.maximum(distances.sum(axis=1) / max(1, count - 1), 1e-12)
    # subtracting the nearest distance changes nothing, but prevents exp from underflowing to all zeros
    distances -= np.partition(distances, min(1, count - 1), axis=1)[:, min(1, count - 1), None]
    np.fill_diagonal(distances, 0.0)
    for _ in range(60):
        kernel = np.exp(-distances * precision[:, None])
        np.fill_diagonal(kernel, 0.0)
        total = kernel.sum(axis=1)
        rows = kernel / np.maximum(total, 1e-300)[:, None]
        entropy = -(rows * np.log(np.maximum(rows, 1e-300))).sum(axis=1)
        too_wide = entropy > np.log(perplexity)
        low, high = np.where(too_wide, precision, low), np.where(too_wide, high, precision)
        precision = np.where(np.isinf(high), precision * 2, (low + high) / 2)
    joint: Floats = (rows + rows.T) / (2 * count)
    return joint
