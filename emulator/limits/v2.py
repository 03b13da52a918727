"""Memory and CPU by cgroup v2: one tree, where a group holds either processes or groups with controllers."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from math import inf, isinf
from pathlib import Path

import psutil

from fleetbed.emulator.limits import cgroup
from fleetbed.emulator.limits.cgroup import members, read_entry, read_words, upwards
from fleetbed.emulator.limits.knobs import cpu_cap, memory_cap
from fleetbed.emulator.limits.plan import Cap, quota_for, weight_for, with_headroom

BACKEND = "cgroup v2"
WEIGHT_OF_CORE, SMALLEST_WEIGHT = 100, 1  # of the kernel's default for a group, and its least
HOST_LEAF = "fleetbed-host"  # where the processes of a delegated group go while it has limited children


class MemoryV2:
    def __init__(self, folder: Path, mount: Path, limit_bytes: int | None) -> None:
        self._folder = folder
        self._peak: int | None = None
        self.cap = None if limit_bytes is None else self._limit(limit_bytes, mount)

    def _limit(self, asked: int, mount: Path) -> Cap:
        file = self._folder / "memory.max"
        cgroup.write(file, with_headroom(asked))
        swap = self._folder / "memory.swap.max"
        note = ""
        if swap.exists():
            cgroup.write(swap, 0)
        else:
            note = "swap is not accounted by this kernel: a client may swap beyond its cap"
        if (outer := _outer_bytes(self._folder, mount)) < asked:
            note = f"an outer group allows only {outer} bytes"
        return memory_cap(BACKEND, asked, _number(file.read_text()), note)

    def enter(self) -> None:
        pass

    def peak_bytes(self) -> int:
        """The peak since the last reset (kernel 6.12) or since the fork (5.19); before that, what is held now."""
        if self._peak is not None:
            return int(os.pread(self._peak, 32, 0))
        file = self._folder / "memory.peak"
        return int((file if file.exists() else self._folder / "memory.current").read_text())

    def anon_bytes(self) -> int:
        return read_entry(self._folder / "memory.stat", "anon") or 0

    def reset_peak(self) -> bool:
        """Reset the peak. The kernel has one per open file, so the client opens its own and keeps it open."""
        try:
            fd = self._peak if self._peak is not None else os.open(self._folder / "memory.peak", os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # before 5.19, before 6.12
            return False
        try:
            os.pwrite(fd, b"reset", 0)
        except OSError:  # before 6.12, as root
            os.close(fd)
            return False
        self._peak = fd
        return True

    def oom_kills(self) -> int:
        return read_entry(self._folder / "memory.events", "oom_kill") or 0


class CpuV2:
    """A CFS quota as the ceiling for code that does not pace itself."""

    def __init__(self, folder: Path, cores: float | None) -> None:
        self._folder = folder
        self.cap = None if cores is None else self._limit(cores)

    def _limit(self, asked: float) -> Cap:
        quota = quota_for(asked)
        file = self._folder / "cpu.max"
        cgroup.write(file, f"{quota.quota_us} {quota.period_us}")
        cgroup.write(self._folder / "cpu.weight", weight_for(asked, WEIGHT_OF_CORE, SMALLEST_WEIGHT))
        kept, period = map(_number, file.read_text().split())
        return cpu_cap(BACKEND, asked, None if isinf(kept) else kept / period)

    def throttled_s(self) -> float:
        return (read_entry(self._folder / "cpu.stat", "throttled_usec") or 0) / 1e6


def _number(text: str) -> float:
    return inf if text.strip() == "max" else int(text)


def _outer_bytes(folder: Path, mount: Path) -> float:
    """The memory that the enclosing groups allow; the root group has no such file."""
    files = [group / "memory.max" for group in upwards(folder.parent, mount)]
    return min((_number(file.read_text()) for file in files if file.exists()), default=inf)


def base_of(own: Path) -> Path:
    """The group to nest below: our own, or the one that a run before us moved us out of."""
    return own.parent if own.name == HOST_LEAF else own


def enable(base: Path, controllers: frozenset[str]) -> None:
    """Enable these controllers for the children of `base`; raises OSError where that is not possible."""
    missing = controllers - set(read_words(base / "cgroup.subtree_control"))
    if not missing:
        return
    order = " ".join(f"+{name}" for name in sorted(missing))
    try:
        cgroup.write(base / "cgroup.subtree_control", order)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _evacuate(base)
        cgroup.write(base / "cgroup.subtree_control", order)


def _evacuate(base: Path) -> None:
    """Move the processes of `base` into a leaf beside the limited groups, if all of them are related to us.

    The family is the oldest ancestor of ours that is in the group, and all its descendants: the shell that the
    scope was opened for, and what stands beside us in a pipeline.
    """
    inside = set(members(base))
    me = psutil.Process()
    ancestors = [process for process in (me, *me.parents()) if process.pid in inside]
    family = {p.pid for oldest in ancestors[-1:] for p in (oldest, *oldest.children(recursive=True))}
    strangers = sorted(inside - family)
    if strangers:
        raise OSError(errno.EBUSY, f"the group {base} holds other processes too ({strangers[:5]})")
    leaf = base / HOST_LEAF
    cgroup.make(leaf)
    while moving := members(base):  # again, because some may have forked meanwhile
        for pid in moving:
            _move(pid, leaf)


def release(base: Path, controllers: frozenset[str]) -> None:
    """Undo `enable` with its evacuation once the last run in `base` is over."""
    leaf = base / HOST_LEAF
    others = [path for path in base.glob("fleetbed-*") if path != leaf]
    if others or not leaf.exists():
        return
    cgroup.write(base / "cgroup.subtree_control", " ".join(f"-{name}" for name in sorted(controllers)))
    while moving := members(leaf):
        for pid in moving:
            _move(pid, base)
    cgroup.drop(leaf)


def _move(pid: int, group: Path) -> None:
    with suppress(ProcessLookupError):  # it ended meanwhile
        cgroup.write(group / "cgroup.procs", pid)
