"""Memory without cgroups: RLIMIT_DATA, and meters from /proc. Approximate, and labelled so."""

from __future__ import annotations

import resource
from pathlib import Path

from fleetbed.emulator.limits.plan import Cap, with_headroom

BACKEND = "RLIMIT_DATA"
NOTE = "approximate: counts private writable memory that is reserved after the fork, touched or not"
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class RlimitMemory:
    """Limits memory to what the client was forked with plus its cap; beyond that, allocation raises.

    The peak is the growth of resident memory since the fork, less the growth of file pages (libraries that the client
    touched first) and what it shares with others. Inherited pages that the client wrote to are not seen by it.
    """

    def __init__(self, limit_bytes: int | None, why: str) -> None:
        self._limit = limit_bytes
        self._got: int | None = None
        self._why = why
        self._resident = self._file = self._anon = 0

    @property
    def cap(self) -> Cap | None:
        """The cap, which can be read back only in the client."""
        if self._limit is None:
            return None
        return Cap("memory", "enforced", BACKEND, self._limit, self._got, "bytes", f"{NOTE}; {self._why}")

    def enter(self) -> None:
        status = read_status()
        self._resident, self._file, self._anon = status["VmRSS"], status["RssFile"], status["RssAnon"]
        if self._limit is not None:
            limit = status["VmData"] + with_headroom(self._limit)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            self._got = resource.getrlimit(resource.RLIMIT_DATA)[0] - status["VmData"]
        self.reset_peak()

    def peak_bytes(self) -> int:
        status = read_status()
        beside = max(0, status["RssFile"] - self._file) + status["RssShmem"]
        return max(0, status["VmHWM"] - self._resident - beside)

    def anon_bytes(self) -> int:
        return max(0, read_status()["RssAnon"] - self._anon)

    def reset_peak(self) -> bool:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return True

    def oom_kills(self) -> int:
        return 0  # no process is killed: allocation raises in the client


def read_status() -> dict[str, int]:
    """The memory figures of /proc/self/status, in bytes."""
    figures = {}
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            figures[name] = int(value.split()[0]) * 1024
    return figures
