"""Memory and CPU by cgroup v1, where each controller has a tree of its own."""

from __future__ import annotations

from pathlib import Path

from fleetbed.emulator.limits import cgroup
from fleetbed.emulator.limits.cgroup import read_entry, upwards
from fleetbed.emulator.limits.knobs import cpu_cap, memory_cap
from fleetbed.emulator.limits.plan import Cap, quota_for, weight_for, with_headroom

BACKEND = "cgroup v1"
WEIGHT_OF_CORE, SMALLEST_WEIGHT = 1024, 2  # of the kernel's default for a group, and its least


class MemoryV1:
    """A memory limit. The kernel charges added pages and inherited pages that are written, not those only read."""

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        self._folder = folder
        self.cap = None if limit_bytes is None else self._limit(limit_bytes)

    def _limit(self, asked: int) -> Cap:
        file = self._folder / "memory.limit_in_bytes"
        cgroup.write(file, with_headroom(asked))
        with_swap = self._folder / "memory.memsw.limit_in_bytes"
        note = ""
        if with_swap.exists():
            cgroup.write(with_swap, with_headroom(asked))
        else:
            note = "swap is not accounted by this kernel: a client may swap beyond its cap"
        outer = read_entry(self._folder / "memory.stat", "hierarchical_memory_limit")
        if outer is not None and outer < asked:
            note = f"an outer group allows only {outer} bytes"
        return memory_cap(BACKEND, asked, int(file.read_text()), note)

    def enter(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return int((self._folder / "memory.max_usage_in_bytes").read_text())

    def anon_bytes(self) -> int:
        return read_entry(self._folder / "memory.stat", "rss") or 0

    def reset_peak(self) -> bool:
        cgroup.write(self._folder / "memory.max_usage_in_bytes", 0)
        return True

    def oom_kills(self) -> int:
        return read_entry(self._folder / "memory.oom_control", "oom_kill") or 0


class CpuV1:
    """A CFS quota as the ceiling for code that does not pace itself."""

    def __init__(self, folder: Path, mount: Path, cores: float | None) -> None:
        self._folder = folder
        self.cap = None if cores is None else self._limit(cores, mount)

    def _limit(self, asked: float, mount: Path) -> Cap:
        # v1 does not let a group have more than its parents, so a lower outer quota becomes ours
        outer = min((c for g in upwards(self._folder.parent, mount) if (c := _cores(g)) is not None), default=None)
        allowed = asked if outer is None else min(asked, outer)
        quota = quota_for(allowed)
        cgroup.write(self._folder / "cpu.cfs_period_us", quota.period_us)
        cgroup.write(self._folder / "cpu.cfs_quota_us", quota.quota_us)
        cgroup.write(self._folder / "cpu.shares", weight_for(allowed, WEIGHT_OF_CORE, SMALLEST_WEIGHT))
        note = f"an outer group allows only {outer:g} cores" if allowed < asked else ""
        return cpu_cap(BACKEND, asked, _cores(self._folder), note)

    def throttled_s(self) -> float:
        return (read_entry(self._folder / "cpu.stat", "throttled_time") or 0) / 1e9


def _cores(folder: Path) -> float | None:
    file = folder / "cpu.cfs_quota_us"
    quota = int(file.read_text()) if file.exists() else -1
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
