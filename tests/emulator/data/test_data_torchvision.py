"""The sets of torchvision, read by torchvision itself from small files of their real formats."""

from __future__ import annotations

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetbed.emulator.data import open_dataset, prepare_dataset
from fleetbed.emulator.data.torchvision_sets import KNOWN
from fleetbed.models.families.vision import torchvision
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.experiment import Data

torch.set_num_threads(1)

RNG = np.random.default_rng(3)
GREY = {"train": RNG.integers(0, 256, (30, 28, 28), np.uint8), "t10k": RNG.integers(0, 256, (10, 28, 28), np.uint8)}


def write_idx(root: Path, folder: str) -> None:
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for part, images in GREY.items():
        count = len(images)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def write_pickle(path: Path, content: Any) -> list[str]:
    """The file's name and checksum, as torchvision lists them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return [path.name, hashlib.md5(path.read_bytes()).hexdigest()]


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files(tmp_path: Path, name: str, folder: str) -> None:
    write_idx(tmp_path, folder)
    dataset = open_dataset(prepare_dataset(Data(name=name, root=str(tmp_path), normalise=False)))
    assert dataset.spec.shape == (1, 28, 28)
    assert dataset.spec.classes == 10
    x, y = dataset.batch("test", np.arange(10))
    np.testing.assert_allclose(x[:, 0].numpy() * 255, GREY["t10k"], atol=1e-3)
    assert y.tolist() == list(range(10))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    reader = getattr(torchvision.datasets, KNOWN[name].reader)
    folder = tmp_path / reader.base_folder
    classes, key = (10, "labels") if name == "cifar10" else (100, "fine_labels")
    train_files = [Path(file).name for file in KNOWN[name].files[:-1]]
    rows = RNG.integers(0, 256, (100, 3 * 32 * 32), np.uint8)

    def content(of_classes: int) -> dict[str, Any]:
        return {"data": rows[:of_classes], key: [c % classes for c in range(of_classes)]}

    lists = [write_pickle(folder / file, content(classes)) for file in train_files]
    monkeypatch.setattr(reader, "train_list", lists)
    monkeypatch.setattr(
        reader, "test_list", [write_pickle(folder / Path(KNOWN[name].files[-1]).name, content(classes))]
    )
    names = write_pickle(folder / reader.meta["filename"], {reader.meta["key"]: [str(c) for c in range(classes)]})
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": names[1]})

    dataset = open_dataset(prepare_dataset(Data(name=name, root=str(tmp_path), normalise=False)))
    assert dataset.spec.shape == (3, 32, 32)
    assert dataset.spec.classes == classes
    assert len(dataset.y_train) == classes * len(train_files)
    x, _ = dataset.batch("train", np.array([5]))
    np.testing.assert_allclose(x[0].numpy() * 255, rows[5].reshape(3, 32, 32), atol=1e-3)


def test_svhn_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat

    reader = torchvision.datasets.SVHN
    images = RNG.integers(0, 256, (32, 32, 3, 20), np.uint8)
    lists = {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        savemat(path, {"X": images, "y": (np.arange(20) % 10 + 1).reshape(-1, 1)})  # 10 stands for the digit 0
        lists[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(reader, "split_list", lists)
    dataset = open_dataset(prepare_dataset(Data(name="svhn", root=str(tmp_path), normalise=False)))
    assert dataset.spec.shape == (3, 32, 32)
    x, y = dataset.batch("train", np.array([9, 0]))
    assert y.tolist() == [0, 1]
    np.testing.assert_allclose(x[0].numpy() * 255, images[:, :, :, 9].transpose(2, 0, 1), atol=1e-3)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_missing_set_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} is not in .*share.*missing.*set data.download=true"):
        prepare_dataset(Data(name=name))
    with pytest.raises(BadInput, match=f"{name} is not in {tmp_path}/else"):
        prepare_dataset(Data(name=name, root=str(tmp_path / "else")))


def test_download_asks_torchvision_for_both_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(self: Any) -> None:
        asked.append(self.train)
        if not (tmp_path / "MNIST").exists():
            write_idx(tmp_path, "MNIST")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", download)
    dataset = open_dataset(prepare_dataset(Data(name="mnist", root=str(tmp_path), download=True)))
    assert len(dataset.y_train) == 30
    assert asked == [True, False]
    prepare_dataset(Data(name="mnist", root=str(tmp_path), download=True))
    assert asked == [True, False]  # what is here is not asked for again


def test_a_failed_download_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(self: Any) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(torchvision.datasets.SVHN, "download", offline)
    with pytest.raises(HostCannot, match=r"could not be downloaded to .*: no route to host; copy its files there"):
        prepare_dataset(Data(name="svhn", root=str(tmp_path), download=True))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, "MNIST")
    labels = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-5])
    with pytest.raises(BadInput, match=r"the files of mnist in .* are damaged.*data.download=true"):
        prepare_dataset(Data(name="mnist", root=str(tmp_path)))
    for file in KNOWN["cifar10"].files:
        write_pickle(tmp_path / file, {})
    with pytest.raises(BadInput, match=r"the files of cifar10 in .* are damaged"):  # another checksum
        prepare_dataset(Data(name="cifar10", root=str(tmp_path)))
