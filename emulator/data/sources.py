"""Finds the arrays of a data set by its name: a shipped one, those that are downloaded, or a user's .npz or file."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fleetbed.emulator.data import archives, torchvision_sets
from fleetbed.emulator.data.npz import check_npz, read_npz
from fleetbed.emulator.data.own import GROUP, read_plug_in
from fleetbed.emulator.data.raw import Raw
from fleetbed.models.plug_ins import find_plug_in, outside
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Data
from fleetbed.profiles.files import open_regular, reason, show_path, user_path
from fleetbed.profiles.folders import data_folder

#: the data sets in this folder, with their titles
SHIPPED = {
    "fashion-mini": "a part of Fashion-MNIST, 10 classes of clothes of equal size",
    "sensors": "synthetic vibrations of machines: 3 axes, 5 states, 20 machines",
}
#: the sets that are not shipped, by name
DOWNLOADED: dict[str, torchvision_sets.Known | archives.Archive] = {**torchvision_sets.KNOWN, **archives.KNOWN}
_PIECE_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Source:
    """Where a data set comes from. `identity` is a digest of the files' content, independent of their location."""

    title: str
    identity: str
    load: Callable[[], Raw]


def find_source(data: Data) -> Source:
    """Return the source that `data.name` refers to; download one that is not here if `data.download` is true."""
    if data.name in SHIPPED:
        file = Path(__file__).with_name(f"{data.name}.npz")
        return Source(data.name, digest(file), lambda: read_npz(file))
    if data.name in DOWNLOADED:
        return _downloaded(data)
    if (found := find_plug_in(GROUP, data.name, "data.name")) is not None:
        raw, content = read_plug_in(found)
        return Source(data.name, content, lambda: raw)
    if data.name.endswith(".npz") or "/" in data.name:
        path = user_path(data.name, "data.name")
        check_npz(path)  # first, so that a file that is something else is not hashed, however large it is
        return Source(str(path), digest(path, "an .npz file"), lambda: read_npz(path))
    known = (*SHIPPED, *DOWNLOADED, *outside(GROUP))
    raise nearest(data.name, known, "data set", "data.name (a known set or the path of an .npz or .py file)")


def root_of(data: Data) -> Path:
    """Return the folder that the named sets are in, or are downloaded to."""
    return user_path(data.root, "data.root") if data.root else data_folder() / "torchvision"


def _downloaded(data: Data) -> Source:
    name, root = data.name, root_of(data)
    known, kind = DOWNLOADED[name], archives if name in archives.KNOWN else torchvision_sets
    missing = known.missing(root)
    if missing and not data.download:
        raise BadInput(
            f"data.name: {name} is not in {root} ({missing} is missing); "
            f"set data.download=true to download it, or data.root to the folder that contains it."
        )
    if missing:
        kind.download(name, root)
    identity = "\n".join(digest(root / file) for file in known.files)
    return Source(name, identity, lambda: kind.load(name, root))


def digest(path: Path, wanted: str = "a data file") -> str:
    """Return a hash of the file's content, because a replaced file may have the same size and time."""
    with open_regular(path, wanted, "data.name") as file:
        try:
            state = os.fstat(file.fileno())
            return _hashed(file, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
        except OSError as error:
            raise BadInput(f"data.name: {show_path(path)} cannot be read: {reason(error)}.") from error


_known: dict[tuple[int, ...], str] = {}


def _hashed(file: BinaryIO, state: tuple[int, ...]) -> str:
    """Hash each state of a file once per process: the kernel sets its change time, which no user can set back.

    The change time is coarse: a file that has just changed may change again with the same time, and is not remembered.
    """
    if state in _known:
        return _known[state]
    hasher = hashlib.blake2b()
    while piece := file.read(_PIECE_BYTES):
        hasher.update(piece)
    if time.time_ns() - state[-1] > _SETTLED_NS:
        _known[state] = hasher.hexdigest()
    return hasher.hexdigest()
