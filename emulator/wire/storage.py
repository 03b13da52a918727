"""Bundles on disk: safetensors with the scalars as JSON and a checksum; never pickle, never half-written.

The kernel charges the page cache of a file to the memory group of the process that reads or writes it first, although
those pages can be dropped at any time, and the memory that a device has available includes them. So what a client keeps
goes past the cache (`cached=False`), and a client that reads it copies it into memory of its own, which counts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetbed.emulator.method.bundle import Bundle, unsupported
from fleetbed.profiles.errors import FleetbedError

#: the names of the types in safetensors
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
HEADER_MULTIPLE = 8
#: direct writes go in blocks of this size; smaller files are written as usual, their cache is negligible
DIRECT_BYTES = 1 << 20
#: the size of a direct write must be a multiple of the disk's sector
SECTOR_BYTES = 4096
#: the largest file, other than a bundle, that is read: a study or the partition of a large fleet is far smaller
MOST_BYTES = 1 << 30
Pieces = list[bytes | memoryview]
_PART = re.compile(r"\.(.+)\.\d+\.part")


class Damaged(FleetbedError):
    """A file that differs from what was written."""


def check_run_file(path: Path) -> None:
    """Refuse anything but a regular file: opening a pipe would block, a link leads out of the folder."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError as error:
        raise Damaged(f"{path}: the file is missing") from error
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        raise Damaged(f"{path}: not a regular file")


def read_run_file(path: Path) -> bytes:
    """Read a file that may have been replaced by anything."""
    check_run_file(path)
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise Damaged(f"{path}: too large ({size} bytes, at most {MOST_BYTES} are read)")
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from error


def part_of(path: Path) -> str | None:
    """The name of the file that a half-written one was to become, else None; see `write_atomically`."""
    match = _PART.fullmatch(path.name)
    return None if match is None else match[1]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a file beside it and rename that, so that a reader finds the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise


def save_bundle(path: Path, bundle: Bundle, *, cached: bool = True) -> None:
    for name, tensor in bundle.tensors.items():
        if tensor.dtype not in DTYPES:
            raise unsupported(name, tensor, DTYPES)
    buffers = {name: _memory(tensor) for name, tensor in bundle.tensors.items()}
    values = json.dumps(bundle.values, sort_keys=True)
    about: dict[str, object] = {"__metadata__": {"values": values, "crc32": _crc32(values, bundle.tensors, buffers)}}
    end = 0
    for name, tensor in bundle.tensors.items():
        start, end = end, end + len(buffers[name])
        about[name] = {"dtype": DTYPES[tensor.dtype], "shape": tuple(tensor.shape), "data_offsets": (start, end)}
    header = json.dumps(about).encode()
    header += b" " * (-len(header) % HEADER_MULTIPLE)
    content: Pieces = [len(header).to_bytes(8, "little"), header, *buffers.values()]
    write = _write if cached or end < DIRECT_BYTES else _write_directly
    write_atomically(path, lambda part: write(part, content))


def _write_directly(path: Path, content: Pieces) -> None:
    """Write past the page cache, where the file system can; a file system in memory cannot."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
        with open(fd, "wb", buffering=0) as file:
            block = memoryview(mmap.mmap(-1, DIRECT_BYTES))  # aligned, as it has to be
            filled = size = 0
            for piece in content:
                left = memoryview(piece)
                while left:
                    taken = min(len(left), DIRECT_BYTES - filled)
                    block[filled : filled + taken] = left[:taken]
                    left, filled, size = left[taken:], filled + taken, size + taken
                    if filled == DIRECT_BYTES:
                        _put(file, block)
                        filled = 0
            _put(file, block[: -(-filled // SECTOR_BYTES) * SECTOR_BYTES])
            file.truncate(size)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _write(path, content)


def _write(path: Path, content: Pieces) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in content:
            _put(file, memoryview(piece))


def _put(file: FileIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def load_bundle(path: Path, *, cached: bool = True) -> Bundle:
    check_run_file(path)
    try:
        about, tensors = _mapped(path) if cached else _read_past_cache(path)
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
    ) as error:  # torch's are RuntimeError
        raise Damaged(f"{path}: not a whole safetensors file ({error})") from error
    if "crc32" not in about and "checksum" in about:
        raise Damaged(f"{path}: written by an earlier version of fleetbed, whose checksum did not detect all damage")
    values = about.get("values", "")
    buffers = {name: _memory(tensor) for name, tensor in tensors.items()}
    if about.get("crc32") != _crc32(values, tensors, buffers):
        raise Damaged(f"{path}: the checksum does not match, the file was changed or cut")
    return Bundle(tensors, json.loads(values))


def _mapped(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _read_past_cache(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a file into memory of its own. Its pages leave the cache block by block, so that they never add up."""
    with path.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > total:
            raise ValueError("it ends within its header")
        header: dict[str, dict[str, Any]] = dict(json.loads(file.read(header_size)))
        about = dict(header.pop("__metadata__"))
        tensors = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= total - 8 - header_size:
                raise ValueError(f"tensor {name!r} lies outside of it")
            block = np.empty(end - start, np.uint8)
            file.seek(8 + header_size + start)
            for at in range(0, end - start, DIRECT_BYTES):
                piece = block.data[at : at + DIRECT_BYTES]
                if file.readinto(piece) != len(piece):
                    raise ValueError(f"it ends within tensor {name!r}")
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            tensors[name] = torch.from_numpy(block).view(BY_NAME[entry["dtype"]]).reshape(entry["shape"])
        return about, tensors


def _memory(tensor: Tensor) -> memoryview:
    return np.ascontiguousarray(tensor.numpy(force=True)).reshape(-1).view(np.uint8).data


def _crc32(values: str, tensors: Mapping[str, Tensor], buffers: Mapping[str, memoryview]) -> str:
    """A CRC over a whole bundle: its values, and the name, type, shape and bytes of every tensor."""
    total = zlib.crc32(values.encode())
    for name in sorted(tensors):
        about = json.dumps([name, str(tensors[name].dtype), list(tensors[name].shape)])
        total = zlib.crc32(buffers[name], zlib.crc32(about.encode(), total))
    return str(total)
