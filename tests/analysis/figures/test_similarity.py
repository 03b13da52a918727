"""CKA, PCA and t-SNE against their definitions and cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from fleetbed.analysis.figures.similarity import cka_matrix, linear_cka, off_diagonal_mean, pca, tsne


def test_cka_is_the_formula_of_the_paper() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 5)), rng.normal(size=(20, 3))
    centre = np.eye(20) - np.ones((20, 20)) / 20
    k, l = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre  # noqa: E741
    expected = (k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum())
    assert linear_cka(x, y) == pytest.approx(expected)


def test_cka_does_not_see_rotation_scale_or_shift_but_sees_other_things() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(30, 4))
    rotation, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    assert linear_cka(x, 3 * x @ rotation + 7) == pytest.approx(1)
    assert linear_cka(x, rng.normal(size=(30, 4))) < 0.6


def test_a_constant_representation_is_like_nothing() -> None:
    matrix = cka_matrix([np.ones((5, 2)), np.arange(10.0).reshape(5, 2)])
    np.testing.assert_allclose(matrix, [[0, 0], [0, 1]])


def test_the_mean_leaves_out_the_diagonal() -> None:
    assert off_diagonal_mean(np.array([[1.0, 0.2], [0.4, 1.0]])) == pytest.approx(0.3)
    assert np.isnan(off_diagonal_mean(np.array([[1.0]])))


def test_pca_finds_the_line_that_points_lie_on() -> None:
    along = np.linspace(-1, 1, 11)
    points = np.outer(along, [3.0, 4.0]) + np.array([10, 20])
    plane, share = pca(points)
    np.testing.assert_allclose(np.abs(plane[:, 0]), 5 * np.abs(along), atol=1e-12)
    assert share[0] == pytest.approx(1)


def test_tsne_keeps_clusters_apart_and_repeats() -> None:
    rng = np.random.default_rng(2)
    centres = 20 * np.eye(3, 10)
    points = np.concatenate([centre + rng.normal(size=(25, 10)) for centre in centres])
    owner = np.repeat([0, 1, 2], 25)
    plane = tsne(points, perplexity=10, steps=250)
    distances = np.linalg.norm(plane[:, None] - plane[None, :], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (owner[distances.argmin(axis=1)] == owner).all()
    np.testing.assert_array_equal(plane, tsne(points, perplexity=10, steps=250))


def test_tsne_takes_few_and_equal_points() -> None:
    assert np.isfinite(tsne(np.ones((4, 3)), steps=20)).all()
