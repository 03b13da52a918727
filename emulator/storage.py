"""Bundles on disk: safetensors with the scalars as JSON and a checksum; never pickle, never half-written."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fleetbed.emulator.bundle import Bundle, unsupported
from fleetbed.profiles.errors import FleetbedError

#: as safetensors calls them
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
PAGE_BYTES = 4096


class Damaged(FleetbedError):
    """A file that is not what was written."""


def write_atomically(path: Path, write: Callable[[Path], object], over: Path | None = None) -> None:
    """Write beside the place and move it there, so that a reader finds the old file or the new one, never a part.

    `over` is a file that nobody needs any more, nor what was read from it, which may still lie in it: its room on the
    disk and in memory is the new one's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if over is not None and over.exists():
            os.replace(over, part)
        write(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise


def save_bundle(path: Path, bundle: Bundle, over: Path | None = None) -> None:
    for name, tensor in bundle.tensors.items():
        if tensor.dtype not in DTYPES:
            raise unsupported(name, tensor, DTYPES)
    arrays = {name: tensor.numpy(force=True) for name, tensor in bundle.tensors.items()}
    buffers = {name: _memory(array) for name, array in arrays.items()}
    values = json.dumps(bundle.values, sort_keys=True)
    about: dict[str, object] = {"__metadata__": {"values": values, "checksum": _checksum(values, buffers)}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        dtype = DTYPES[bundle.tensors[name].dtype]
        about[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (start, end)}
    header = json.dumps(about).encode()
    header += b" " * (-len(header) % HEADER_MULTIPLE)
    content: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header, *buffers.values()]
    write_atomically(path, lambda part: _write(part, content), over)


def _write(path: Path, content: list[bytes | memoryview]) -> None:
    """Without `O_TRUNC`: what the file had before is written over where it lies."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        for piece in content:
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]
        file.truncate()


def load_bundle(path: Path) -> Bundle:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError as error:
        raise Damaged(f"{path}: the file is missing") from error
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path}: not a whole safetensors file ({error})") from error
    values = about.get("values", "")
    if about.get("checksum") != _checksum(values, {name: _memory(tensor.numpy()) for name, tensor in tensors.items()}):
        raise Damaged(f"{path}: the checksum does not match, the file was changed or cut")
    return Bundle(tensors, json.loads(values))


def _memory(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _checksum(values: str, buffers: Mapping[str, memoryview]) -> str:
    """A CRC over the sums of pages: any change within a page changes its sum, and to sum up is ten times quicker."""
    total = zlib.crc32(values.encode())
    for name in sorted(buffers):
        total = zlib.crc32(name.encode(), total)
        whole = len(buffers[name]) // PAGE_BYTES * PAGE_BYTES
        words = np.frombuffer(buffers[name][:whole], np.uint64).reshape(-1, PAGE_BYTES // 8)
        total = zlib.crc32(words.sum(axis=1).data, total)
        total = zlib.crc32(buffers[name][whole:], total)
    return str(total)
