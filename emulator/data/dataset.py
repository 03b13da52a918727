"""A prepared data set, mapped into memory: opening it copies nothing, and all processes share its pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetbed.emulator.data import augment
from fleetbed.emulator.data.raw import SPLITS, Array, SplitName
from fleetbed.emulator.data.store import Meta, column_file, is_whole, read_meta
from fleetbed.models.base import InputSpec
from fleetbed.profiles.errors import FleetbedError


class Dataset:
    """Samples and labels by index. Only numpy makes the batches, so that no thread of torch starts here."""

    def __init__(
        self,
        meta: Meta,
        x: dict[SplitName, Array],
        y: dict[SplitName, Array],
        columns: dict[str, dict[SplitName, Array]] | None = None,
    ) -> None:
        self.spec = InputSpec(meta.shape, meta.classes, meta.vocabulary, meta.targets)
        self.columns = columns or {}
        self.y_train, self.y_test = y["train"], y["test"]
        self._x, self._y = x, y
        self._augment = frozenset(meta.augment)
        self._scale, self._shift = _affine(meta)

    def batch(
        self, split: SplitName, indices: NDArray[np.int64], rng: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (float32, or int64 tokens) and labels (int64 classes, or float32 targets).

        With `rng` the images are augmented.

        Crop and flip are applied to the pixels, cutout after normalisation, where 0 is the mean.
        """
        y = torch.from_numpy(self._y[split][indices])
        x = self._x[split][indices]
        if self.spec.vocabulary:
            return torch.from_numpy(x.astype(np.int64)), y
        if rng is not None and "crop" in self._augment:
            x = augment.crop(x, rng)
        if rng is not None and "flip" in self._augment:
            x = augment.flip(x, rng)
        values = x.astype(np.float32)
        values *= self._scale
        values += self._shift
        if rng is not None and "cutout" in self._augment:
            augment.cutout(values, rng)
        return torch.from_numpy(values), y

    def strata(self, split: SplitName) -> NDArray[np.int64]:
        """Return the class of each sample; 0 for all of them if the labels are numbers."""
        y = self._y[split]
        return np.zeros(len(y), np.int64) if self.spec.targets else y

    def touch(self) -> None:
        """Read every page into memory, so that no process that reads it later is charged for it."""
        for array in (*self._x.values(), *self._y.values()):
            array.max(initial=0)


def open_dataset(folder: Path) -> Dataset:
    """Open a folder that `prepare_dataset` wrote."""
    meta = read_meta(folder)
    if meta is None or not is_whole(folder):
        raise FleetbedError(f"{folder} is not a complete prepared data set; start the run again to prepare it again")
    return Dataset(
        meta,
        {split: _mapped(folder / f"x_{split}.npy") for split in SPLITS},
        {split: _mapped(folder / f"y_{split}.npy") for split in SPLITS},
        {name: _column(folder, number) for number, name in enumerate(meta.columns)},
    )


def _column(folder: Path, number: int) -> dict[SplitName, Array]:
    paths = {split: folder / f"{column_file(number, split)}.npy" for split in SPLITS}
    return {split: _mapped(path) for split, path in paths.items() if path.exists()}


def _mapped(path: Path) -> Array:
    # a plain view of the mapping: indexing the memmap class itself costs several microseconds more
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _affine(meta: Meta) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scale and shift such that v * scale + shift is (v - mean)/std of a value, for a pixel that of v/255."""
    if meta.vocabulary or (meta.kind == "values" and not meta.normalise):
        return np.ones(1, np.float32), np.zeros(1, np.float32)
    if meta.kind == "values":
        deviation = np.where(np.array(meta.std) > 0, meta.std, 1.0)  # that of a constant is 0
        wide = (-1, *[1] * (len(meta.shape) - 1))
        offset = -np.array(meta.mean) / deviation
        return (1 / deviation).astype(np.float32).reshape(wide), offset.astype(np.float32).reshape(wide)
    channels = meta.shape[0]
    mean, std = np.zeros(channels), np.ones(channels)
    if meta.normalise:
        mean = np.array(meta.mean)
        std = np.maximum(meta.std, 1 / 255)  # the deviation of a constant channel is 0
    scale, shift = 1 / (255 * std), -mean / std
    return scale.astype(np.float32).reshape(-1, 1, 1), shift.astype(np.float32).reshape(-1, 1, 1)
