"""Who uses this host at the moment: runs share it, whoever measures it has it alone.

A lock in the user's cache, one for a process however often it asks. The kernel drops that of a killed one.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from typing import TextIO

from fleetbed.profiles.folders import cache_folder

_held: list[TextIO] = []  # the open lock, once for each that is within it


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Within this the host does the work of a run: nobody measures it."""
    lock: TextIO
    if not _held:
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            lock = (cache_folder() / "host.lock").open("w")
        except OSError:  # where no lock can be kept no measurement can either, which who measures will say
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_SH)
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
    """Within this no run is at work but that of this process; waits for the others, which it says."""
    with in_use():
        if not _held:
            yield
            return
        lock = _held[0]
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("something has to be measured: waiting until no other run uses this host")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_SH)
