"""Prepares data for training once, and stores it as plain .npy files, which every client maps into memory.

A prepared folder contains x_train, y_train, x_test and y_test as .npy, and meta.json. Its name includes a hash of the
source's content and of every setting that affects the arrays, so that it is never out of date.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from fleetbed.emulator.data import images, text
from fleetbed.emulator.data.balance import balanced_counts
from fleetbed.emulator.data.raw import SPLITS, Array, Kind, Raw, SplitName
from fleetbed.emulator.data.sources import find_source
from fleetbed.emulator.machine import host
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.experiment import Data, Partition
from fleetbed.profiles.folders import cache_folder

FORMAT = 2  # part of the hash: increase it when the meaning of the files changes


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The content of meta.json. `shape` is that of one sample, `vocabulary` is the number of token numbers.

    `mean` and `std` are those of each channel of an image, or of each row of a sample's first dimension.
    """

    source: str
    key: str
    kind: Kind = "images"
    classes: int
    targets: int = 0
    columns: tuple[str, ...] = ()
    shape: tuple[int, ...]
    vocabulary: int
    mean: list[float]
    std: list[float]
    normalise: bool
    augment: tuple[str, ...]
    files: dict[str, int]  # bytes of each


def prepare_dataset(data: Data) -> Path:
    """Return the folder with this data in the user's cache; write it if it is missing or incomplete."""
    source = find_source(data)
    key = _key(data, source.identity)
    folder = prepared_folder(f"{Path(source.title).stem[:60]}-{key}")
    if not is_whole(folder):
        raw = source.load()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # next to the target, because only a rename within one file system is atomic
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
                made = Path(scratch) / "data"
                made.mkdir()
                _write(made, data, raw, source.title, key)
                put_whole(made, folder)
        except OSError as error:
            raise HostCannot(
                f"prepared data cannot be written to {folder.parent}: {error.strerror}; "
                f"free some space there, or set XDG_CACHE_HOME to a folder with enough."
            ) from error
    return folder


def prepared_folder(name: str) -> Path:
    """The folder of the prepared data of this name in the user's cache, which need not exist."""
    return cache_folder() / "data" / name


def column_file(number: int, split: SplitName) -> str:
    """The name of the file of the column with this number, without its suffix; users choose the names of columns."""
    return f"column{number}_{split}"


def read_meta(folder: Path) -> Meta | None:
    try:
        return msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
    except (OSError, msgspec.DecodeError):
        return None


def is_whole(folder: Path) -> bool:
    meta = read_meta(folder)
    if meta is None:
        return False
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return all(sizes.get(name) == size for name, size in meta.files.items())


def _key(data: Data, identity: str) -> str:
    # the partition and the origin of the files do not change the arrays
    settings = msgspec.structs.replace(data, name="", root=None, download=False, public=0, partition=Partition())
    content = f"{FORMAT}\n{identity}\n".encode() + msgspec.json.encode(settings, order="sorted")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def put_whole(made: Path, folder: Path) -> None:
    """Move a finished folder to its final path. If another process was faster, use its folder."""
    if folder.exists() and not is_whole(folder):
        shutil.rmtree(folder)
    try:
        os.rename(made, folder)
    except OSError:
        if not is_whole(folder):
            raise


def _write(folder: Path, data: Data, raw: Raw, title: str, key: str) -> None:
    chosen = {
        split: _first(raw, split, limit)
        for split, limit in zip(SPLITS, (data.train_limit, data.test_limit), strict=True)
    }
    x = {split: raw.x[split][chosen[split]] for split in SPLITS}
    vocabulary = 0
    mean: list[float] = []
    std: list[float] = []
    if raw.kind != "images":
        _refuse_image_settings(data, raw.kind)
    if raw.kind == "texts":
        known = text.vocabulary(x["train"].tolist(), data.vocabulary)
        vocabulary = text.FIRST_WORD + len(known)
        x = {split: text.encode(x[split].tolist(), known, data.tokens) for split in SPLITS}
    elif raw.kind == "tokens":
        vocabulary = 1 + max(int(part.max()) for part in raw.x.values())
    elif raw.kind == "values":
        rows = np.moveaxis(x["train"], 1, 0).reshape(x["train"].shape[1], -1).astype(np.float64)
        mean, std = rows.mean(axis=1).tolist(), rows.std(axis=1).tolist()
    else:
        _check_memory(x, data)
        x = {split: images.convert_images(x[split], data.image_size, data.channels) for split in SPLITS}
        mean, std = images.statistics(x["train"])
    files: dict[str, int] = {}
    for split in SPLITS:
        arrays = {f"x_{split}": x[split], f"y_{split}": raw.y[split][chosen[split]]}
        for number, parts in enumerate(raw.columns.values()):
            if split in parts:
                arrays[column_file(number, split)] = parts[split][chosen[split]]
        for stem, array in arrays.items():
            name = f"{stem}.npy"
            np.save(folder / name, array, allow_pickle=False)
            files[name] = (folder / name).stat().st_size
    meta = Meta(
        source=title,
        key=key,
        kind=raw.kind,
        classes=raw.classes,
        targets=raw.targets,
        columns=tuple(raw.columns),
        shape=x["train"].shape[1:],
        vocabulary=vocabulary,
        mean=mean,
        std=std,
        normalise=data.normalise,
        augment=data.augment,
        files=files,
    )
    (folder / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)))


def _first(raw: Raw, split: SplitName, limit: int | None) -> Array | slice:
    """Select the first samples of each class, as evenly as possible, in stored order."""
    labels = raw.y[split]
    if limit is None:
        return slice(None)
    if raw.targets and limit <= len(labels):
        return slice(limit)
    least = raw.classes if split == "train" else 1
    if not least <= limit <= len(labels):
        raise BadInput(
            f"data.{split}_limit is {limit}; the {split} split has {len(labels)} samples of {raw.classes} "
            f"classes, so allowed are {least} to {len(labels)}."
        )
    counts = balanced_counts(np.bincount(labels, minlength=raw.classes), limit)
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c, count in enumerate(counts)]))


def _check_memory(x: dict[SplitName, Array], data: Data) -> None:
    """Refuse images that would not fit into memory at the requested size."""
    _, height, width, channels = x["train"].shape
    pixels = (data.channels or channels) * (data.image_size or height) * (data.image_size or width)
    needed, free = pixels * sum(map(len, x.values())), host.available_bytes()
    if 2 * needed > free:  # all clients share the images, but also need memory of their own
        raise HostCannot(
            f"data.image_size: {sum(map(len, x.values()))} images of {pixels} bytes are {needed >> 20} MiB, more than "
            f"half of the {free >> 20} MiB of memory that are free; lower data.image_size, data.train_limit or "
            "data.test_limit."
        )


def _refuse_image_settings(data: Data, kind: Kind) -> None:
    for name in ("image_size", "channels", "augment"):
        if getattr(data, name):
            raise BadInput(
                f"data.{name} is {getattr(data, name)!r}, but {data.name} contains {kind}; it is for images only."
            )
