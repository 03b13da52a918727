"""Cgroup trees: our own place in them, and how folders in them are made, filled and removed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from fleetbed.emulator.limits.owner import PROC
from fleetbed.profiles.errors import FleetbedError

CONTROLLERS = frozenset({"cpu", "memory"})
REMOVE_TRIES = 200
REMOVE_PAUSE_S = 0.01


class Place(Struct, frozen=True):
    """Our own place in one mounted hierarchy."""

    version: int
    controllers: frozenset[str]  # of the hierarchy (v1), or of our own group (v2)
    mount: Path
    own: Path


def places(proc: Path = PROC) -> list[Place]:
    """Find our own group in each mounted hierarchy, as far as it is visible."""
    groups = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        groups[frozenset(filter(None, names.split(",")))] = path
    found = []
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        mounted = frozenset() if kind == "cgroup2" else frozenset(options.split(","))
        group = next((g for g in groups if g <= mounted and bool(g) == bool(mounted)), None)
        if group is None:
            continue
        root, mount = fields[3], Path(fields[4])
        inside = os.path.relpath(groups[group], root)
        if inside.startswith(".."):  # a container that sees the mount but not its own group in it
            continue
        own = mount / inside
        if kind == "cgroup2":
            found.append(Place(2, frozenset(read_words(own / "cgroup.controllers")), mount, own))
        else:
            found.append(Place(1, group, mount, own))
    return found


def write(path: Path, value: str | int) -> None:
    """Write a control file in one call and without creating it, as the kernel requires."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def read_words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def read_entry(path: Path, key: str) -> int | None:
    """The value beside `key` in a flat-keyed file such as memory.stat."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return None


def upwards(folder: Path, mount: Path) -> Iterator[Path]:
    """`folder` and its ancestors up to the mount point: the groups whose limits hold for it."""
    while folder.is_relative_to(mount):
        yield folder
        folder = folder.parent


def members(folder: Path) -> list[int]:
    return [int(pid) for pid in read_words(folder / "cgroup.procs")]


def make(folder: Path) -> None:
    folder.mkdir(exist_ok=True)


def drop(folder: Path) -> None:
    folder.rmdir()


def remove(folder: Path) -> None:
    """Kill all processes in the folder and below, and remove it. Gives up in time: a process may hang in the kernel."""
    for _ in range(REMOVE_TRIES):
        below = [Path(path) for path, _, _ in os.walk(folder, topdown=False)]
        for group in below:
            for pid in members(group):
                _kill(pid)
        try:
            for group in below:
                drop(group)
        except FileNotFoundError:
            continue  # another process removes it at the same time
        except PermissionError:
            raise
        except OSError:
            time.sleep(REMOVE_PAUSE_S)  # dying processes are still in it
            continue
        return
    if folder.exists():
        raise FleetbedError(
            f"the cgroup {folder} could not be removed: the processes {members(folder)} do not die; "
            f"once they are gone, remove it with: rmdir {folder}"
        )


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, signal.SIGKILL)
