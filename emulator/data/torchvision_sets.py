"""The data sets that torchvision reads and downloads: their files and their arrays."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleetbed.emulator.data.raw import SPLITS, Array, Raw, SplitName, checked, in_one_line
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.files import is_file


@dataclass(frozen=True)
class Known:
    """A set of torchvision: the class that reads it, and the files that the class expects below its root."""

    reader: str
    title: str
    files: tuple[str, ...]
    shape: tuple[int, int, int]  # of an image: channels, height, width
    classes: int = 10

    def missing(self, root: Path) -> str | None:
        """Return the first missing file, if any."""
        return next((file for file in self.files if not is_file(root / file, "data.root")), None)


def _idx_files(folder: str) -> tuple[str, ...]:
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}/raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in kinds)


_CIFAR10_FILES = tuple(
    f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
)

KNOWN = {
    "fashion-mnist": Known(
        "FashionMNIST", "Fashion-MNIST, 10 classes of clothes", _idx_files("FashionMNIST"), (1, 28, 28)
    ),
    "mnist": Known("MNIST", "MNIST, handwritten digits", _idx_files("MNIST"), (1, 28, 28)),
    "cifar10": Known("CIFAR10", "CIFAR-10, 10 classes of photographs", _CIFAR10_FILES, (3, 32, 32)),
    "cifar100": Known(
        "CIFAR100",
        "CIFAR-100, 100 classes of photographs",
        ("cifar-100-python/train", "cifar-100-python/test"),
        (3, 32, 32),
        100,
    ),
    "svhn": Known("SVHN", "SVHN, digits of house numbers", ("train_32x32.mat", "test_32x32.mat"), (3, 32, 32)),
}


def download(name: str, root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            _open(name, root, split, download=True)
    except (OSError, RuntimeError) as error:  # no network, no space, or a file with another checksum
        raise HostCannot(
            f"{name} could not be downloaded to {root}: {in_one_line(error)}; "
            f"copy its files there by hand, or set data.root to the folder that contains them."
        ) from error


def load(name: str, root: Path) -> Raw:
    x: dict[SplitName, Array] = {}
    y: dict[SplitName, Array] = {}
    damaged = (OSError, EOFError, RuntimeError, ValueError, KeyError, AssertionError, pickle.UnpicklingError)
    try:
        for split in SPLITS:
            found = _open(name, root, split, download=False)
            x[split] = np.asarray(found.data)
            y[split] = np.asarray(found.labels if name == "svhn" else found.targets)
    except damaged as error:
        raise BadInput(
            f"the files of {name} in {root} are damaged: {in_one_line(error)}; "
            f"delete them and set data.download=true to download them again."
        ) from error
    if name == "svhn":
        x = {split: array.transpose(0, 2, 3, 1) for split, array in x.items()}
    return checked(x, y, f"{name} in {root}")


def _open(name: str, root: Path, split: SplitName, *, download: bool) -> Any:
    from fleetbed.models.families.vision import torchvision  # slow to import, and only these sets need it

    reader = getattr(torchvision.datasets, KNOWN[name].reader)
    choice = {"split": split} if name == "svhn" else {"train": split == "train"}
    return reader(root, download=download, **choice)
