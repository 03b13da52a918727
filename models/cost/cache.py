"""Disk cache of expensive results in the user's cache folder, invalidated when the code changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec

from fleetbed.profiles.folders import cache_folder

T = TypeVar("T")


def cached(about: object, type_: type[T], compute: Callable[[], T]) -> T:
    """Return the cached result for `about`, or compute and store it.

    `about` must contain everything that the result depends on, apart from the code of this package and torch.
    """
    key = hashlib.blake2b(msgspec.json.encode([_code(), about]), digest_size=16).hexdigest()
    path = cache_folder() / "costs" / f"{key}.json"
    with suppress(OSError, msgspec.DecodeError):  # missing or damaged: compute and write it again
        return msgspec.json.decode(path.read_bytes(), type=type_)
    made = compute()
    with suppress(OSError):  # a cache that cannot be written only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        part.write_bytes(msgspec.json.encode(made))
        part.replace(path)
    return made


@cache
def _code() -> str:
    """Return a digest of the code of this package, because results of other code may differ."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}, torch {version('torch')}"
