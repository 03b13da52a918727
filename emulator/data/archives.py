"""The data sets that come as one published archive, which is read as it is: CINIC-10 and Sentiment140."""

from __future__ import annotations

import csv
import hashlib
import html
import io
import os
import re
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleetbed.emulator.data.raw import Array, Raw, SplitName, checked, in_one_line
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.files import is_file

CINIC10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TWEETS = "training.1600000.processed.noemoticon.csv"
#: a tweet of that time; longer rows are damaged ones
MOST_LETTERS = 140
#: every so many tweets are for testing: the published test file has 359 with a feeling, too few for parts of it
TEST_EVERY = 10
TIMEOUT_S, PIECE_BYTES = 60, 1 << 20


@dataclass(frozen=True)
class Archive:
    """A data set in one file. `md5` is the published one, where there is one."""

    title: str
    file: str
    url: str
    md5: str | None
    read: Callable[[Path], tuple[dict[SplitName, Array], dict[SplitName, Array]]]
    shape: tuple[int, int, int] | None  # of an image: channels, height, width; None: texts
    classes: int

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def missing(self, root: Path) -> str | None:
        """Return the file if it is missing."""
        return None if is_file(root / self.file, "data.root") else self.file


def download(name: str, root: Path) -> None:
    """Fetch the archive. It gets its name only when it is complete and has the published checksum."""
    known, target = KNOWN[name], root / KNOWN[name].file
    part, hasher = target.with_name(f"{target.name}.{os.getpid()}.part"), hashlib.md5()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(known.url, timeout=TIMEOUT_S) as source, part.open("wb") as file:
            while piece := source.read(PIECE_BYTES):
                hasher.update(piece)
                file.write(piece)
        if known.md5 not in (None, hasher.hexdigest()):
            raise OSError(f"what arrived has the MD5 {hasher.hexdigest()}, the published file {known.md5}")
        part.replace(target)
    except (OSError, ValueError) as error:  # no network, no space, or another file
        raise HostCannot(
            f"{name} could not be downloaded from {known.url} to {root}: {in_one_line(error)}; copy {known.file} "
            f"there by hand, or set data.root to the folder that contains it."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def load(name: str, root: Path) -> Raw:
    known = KNOWN[name]
    damaged = (OSError, EOFError, ValueError, KeyError, csv.Error, tarfile.TarError, zipfile.BadZipFile, zlib.error)
    try:
        x, y = known.read(root / known.file)
    except damaged as error:
        raise BadInput(
            f"{known.file} in {root} is damaged: {in_one_line(error)}; "
            f"delete it and set data.download=true to download it again."
        ) from error
    return checked(x, y, f"{name} in {root}", "images" if known.shape else "texts")


def _read_cinic10(path: Path) -> tuple[dict[SplitName, Array], dict[SplitName, Array]]:
    """Return the images of the folders train and test, in the order of their names; valid is left out."""
    from PIL import Image  # only this set needs it

    names = re.compile(rf"(?:.*/)?(train|test)/({'|'.join(CINIC10_CLASSES)})/[^/]+\.png")
    found: dict[str, list[tuple[str, int, Array]]] = {"train": [], "test": []}
    with tarfile.open(path) as archive:
        for member in archive:
            match = names.fullmatch(member.name)
            content = archive.extractfile(member) if match else None
            if match is None or content is None:
                continue
            with Image.open(io.BytesIO(content.read())) as image:  # a few are grey
                pixels = np.asarray(image.convert("RGB"))
            if pixels.shape != (32, 32, 3):
                raise ValueError(f"{member.name} is not an image of 32x32 pixels")
            found[match[1]].append((member.name, CINIC10_CLASSES.index(match[2]), pixels))
    x: dict[SplitName, Array] = {}
    y: dict[SplitName, Array] = {}
    for split in ("train", "test"):
        rows = sorted(found[split], key=lambda row: row[0])
        if not rows:
            raise ValueError(f"it has no images in {split}/")
        x[split], y[split] = np.stack([row[2] for row in rows]), np.array([row[1] for row in rows])
    return x, y


def _read_sentiment140(path: Path) -> tuple[dict[SplitName, Array], dict[SplitName, Array]]:
    """Return the tweets of the training file, 0 negative and 1 positive; every tenth is for testing."""
    texts: dict[SplitName, list[str]] = {"train": [], "test": []}
    labels: dict[SplitName, list[int]] = {"train": [], "test": []}
    with zipfile.ZipFile(path) as archive, archive.open(TWEETS) as member:
        rows = csv.reader(io.TextIOWrapper(member, "latin-1", newline=""))
        for number, row in enumerate(rows):
            if len(row) != 6 or row[0] not in ("0", "4"):
                raise ValueError(f"line {rows.line_num} of {TWEETS} is not a polarity of 0 or 4 and five more fields")
            split: SplitName = "test" if number % TEST_EVERY == TEST_EVERY - 1 else "train"
            texts[split].append(html.unescape(row[5])[:MOST_LETTERS])
            labels[split].append(int(row[0] == "4"))
    return (
        {split: np.array(those, dtype=f"U{MOST_LETTERS}") for split, those in texts.items()},
        {split: np.array(those, dtype=np.int64) for split, those in labels.items()},
    )


KNOWN = {
    "cinic10": Archive(
        "CINIC-10, 10 classes of photographs",
        "CINIC-10.tar.gz",
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        "6ee4d0c996905fe93221de577967a372",
        _read_cinic10,
        (3, 32, 32),
        10,
    ),
    "sentiment140": Archive(
        "Sentiment140, tweets of positive or negative feeling",
        "trainingandtestdata.zip",
        "https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
        None,
        _read_sentiment140,
        None,
        2,
    ),
}
