"""Reads a user's own data: one .npz file with x_train, y_train, x_test, y_test; docs/data.md describes the format.

Nothing is ever unpickled. Nothing is unpacked before the archive's directory and each array's header agree on its size,
so that a small file that would unpack to gigabytes of zeros is refused unread.
"""

from __future__ import annotations

import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from fleetbed.emulator.data.raw import PREFIXES, SPLITS, Array, Raw, SplitName, checked, in_one_line
from fleetbed.emulator.machine import host
from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.files import open_regular, show_path

ENDINGS = tuple(f"_{split}" for split in SPLITS)
#: images and texts compress a few times; constant arrays a thousand times, so small ones are always allowed
MOST_PACKED, ALWAYS_BYTES = 100, 64 << 20
#: the peak memory of reading and converting, in sizes of the unpacked file
COPIES = 3

# all errors of numpy, zipfile and the decompressor on a file that is damaged or something else
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    SyntaxError,
    MemoryError,
    OverflowError,
    RecursionError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_npz(path: Path) -> Raw:
    """Read the data set; raise BadInput if the file is damaged or its arrays do not make a data set."""
    arrays = _arrays(path)
    kinds = [kind for kind, prefix in PREFIXES.items() if f"{prefix}_train" in arrays]
    kind = kinds[0] if kinds else "images"
    if len(kinds) > 1:
        both = " and ".join(f"{PREFIXES[each]}_train" for each in kinds[:2])
        raise BadInput(f"{path}: it has both {both}; save the samples in one form.")
    prefix = PREFIXES[kind]
    for split in SPLITS:
        for name in (f"{prefix}_{split}", f"y_{split}"):
            if name not in arrays:
                found = ", ".join(sorted(arrays)) or "nothing"
                raise BadInput(
                    f"{path}: there is no array {name}, only {found}; it needs y_train, y_test, and x_* (images), "
                    f"values_* (other numbers), tokens_* or text_* for both splits."
                )
        is_text = arrays[f"{prefix}_{split}"].dtype.kind == "U"
        if is_text != (kind == "texts"):
            type_ = arrays[f"{prefix}_{split}"].dtype
            raise BadInput(f"{path}: {prefix}_{split} has type {type_}; x_* are images, text_* are unicode texts.")
    x = {split: arrays[f"{prefix}_{split}"] for split in SPLITS}
    y = {split: arrays[f"y_{split}"] for split in SPLITS}
    return checked(x, y, str(path), kind, _columns(arrays))


def _columns(arrays: dict[str, Array]) -> dict[str, dict[SplitName, Array]]:
    """All other arrays whose names end in _train, each with the one for the test split if there is any."""
    samples = {*PREFIXES.values(), "y"}
    names = [name.removesuffix("_train") for name in arrays if name.endswith("_train")]
    return {
        name: {split: arrays[f"{name}_{split}"] for split in SPLITS if f"{name}_{split}" in arrays}
        for name in names
        if name not in samples and arrays[f"{name}_train"].dtype.kind in "iuU"
    }


def check_npz(path: Path) -> None:
    """Raise BadInput unless the archive's directory and the headers make sense; do not read the arrays."""
    with _archive(path):
        pass


def _arrays(path: Path) -> dict[str, Array]:
    with _archive(path) as (archive, members):
        return {name: _read(archive, info) for name, info in members.items()}


@contextmanager
def _archive(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Open and check the archive; turn every error until it is closed into BadInput."""
    with open_regular(path, "an .npz file", "data.name") as file:
        try:
            with warnings.catch_warnings(), zipfile.ZipFile(file) as archive:
                warnings.simplefilter("ignore")  # about old header formats, which it can read
                members = _members(archive, path)
                for name, info in members.items():
                    with archive.open(info) as member:
                        _check_header(member, info, f"{show_path(path)}: {name}")
                yield archive, members
        except _UNREADABLE as error:
            if _is_single_array(path):
                raise BadInput(
                    f"{path} contains a single array; an .npz with x_train, y_train, x_test, y_test is needed."
                ) from error
            raise BadInput(
                f"{path} cannot be read as an .npz file; it is damaged or something else: {in_one_line(error)}."
            ) from error


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the directory entries of the arrays of both splits; refuse entries that are not plausible."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if not name.endswith(ENDINGS):
            continue
        if name in found:
            raise BadInput(f"{show_path(path)}: it contains the array {name} twice; save each array once.")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadInput(
                f"{show_path(path)}: {name} is compressed in a way that numpy does not use; save it with "
                "np.savez or np.savez_compressed."
            )
        found[name] = info
    packed = sum(info.compress_size for info in found.values())
    unpacked = sum(info.file_size for info in found.values())
    if unpacked > max(ALWAYS_BYTES, MOST_PACKED * packed):
        raise BadInput(
            f"{show_path(path)}: {packed >> 10} KiB would unpack to {unpacked >> 20} MiB, more than {MOST_PACKED} "
            "times as much, which no real data set does; save its arrays with np.savez."
        )
    free = host.available_bytes()
    if max(COPIES * unpacked, path.stat().st_size) > free:
        raise HostCannot(
            f"{show_path(path)} has {path.stat().st_size >> 20} MiB and unpacks to {unpacked >> 20} MiB; preparing it "
            f"needs about {COPIES} times as much, but only {free >> 20} MiB of memory are free; "
            "save fewer samples, or uint8 instead of float pixels."
        )
    return found


def _check_header(member: IO[bytes], info: zipfile.ZipInfo, name: str) -> None:
    """Check that header and archive agree on the size: numpy allocates what the header says before it reads on."""
    version = np.lib.format.read_magic(member)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(member)
    if dtype.hasobject:
        raise BadInput(
            f"{name} contains pickled Python objects, which are never loaded because they can run code; "
            f"save plain arrays (uint8 images, integer labels, unicode texts)."
        )
    elements: int = prod(shape)
    promised, there = elements * dtype.itemsize, info.file_size - member.tell()
    if promised != there or (elements and not dtype.itemsize):
        raise BadInput(
            f"{name}: its header says shape {_few(shape)} of {dtype}, which is {promised} bytes, but {there} follow; "
            "the file is damaged, save it again."
        )


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        array: Array = np.lib.format.read_array(member, allow_pickle=False)
        return array


def _is_single_array(path: Path) -> bool:
    with open_regular(path, "an .npz file") as file:
        return file.read(6) == b"\x93NUMPY"


def _few(shape: tuple[Any, ...]) -> str:
    return str(shape) if len(shape) <= 6 else f"of {len(shape)} dimensions"
