"""Bundles on disk: safetensors with the scalars as JSON and a checksum; never pickle, never half-written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetbed.emulator.bundle import Bundle
from fleetbed.profiles.errors import FleetbedError


class Damaged(FleetbedError):
    """A file that is not what was written."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the place and move it there, so that a reader finds the old file or the new one, never a part."""
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
    tensors = _apart(bundle.tensors)
    values = json.dumps(bundle.values, sort_keys=True)
    about = {"values": values, "crc32": str(_checksum(values, tensors))}

    def write(part: Path) -> None:
        try:
            safetensors.torch.save_file(tensors, part, metadata=about)
        except SafetensorError as error:  # its text is all that it keeps of the system's error
            full = f"os error {errno.ENOSPC}" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error

    write_atomically(path, write)


def load_bundle(path: Path) -> Bundle:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError as error:
        raise Damaged(f"{path}: the file is missing") from error
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path}: not a whole safetensors file ({error})") from error
    if about.get("crc32") != str(_checksum(about.get("values", ""), tensors)):
        raise Damaged(f"{path}: the checksum does not match, the file was changed or cut")
    return Bundle(tensors, json.loads(about["values"]))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These, copied where memory is shared, which safetensors refuses; a bundle may hold views of one message."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        memory = own.untyped_storage()
        if memory.nbytes() != own.nbytes or memory.data_ptr() in seen:
            own = own.clone()
        seen.add(memory.data_ptr())
        found[name] = own
    return found


def _checksum(values: str, tensors: Mapping[str, Tensor]) -> int:
    total = zlib.crc32(values.encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        if tensors[name].numel():
            total = zlib.crc32(tensors[name].reshape(-1).numpy().data.cast("B"), total)
    return total
