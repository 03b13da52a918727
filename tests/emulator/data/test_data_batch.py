"""Batches against their definition: normalisation, and each augmentation by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fleetbed.emulator.data import Dataset, augment, open_dataset, prepare_dataset
from fleetbed.profiles.experiment import Data

torch.set_num_threads(1)

Save = Callable[..., str]


def dataset(arrays: dict[str, Any], save: Save, **settings: Any) -> Dataset:
    return open_dataset(prepare_dataset(Data(name=save(arrays), **settings)))


def test_normalised_by_the_statistics_of_the_training_split(arrays: dict[str, Any], save: Save) -> None:
    found = dataset(arrays, save)
    indices = np.array([11, 3, 3])
    x, y = found.batch("test", indices)
    pixels = arrays["x_train"] / 255
    mean, std = pixels.mean(axis=(0, 1, 2)), pixels.std(axis=(0, 1, 2))
    expected = ((arrays["x_test"][indices] / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x.numpy(), expected, atol=1e-5)
    assert y.dtype == torch.int64
    assert y.tolist() == [11 % 3, 0, 0]


def test_without_normalisation_pixels_are_0_to_1(arrays: dict[str, Any], save: Save) -> None:
    x, _ = dataset(arrays, save, normalise=False).batch("train", np.arange(4))
    np.testing.assert_allclose(x.numpy(), arrays["x_train"][:4].transpose(0, 3, 1, 2) / 255, atol=1e-6)


def test_a_constant_channel_stays_finite(arrays: dict[str, Any], save: Save) -> None:
    arrays["x_train"][..., 1] = 7
    x, _ = dataset(arrays, save).batch("train", np.arange(30))
    assert torch.isfinite(x).all()
    assert x[:, 1].abs().max() < 1e-5


def test_a_batch_is_a_copy_that_may_be_changed(arrays: dict[str, Any], save: Save) -> None:
    found = dataset(arrays, save)
    x, y = found.batch("train", np.arange(5))
    before = x.clone()
    x.zero_()
    y.zero_()
    again, labels = found.batch("train", np.arange(5))
    assert torch.equal(again, before)
    assert labels.tolist() == [0, 1, 2, 0, 1]


def test_only_selected_augmentations_with_a_generator_are_applied(arrays: dict[str, Any], save: Save) -> None:
    # enlarged, for a hole of 16 pixels would cover all of an image of 6
    plain = dataset(arrays, save, image_size=32).batch("train", np.arange(30), np.random.default_rng(0))[0]
    augmenting = dataset(arrays, save, image_size=32, augment=("crop", "flip", "cutout"))
    assert torch.equal(augmenting.batch("train", np.arange(30))[0], plain)
    first = augmenting.batch("train", np.arange(30), np.random.default_rng(0))[0]
    assert not torch.equal(first, plain)
    assert torch.equal(augmenting.batch("train", np.arange(30), np.random.default_rng(0))[0], first)
    assert not torch.equal(augmenting.batch("train", np.arange(30), np.random.default_rng(1))[0], first)


def test_cropping_moves_by_up_to_four_pixels_and_fills_with_black() -> None:
    image = np.arange(1, 101, dtype=np.uint8).reshape(1, 1, 10, 10)
    shifts = set()
    for seed in range(400):
        (cropped,) = augment.crop(image, np.random.default_rng(seed))[:, 0]
        rows, columns = np.nonzero(cropped)
        value = int(cropped[rows[0], columns[0]]) - 1  # the first pixel that is left tells the shift
        down, right = int(rows[0]) - value // 10, int(columns[0]) - value % 10
        expected = np.zeros((10, 10), np.uint8)
        for row in range(10):
            for column in range(10):
                if 0 <= row - down < 10 and 0 <= column - right < 10:
                    expected[row, column] = image[0, 0, row - down, column - right]
        np.testing.assert_array_equal(cropped, expected)
        shifts.add((down, right))
    assert {down for down, _ in shifts} == {right for _, right in shifts} == set(range(-4, 5))


def test_flipping_mirrors_half_of_the_images() -> None:
    images = np.random.default_rng(0).integers(0, 256, (400, 2, 3, 5), dtype=np.uint8)
    flipped = augment.flip(images, np.random.default_rng(1))
    mirrored = [np.array_equal(out, image[:, :, ::-1]) for out, image in zip(flipped, images, strict=True)]
    kept = [np.array_equal(out, image) for out, image in zip(flipped, images, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 150 < sum(mirrored) < 250


def test_cutout_is_a_square_of_sixteen_cut_at_the_border() -> None:
    images = np.ones((500, 3, 32, 32), np.float32)
    augment.cutout(images, np.random.default_rng(2))
    assert set(np.unique(images)) == {0.0, 1.0}
    heights = set()
    for image in images:
        hole = image[0] == 0
        assert (image == image[0]).all()
        rows, columns = np.flatnonzero(hole.any(axis=1)), np.flatnonzero(hole.any(axis=0))
        assert hole.sum() == len(rows) * len(columns)  # a full rectangle
        for span in (rows, columns):
            assert span[-1] - span[0] + 1 == len(span)
            inside = span[0] > 0 and span[-1] < 31
            assert len(span) == 16 if inside else 8 <= len(span) <= 16
        heights.add(len(rows))
    assert heights == set(range(8, 17))


def test_batches_of_the_shipped_set_are_standardised() -> None:
    x, _ = open_dataset(prepare_dataset(Data())).batch("train", np.arange(10_000))
    assert x.mean().item() == pytest.approx(0, abs=1e-4)
    assert x.std().item() == pytest.approx(1, abs=1e-4)
