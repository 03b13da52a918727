"""CINIC-10 and Sentiment140, read from small archives in the layout in which they are published."""

from __future__ import annotations

import csv
import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fleetbed.emulator.data import archives, open_dataset, prepare_dataset
from fleetbed.emulator.data.archives import CINIC10_CLASSES, KNOWN, TWEETS
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.experiment import Data

torch.set_num_threads(1)
RNG = np.random.default_rng(5)


def write_cinic10(
    root: Path, size: int = 32, splits: tuple[str, ...] = ("train", "valid", "test")
) -> dict[str, np.ndarray]:
    """Two images of each class in each split, one of all of them grey; returns the images by name."""
    images = {}
    with tarfile.open(root / KNOWN["cinic10"].file, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("./README.md"))
        for split in splits:
            for number, name in enumerate(reversed(CINIC10_CLASSES)):  # a tar has no order of its own
                for index in range(2):
                    grey = split == "train" and number == index == 0
                    pixels = RNG.integers(0, 256, (size, size) if grey else (size, size, 3), np.uint8)
                    file = io.BytesIO()
                    Image.fromarray(pixels).save(file, "png")
                    member = tarfile.TarInfo(f"./{split}/{name}/cifar10-{split}-{index}.png")
                    member.size = file.tell()
                    file.seek(0)
                    archive.addfile(member, file)
                    images[member.name] = np.stack([pixels] * 3, -1) if grey else pixels
    return images


def write_sentiment140(root: Path, rows: list[list[str]] | None = None) -> None:
    if rows is None:
        rows = [
            ["0" if i < 20 else "4", str(i), "Mon Apr 06", "NO_QUERY", "user", f'word{i % 5}, &amp; "caf\u00e9" {i}']
            for i in range(40)
        ]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    with zipfile.ZipFile(root / KNOWN["sentiment140"].file, "w") as archive:
        archive.writestr("testdata.manual.2009.06.14.csv", '"2","3","Mon","q","u","neutral"\n')
        archive.writestr(TWEETS, text.getvalue().encode("latin-1"))


def test_cinic10(tmp_path: Path) -> None:
    images = write_cinic10(tmp_path)
    dataset = open_dataset(prepare_dataset(Data(name="cinic10", root=str(tmp_path), normalise=False)))
    assert (dataset.spec.shape, dataset.spec.classes) == ((3, 32, 32), 10)
    assert len(dataset.y_train) == len(dataset.y_test) == 20
    x, y = dataset.batch("test", np.arange(20))
    assert y.tolist() == [c for c in range(10) for _ in range(2)]
    wanted = images["./test/cat/cifar10-test-1.png"].transpose(2, 0, 1)
    np.testing.assert_allclose(x[7].numpy() * 255, wanted, atol=1e-3)
    grey = dataset.batch("train", np.array([18]))[0][0]
    assert torch.equal(grey[0], grey[2])


def test_sentiment140(tmp_path: Path) -> None:
    write_sentiment140(tmp_path)
    dataset = open_dataset(prepare_dataset(Data(name="sentiment140", root=str(tmp_path), tokens=4, vocabulary=50)))
    assert (dataset.spec.shape, dataset.spec.classes) == ((4,), 2)
    assert (len(dataset.y_train), len(dataset.y_test)) == (36, 4)
    assert dataset.y_test.tolist() == [0, 0, 1, 1]  # rows 9, 19, 29 and 39
    x, y = dataset.batch("train", np.array([0, 35]))
    assert y.tolist() == [0, 1]
    assert x[0, 1] == x[1, 1]  # both say caf\u00e9, and the entity is not a word
    assert (x[:, 3] == 0).all()


def test_long_tweets_are_cut(tmp_path: Path) -> None:
    rows = [[label, "1", "d", "q", "u", "x" * 400] for label in ("0", "4") for _ in range(10)]
    write_sentiment140(tmp_path, rows)
    raw = archives.load("sentiment140", tmp_path)
    assert {len(text) for text in raw.x["train"]} == {140}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_missing_archive_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        BadInput, match=rf"{name} is not in {tmp_path} \({KNOWN[name].file} is missing\); set data.down"
    ):
        prepare_dataset(Data(name=name, root=str(tmp_path)))


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    write_cinic10(tmp_path)
    file = tmp_path / KNOWN["cinic10"].file
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(
        BadInput, match=r"CINIC-10\.tar\.gz in .* is damaged: .*; delete it and set data\.download=true"
    ):
        prepare_dataset(Data(name="cinic10", root=str(tmp_path)))
    write_cinic10(tmp_path, size=16)
    with pytest.raises(BadInput, match="not an image of 32x32"):
        prepare_dataset(Data(name="cinic10", root=str(tmp_path)))
    write_cinic10(tmp_path, splits=("train", "valid"))
    with pytest.raises(BadInput, match="no images in test/"):
        prepare_dataset(Data(name="cinic10", root=str(tmp_path)))
    write_sentiment140(tmp_path, [["0", "1", "d", "q", "u", "fine"], ["3", "1", "d", "q", "u", "what"]])
    with pytest.raises(BadInput, match=rf"line 2 of {TWEETS} is not a polarity"):
        prepare_dataset(Data(name="sentiment140", root=str(tmp_path)))
    (tmp_path / KNOWN["sentiment140"].file).write_bytes(b"something else")
    with pytest.raises(BadInput, match=r"trainingandtestdata\.zip in .* is damaged"):
        prepare_dataset(Data(name="sentiment140", root=str(tmp_path)))


def test_a_download_is_checked_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file:// address, which the same code fetches."""
    source, root = tmp_path / "published", tmp_path / "here"
    source.mkdir()
    write_cinic10(source)
    file = source / KNOWN["cinic10"].file
    right = hashlib.md5(file.read_bytes()).hexdigest()
    known = replace(KNOWN["cinic10"], url=file.as_uri())
    monkeypatch.setitem(KNOWN, "cinic10", replace(known, md5="0" * 32))
    with pytest.raises(HostCannot, match=f"has the MD5 {right}, the published file 0000.*copy CINIC-10.tar.gz there"):
        archives.download("cinic10", root)
    assert list(root.iterdir()) == []
    monkeypatch.setitem(KNOWN, "cinic10", replace(known, md5=right))
    archives.download("cinic10", root)
    assert [path.name for path in root.iterdir()] == ["CINIC-10.tar.gz"]
    monkeypatch.setitem(KNOWN, "cinic10", replace(known, url=(source / "nothing").as_uri()))
    with pytest.raises(HostCannot, match=r"cinic10 could not be downloaded from file:.*nothing.*set data\.root"):
        archives.download("cinic10", root)
    assert [path.name for path in root.iterdir()] == ["CINIC-10.tar.gz"]  # what was there stays
    dataset = open_dataset(prepare_dataset(Data(name="cinic10", root=str(root), download=True)))
    assert len(dataset.y_train) == 20
