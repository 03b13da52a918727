"""Bundles on disk: safetensors with the scalars as JSON and a checksum; never pickle, never half-written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

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
HEADER_MULTIPLE = 8
#: the largest file, other than a bundle, that is read: a study or the partition of a large fleet is far smaller
MOST_BYTES = 1 << 30
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


def save_bundle(path: Path, bundle: Bundle) -> None:
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
    content: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header, *buffers.values()]
    write_atomically(path, lambda part: _write(part, content))


def _write(path: Path, content: list[bytes | memoryview]) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in content:
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]


def load_bundle(path: Path) -> Bundle:
    check_run_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path}: not a whole safetensors file ({error})") from error
    if "crc32" not in about and "checksum" in about:
        raise Damaged(f"{path}: written by an earlier version of fleetbed, whose checksum did not detect all damage")
    values = about.get("values", "")
    buffers = {name: _memory(tensor) for name, tensor in tensors.items()}
    if about.get("crc32") != _crc32(values, tensors, buffers):
        raise Damaged(f"{path}: the checksum does not match, the file was changed or cut")
    return Bundle(tensors, json.loads(values))


def _memory(tensor: Tensor) -> memoryview:
    return np.ascontiguousarray(tensor.numpy(force=True)).reshape(-1).view(np.uint8).data


def _crc32(values: str, tensors: Mapping[str, Tensor], buffers: Mapping[str, memoryview]) -> str:
    """A CRC over a whole bundle: its values, and the name, type, shape and bytes of every tensor."""
    total = zlib.crc32(values.encode())
    for name in sorted(tensors):
        about = json.dumps([name, str(tensors[name].dtype), list(tensors[name].shape)])
        total = zlib.crc32(buffers[name], zlib.crc32(about.encode(), total))
    return str(total)
