"""From the name of a data set to its arrays: the shipped one, those of torchvision, or a user's .npz."""

from __future__ import annotations

import difflib
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fleetbed.emulator.data.folders import data_folder
from fleetbed.emulator.data.npz import read_npz
from fleetbed.emulator.data.raw import SPLITS, Array, Raw, SplitName, checked
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.experiment import Data


@dataclass(frozen=True)
class Source:
    """Where a data set comes from. `identity` changes whenever what `load` would give may have changed."""

    title: str
    identity: str
    load: Callable[[], Raw]


@dataclass(frozen=True)
class Known:
    """A set that has a name. `files` are those that torchvision looks for below the root; none: shipped."""

    name: str
    title: str
    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int
    torchvision: str = ""
    files: tuple[str, ...] = ()


_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_CIFAR10 = tuple(
    f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
)

KNOWN = {
    known.name: known
    for known in (
        Known(
            "fashion-mini", "a class-balanced part of Fashion-MNIST, shipped", 10_000, 2_000, (1, 28, 28), 10
        ),
        Known(
            "fashion-mnist",
            "Fashion-MNIST",
            60_000,
            10_000,
            (1, 28, 28),
            10,
            "FashionMNIST",
            tuple(f"FashionMNIST/raw/{name}" for name in _IDX),
        ),
        Known(
            "mnist",
            "MNIST",
            60_000,
            10_000,
            (1, 28, 28),
            10,
            "MNIST",
            tuple(f"MNIST/raw/{name}" for name in _IDX),
        ),
        Known("cifar10", "CIFAR-10", 50_000, 10_000, (3, 32, 32), 10, "CIFAR10", _CIFAR10),
        Known(
            "cifar100",
            "CIFAR-100, fine labels",
            50_000,
            10_000,
            (3, 32, 32),
            100,
            "CIFAR100",
            ("cifar-100-python/train", "cifar-100-python/test"),
        ),
        Known(
            "svhn",
            "SVHN, cropped digits",
            73_257,
            26_032,
            (3, 32, 32),
            10,
            "SVHN",
            ("train_32x32.mat", "test_32x32.mat"),
        ),
    )
}


def find(data: Data) -> Source:
    """The source that `data.name` means; a set of torchvision is downloaded here where that is asked for."""
    if data.name.endswith(".npz") or "/" in data.name:
        return _file(Path(data.name).expanduser())
    known = KNOWN.get(data.name)
    if known is None:
        near = difflib.get_close_matches(data.name, KNOWN, n=3, cutoff=0.4)
        raise BadInput(
            f"data.name: there is no data set '{data.name}'"
            + (f", nearest: {', '.join(near)}" if near else "")
            + f"; allowed are {', '.join(KNOWN)}, or the path of an .npz file"
        )
    if known.files:
        return _torchvision(known, data)
    shipped = resources.files("fleetbed.emulator.data") / f"{known.name}.npz"
    with resources.as_file(shipped) as path:
        # by content, so that all checkouts and environments of one user share what is prepared
        return Source(known.name, hashlib.blake2b(path.read_bytes()).hexdigest(), lambda: read_npz(path))


def root_of(data: Data) -> Path:
    """Where the files of torchvision's sets are, or are downloaded to."""
    return Path(data.root).expanduser() if data.root else data_folder() / "torchvision"


def is_here(known: Known, root: Path) -> bool:
    """Whether the set can be used without a download."""
    return all((root / file).is_file() for file in known.files)


def _file(path: Path) -> Source:
    if not path.is_file():
        raise BadInput(f"data.name: there is no file {path}")
    return Source(str(path), _state(path), lambda: read_npz(path))


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _torchvision(known: Known, data: Data) -> Source:
    root = root_of(data)
    if not is_here(known, root):
        if not data.download:
            raise BadInput(
                f"data.name: {known.name} is not in {root} ({_first_missing(known, root)} is missing); "
                f"set data.download=true to download it, or data.root to the folder that has it"
            )
        _download(known, root)
    return Source(
        known.name, "\n".join(_state(root / file) for file in known.files), lambda: _load(known, root)
    )


def _first_missing(known: Known, root: Path) -> str:
    return next(file for file in known.files if not (root / file).is_file())


def _open(known: Known, root: Path, split: SplitName, *, download: bool) -> Any:
    from fleetbed.models.vision import torchvision  # half a second, and needed for these sets only

    maker = getattr(torchvision.datasets, known.torchvision)
    choice = {"split": split} if known.name == "svhn" else {"train": split == "train"}
    return maker(root, download=download, **choice)


def _download(known: Known, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    try:
        for split in SPLITS:
            _open(known, root, split, download=True)
    except (OSError, RuntimeError) as error:  # no network, no space, or a file with another checksum
        raise HostCannot(
            f"{known.name} could not be downloaded to {root}: {error}; "
            f"put its files there by hand, or set data.root to the folder that has them"
        ) from error


def _load(known: Known, root: Path) -> Raw:
    x: dict[SplitName, Array] = {}
    y: dict[SplitName, Array] = {}
    try:
        for split in SPLITS:
            found = _open(known, root, split, download=False)
            x[split] = np.asarray(found.data)
            y[split] = np.asarray(found.labels if known.name == "svhn" else found.targets)
    except (
        OSError,
        EOFError,
        RuntimeError,
        ValueError,
        KeyError,
        AssertionError,
        pickle.UnpicklingError,
    ) as error:
        raise BadInput(
            f"{root}: the files of {known.name} are damaged: {error}; "
            f"delete them and set data.download=true to get them again"
        ) from error
    if known.name == "svhn":
        x = {split: array.transpose(0, 2, 3, 1) for split, array in x.items()}
    return checked(x, y, f"{known.name} in {root}")
