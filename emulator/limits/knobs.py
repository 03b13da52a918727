"""The interface of the back ends of each knob. The cap is written and read back when a knob is made."""

from __future__ import annotations

from math import isinf
from typing import Protocol

from fleetbed.emulator.limits.plan import Cap, with_headroom


class MemoryKnob(Protocol):
    @property
    def cap(self) -> Cap | None: ...

    def enter(self) -> None:
        """Called in the client once it has joined its groups."""

    def peak_bytes(self) -> int:
        """The most memory that the client has added to what it was forked with, since the last reset; in the client."""
        ...

    def anon_bytes(self) -> int:
        """The private memory that the client holds now; in the client."""
        ...

    def reset_peak(self) -> bool:
        """Reset the peak, in the client; returns False where the kernel cannot."""
        ...

    def oom_kills(self) -> int:
        """How many processes the kernel killed because of this cap."""
        ...


class CpuKnob(Protocol):
    @property
    def cap(self) -> Cap | None: ...

    def throttled_s(self) -> float:
        """The seconds for which the ceiling has held the client back."""
        ...


def memory_cap(backend: str, asked: int, got: float, note: str) -> Cap:
    """The memory cap after reading back: enforced if it is as strict as asked for, or stricter."""
    if got <= with_headroom(asked):
        return Cap("memory", "enforced", backend, asked, got, "bytes", note)
    note = "the kernel kept another value than was written"
    return Cap("memory", "unavailable", backend, asked, None if isinf(got) else got, "bytes", note)


def quota_name(backend: str) -> str:
    return f"pacing under a {backend} quota"


def cpu_cap(backend: str, asked: float, got: float | None, note: str = "") -> Cap:
    """The CPU cap after reading back; `got` is None if there is no ceiling."""
    if got is None:
        note = "the kernel did not keep the quota"
        return Cap("cpu", "unavailable", backend, asked, None, "cores", note)
    if got > asked * 1.01:
        note = "the smallest ceiling that the kernel takes; below it pacing alone holds the client"
    return Cap("cpu", "enforced", quota_name(backend), asked, got, "cores", note)
