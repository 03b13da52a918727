"""What is dear to compute, kept in the user's cache for as long as the code that computed it stands."""

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


def kept(about: object, type_: type[T], compute: Callable[[], T]) -> T:
    """What is kept of `type_` under `about`, which is all that the result depends on beside our code and torch."""
    key = hashlib.blake2b(msgspec.json.encode([_code(), about]), digest_size=16).hexdigest()
    path = cache_folder() / "costs" / f"{key}.json"
    with suppress(OSError, msgspec.DecodeError):  # not there, or spoilt: it is computed and written anew
        return msgspec.json.decode(path.read_bytes(), type=type_)
    made = compute()
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        part.write_bytes(msgspec.json.encode(made))
        part.replace(path)
    return made


@cache
def _code() -> str:
    """Changes with every line of this package: what other code computed is not believed."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}, torch {version('torch')}"
