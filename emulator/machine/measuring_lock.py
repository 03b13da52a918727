"""A lock on this host: runs share it, a measurement has it exclusively.

It is a file lock in the user's cache, taken once per process. The kernel drops the lock of a killed process.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from typing import TextIO

from fleetbed.profiles.folders import cache_folder

_held: list[TextIO] = []  # the open lock file, once for each context that is inside it


@contextlib.contextmanager
def in_use(say: Callable[[str], None]) -> Iterator[None]:
    """Use the host for a run: no process measures it meanwhile. Wait, saying so, until none does."""
    lock: TextIO
    if not _held:
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            lock = (cache_folder() / "host.lock").open("w")
        except OSError:  # then a measurement, which reports it, is not possible either
            yield
            return
        _take(lock, fcntl.LOCK_SH, say, "waiting until another process has measured this host")
    else:
        lock = _held[0]
    _held.append(lock)
    try:
        yield
    finally:
        _held.pop()
        if not _held:
            lock.close()


@contextlib.contextmanager
def alone(say: Callable[[str], None]) -> Iterator[None]:
    """Use the host exclusively: wait, saying so, until no other process has a run at work."""
    with in_use(say):
        if not _held:
            yield
            return
        lock = _held[0]
        _take(lock, fcntl.LOCK_EX, say, "something has to be measured: waiting until no other run uses this host")
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_SH)


def _take(lock: TextIO, kind: int, say: Callable[[str], None], why: str) -> None:
    """Take the lock; if that means to wait, say why first."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        say(why)
        fcntl.flock(lock, kind)
