"""From the name of a data set to its arrays: the shipped one, those of torchvision, or a user's .npz."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetbed.emulator.data import torchvision_sets
from fleetbed.emulator.data.npz import read_npz
from fleetbed.emulator.data.raw import Raw
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Data
from fleetbed.profiles.folders import data_folder

SHIPPED = "fashion-mini"
SHIPPED_TITLE = "a part of Fashion-MNIST with equal classes, 10 classes of clothes"
SHIPPED_FILE = Path(__file__).with_name("fashion-mini.npz")


@dataclass(frozen=True)
class Source:
    """Where a data set comes from. `identity` changes whenever what `load` would give may have changed."""

    title: str
    identity: str
    load: Callable[[], Raw]


def find(data: Data) -> Source:
    """The source that `data.name` means; a set of torchvision is downloaded here where that is asked for."""
    if data.name.endswith(".npz") or "/" in data.name:
        return _file(Path(data.name).expanduser())
    if data.name == SHIPPED:
        # by content, so that all checkouts and environments of one user share what is prepared
        identity = hashlib.blake2b(SHIPPED_FILE.read_bytes()).hexdigest()
        return Source(SHIPPED, identity, lambda: read_npz(SHIPPED_FILE))
    if data.name in torchvision_sets.KNOWN:
        return _torchvision(data)
    known = (SHIPPED, *torchvision_sets.KNOWN)
    raise nearest(data.name, known, "data set", "data.name (a known set or the path of an .npz file)")


def root_of(data: Data) -> Path:
    """Where the files of torchvision's sets are, or are downloaded to."""
    return Path(data.root).expanduser() if data.root else data_folder() / "torchvision"


def _file(path: Path) -> Source:
    if not path.is_file():
        raise BadInput(f"data.name: there is no file {path}; give the path of an .npz file.")
    return Source(str(path), _state(path), lambda: read_npz(path))


def _torchvision(data: Data) -> Source:
    name, root = data.name, root_of(data)
    known = torchvision_sets.KNOWN[name]
    missing = known.missing(root)
    if missing and not data.download:
        raise BadInput(
            f"data.name: {name} is not in {root} ({missing} is missing); "
            f"set data.download=true to download it, or data.root to the folder that has it."
        )
    if missing:
        torchvision_sets.download(name, root)
    identity = "\n".join(_state(root / file) for file in known.files)
    return Source(name, identity, lambda: torchvision_sets.load(name, root))


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
