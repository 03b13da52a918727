"""A data set as read from its files, before it is prepared for training, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetbed.profiles.errors import BadInput

Array = NDArray[Any]
SplitName = Literal["train", "test"]
MOST_CLASSES = 10_000
SPLITS: tuple[SplitName, SplitName] = ("train", "test")


def in_one_line(error: Exception) -> str:
    """Return the text of an error on one line, for use inside a sentence."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class Raw:
    """Images as uint8 [samples, height, width, channels] or texts as unicode [samples]; labels from 0."""

    x: dict[SplitName, Array]
    y: dict[SplitName, Array]
    classes: int

    @property
    def is_text(self) -> bool:
        return self.x["train"].dtype.kind == "U"


def checked(x: dict[SplitName, Array], y: dict[SplitName, Array], where: str, prefix: str = "x") -> Raw:
    """Return the data set; raise BadInput unless samples and labels match. `where` and `prefix` name them in it."""
    samples = {split: _samples(x[split], f"{where}: {prefix}_{split}") for split in SPLITS}
    labels = {split: _labels(y[split], f"{where}: y_{split}") for split in SPLITS}
    for split in SPLITS:
        if len(samples[split]) != len(labels[split]):
            raise BadInput(
                f"{where}: {prefix}_{split} has {len(samples[split])} samples and y_{split} has "
                f"{len(labels[split])} labels; both must have the same length."
            )
    if samples["train"].shape[1:] != samples["test"].shape[1:]:
        raise BadInput(
            f"{where}: {prefix}_train has samples of shape {samples['train'].shape[1:]} and {prefix}_test of "
            f"shape {samples['test'].shape[1:]}; both must be the same."
        )
    return Raw(samples, labels, _classes(labels, where))


def _samples(array: Array, name: str) -> Array:
    if array.ndim == 0 or len(array) == 0:
        raise BadInput(f"{name} is empty; it must have at least one sample.")
    if array.dtype.kind == "U":
        if array.ndim != 1:
            raise BadInput(f"{name} has shape {array.shape}; texts must be an array of one dimension.")
        return array
    return _pixels(_with_channels(array, name), name)


def _with_channels(array: Array, name: str) -> Array:
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        hint = ""
        if array.ndim == 4 and array.shape[1] in (1, 3):
            hint = f"; if the channels come second, save {name.rpartition(' ')[2]}.transpose(0, 2, 3, 1)"
        raise BadInput(
            f"{name} has shape {array.shape}; images must be (samples, height, width) or "
            f"(samples, height, width, channels) with 1 or 3 channels{hint}."
        )
    return array


def _pixels(array: Array, name: str) -> Array:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0.0 and high <= 1.0):  # written this way so that NaN is refused too
            raise BadInput(f"{name} has values from {low:g} to {high:g}; floating point pixels must be 0 to 1.")
        pixels: Array = (array * 255.0).round().astype(np.uint8)
        return pixels
    raise BadInput(
        f"{name} has type {array.dtype}; allowed are uint8 pixels, floating point pixels from 0 to 1, "
        "and texts as unicode."
    )


def _labels(array: Array, name: str) -> Array:
    if array.ndim != 1 or len(array) == 0:
        raise BadInput(f"{name} has shape {array.shape}; labels must be one integer for each sample.")
    if array.dtype.kind not in "iu":
        raise BadInput(f"{name} has type {array.dtype}; labels must be integers from 0.")
    wrong = np.flatnonzero((array < 0) | (array > np.iinfo(np.int32).max))
    if len(wrong):
        raise BadInput(f"{name}[{wrong[0]}] is {array[wrong[0]]}; labels must be integers from 0 to classes - 1.")
    return array.astype(np.int64)


def _classes(labels: dict[SplitName, Array], where: str) -> int:
    """Return the number of classes in the training labels, which must be numbered without gaps."""
    present = np.unique(labels["train"])
    classes = len(present)
    if classes > MOST_CLASSES:
        raise BadInput(f"{where}: y_train has {classes} different labels; at most {MOST_CLASSES} classes are possible.")
    if classes < 2:
        raise BadInput(f"{where}: y_train has only the label {present[0]}; at least 2 classes are needed.")
    if present[-1] != classes - 1:
        missing = int(np.flatnonzero(present != np.arange(classes))[0])
        raise BadInput(
            f"{where}: y_train has {classes} different labels up to {present[-1]}, but not {missing}; "
            "labels must be 0 to classes - 1 without gaps."
        )
    beyond = np.flatnonzero(labels["test"] >= classes)
    if len(beyond):
        raise BadInput(
            f"{where}: y_test[{beyond[0]}] is {labels['test'][beyond[0]]}; "
            f"the labels of y_train allow 0 to {classes - 1}."
        )
    return classes
