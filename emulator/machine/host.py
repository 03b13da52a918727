"""Facts about this host, and how busy other programs keep it."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path

MOST_OTHER_CORES = 0.1  # that other programs may use without spoiling a measurement
_CPUINFO_KEYS = ("model name", "Model", "Hardware")  # x86, then ARM boards


def cpu_model() -> str:
    figures = _colon_lines(Path("/proc/cpuinfo"))
    return next((figures[key] for key in _CPUINFO_KEYS if key in figures), platform.machine())


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    return _meminfo("MemTotal")


def available_bytes() -> int:
    return _meminfo("MemAvailable")


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(_colon_lines(Path("/proc/self/status"))["VmRSS"].split()[0]) * 1024


def _meminfo(key: str) -> int:
    return int(_colon_lines(Path("/proc/meminfo"))[key].split()[0]) * 1024


def _colon_lines(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


class LoadMeter:
    """Measures the cores that others keep busy. Our own children are left out once they were waited for."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    def other_cores(self) -> float:
        elapsed = time.monotonic() - self._start
        others = (_busy_s() - self._busy) - (_own_s() - self._own)
        return max(0.0, others / elapsed)


def _busy_s() -> float:
    """CPU seconds of the whole host since boot, including those that the hypervisor took away."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(s.ru_utime + s.ru_stime for s in spent)
