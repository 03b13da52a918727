"""A data set as read from its files, before it is prepared for training, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetbed.profiles.errors import BadInput

Array = NDArray[Any]
SplitName = Literal["train", "test"]
Kind = Literal["images", "texts", "values", "tokens"]
SPLITS: tuple[SplitName, SplitName] = ("train", "test")
#: what the names of the arrays of each kind begin with
PREFIXES: dict[Kind, str] = {"images": "x", "texts": "text", "values": "values", "tokens": "tokens"}
MOST_CLASSES = 10_000
MOST_TOKENS = 10_000_000


def in_one_line(error: Exception) -> str:
    """Return the text of an error on one line, for use inside a sentence."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class Raw:
    """Samples by split: images as uint8 [samples, height, width, channels], texts as unicode [samples], values as
    float32 [samples, ...], tokens as integers [samples, tokens]. Labels are classes from 0, or float32 targets
    [samples, targets]; then there are no classes. A column has a number for each sample, such as that of its user."""

    x: dict[SplitName, Array]
    y: dict[SplitName, Array]
    classes: int
    kind: Kind = "images"
    targets: int = 0
    columns: dict[str, dict[SplitName, Array]] = field(default_factory=dict)


def checked(
    x: dict[SplitName, Array],
    y: dict[SplitName, Array],
    where: str,
    kind: Kind = "images",
    columns: dict[str, dict[SplitName, Array]] | None = None,
) -> Raw:
    """Return the data set; raise BadInput unless its parts match. `where` is what the arrays are in, for the error."""
    prefix = PREFIXES[kind]
    samples = {split: _samples(x[split], f"{where}: {prefix}_{split}", kind) for split in SPLITS}
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
    numbered = {name: _column(name, parts, labels, where) for name, parts in (columns or {}).items()}
    if labels["train"].ndim == 2 or labels["test"].ndim == 2:
        return Raw(samples, labels, 0, kind, _targets(labels, where), numbered)
    return Raw(samples, labels, _classes(labels, where), kind, 0, numbered)


def _samples(array: Array, name: str, kind: Kind) -> Array:
    if array.ndim == 0 or len(array) == 0:
        raise BadInput(f"{name} is empty; it must have at least one sample.")
    if kind == "texts":
        if array.ndim != 1:
            raise BadInput(f"{name} has shape {array.shape}; texts must be an array of one dimension.")
        return array
    if kind == "values":
        return _values(array, name)
    if kind == "tokens":
        return _tokens(array, name)
    return _pixels(_with_channels(array, name), name)


def _values(array: Array, name: str) -> Array:
    if array.dtype.kind not in "fiub":
        raise BadInput(f"{name} has type {array.dtype}; values must be numbers.")
    if array.ndim < 2 or 0 in array.shape:
        raise BadInput(
            f"{name} has shape {array.shape}; values must be (samples, features), (samples, channels, time) or have "
            f"more dimensions."
        )
    wrong = np.argwhere(~np.isfinite(array))
    if len(wrong):
        at = tuple(int(place) for place in wrong[0])
        raise BadInput(f"{name}{list(at)} is {array[at]}; every value must be finite.")
    return np.ascontiguousarray(array, np.float32)


def _tokens(array: Array, name: str) -> Array:
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise BadInput(
            f"{name} has type {array.dtype} and shape {array.shape}; tokens must be integers (samples, tokens)."
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= MOST_TOKENS:
        raise BadInput(f"{name} has numbers from {low} to {high}; tokens must be 0 to {MOST_TOKENS - 1}.")
    return array.astype(np.int32)


def _with_channels(array: Array, name: str) -> Array:
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        hint = _as_values(name)
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
            raise BadInput(
                f"{name} has values from {low:g} to {high:g}; floating point pixels must be 0 to 1{_as_values(name)}."
            )
        pixels: Array = (array * 255.0).round().astype(np.uint8)
        return pixels
    raise BadInput(
        f"{name} has type {array.dtype}; allowed are uint8 pixels, floating point pixels from 0 to 1, "
        "and texts as unicode."
    )


def _as_values(name: str) -> str:
    split = name.rpartition("_")[2]
    return f"; if it holds no images but other numbers, such as a sensor's, call it values_{split}"


def _labels(array: Array, name: str) -> Array:
    if len(array.shape) == 0 or len(array) == 0:
        raise BadInput(f"{name} has shape {array.shape}; there must be one label for each sample.")
    if array.dtype.kind == "f":
        return _numbers(array, name)
    if array.ndim != 1:
        raise BadInput(f"{name} has shape {array.shape}; labels must be one integer for each sample.")
    if array.dtype.kind not in "iu":
        raise BadInput(
            f"{name} has type {array.dtype}; labels must be integers from 0 (classes) or floating point (targets)"
            f"{'; number the classes' if array.dtype.kind == 'U' else ''}."
        )
    wrong = np.flatnonzero((array < 0) | (array > np.iinfo(np.int32).max))
    if len(wrong):
        raise BadInput(f"{name}[{wrong[0]}] is {array[wrong[0]]}; labels must be integers from 0 to classes - 1.")
    return array.astype(np.int64)


def _numbers(array: Array, name: str) -> Array:
    """The targets of a regression, one row for each sample."""
    if array.ndim > 2 or 0 in array.shape:
        raise BadInput(f"{name} has shape {array.shape}; targets must be (samples,) or (samples, targets).")
    wrong = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
    if len(wrong):
        raise BadInput(f"{name}[{wrong[0]}] is {array[wrong[0]]}; every target must be finite.")
    return np.ascontiguousarray(array.reshape(len(array), -1), np.float32)


def _targets(labels: dict[SplitName, Array], where: str) -> int:
    train, test = labels["train"], labels["test"]
    if train.ndim != test.ndim or train.shape[1:] != test.shape[1:]:
        raise BadInput(
            f"{where}: y_train has {_what(train)} and y_test has {_what(test)}; both must be classes (integers), or "
            f"equally many targets (floating point)."
        )
    return int(train.shape[1])


def _what(labels: Array) -> str:
    return "classes" if labels.ndim == 1 else f"{labels.shape[1]} targets for each sample"


def _column(
    name: str, parts: dict[SplitName, Array], labels: dict[SplitName, Array], where: str
) -> dict[SplitName, Array]:
    """Number the different values of a column, in their order; the test split may lack it."""
    for split, part in parts.items():
        if part.shape != (len(labels[split]),):
            raise BadInput(
                f"{where}: {name}_{split} has shape {part.shape}, but y_{split} has {len(labels[split])} labels; a "
                f"column must have one value for each sample."
            )
    known, numbers = np.unique(np.concatenate(list(parts.values())), return_inverse=True)
    del known
    ends = np.cumsum([len(part) for part in parts.values()])[:-1]
    return dict(zip(parts, np.split(numbers.astype(np.int64), ends), strict=True))


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
