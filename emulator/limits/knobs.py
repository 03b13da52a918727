"""What every back end of a knob can do. The cap is written and read back when the knob is made."""

from __future__ import annotations

from math import isinf
from typing import Protocol

from fleetbed.emulator.limits.plan import Cap, with_headroom


class MemoryKnob(Protocol):
    @property
    def cap(self) -> Cap | None: ...

    def enter(self) -> None:
        """In the client, once it is in its groups."""

    def peak_bytes(self) -> int:
        """In the client: the most that it has added to what it was forked with, since the last reset."""
        ...

    def anon_bytes(self) -> int:
        """In the client: the private memory that it holds now."""
        ...

    def reset_peak(self) -> bool:
        """In the client: start the peak anew; False where the kernel cannot."""
        ...

    def oom_kills(self) -> int:
        """How often the kernel killed for this cap."""
        ...


class CpuKnob(Protocol):
    @property
    def cap(self) -> Cap | None: ...

    def throttled_s(self) -> float:
        """How long the ceiling has held the client back."""
        ...


def memory_cap(backend: str, asked: int, got: float, note: str) -> Cap:
    """What was read back holds if it is what was written, or stricter."""
    if got <= with_headroom(asked):
        return Cap("memory", "enforced", backend, asked, got, "bytes", note)
    note = "the kernel kept another value than was written"
    return Cap("memory", "unavailable", backend, asked, None if isinf(got) else got, "bytes", note)


def quota_name(backend: str) -> str:
    return f"pacing under a {backend} quota"


def cpu_cap(backend: str, asked: float, got: float | None, note: str = "") -> Cap:
    """The ceiling as it was read back; None is none."""
    if got is None:
        note = "the kernel did not keep the quota"
        return Cap("cpu", "unavailable", backend, asked, None, "cores", note)
    if got > asked * 1.01:
        note = "the smallest ceiling that the kernel takes; below it pacing alone holds the client"
    return Cap("cpu", "enforced", quota_name(backend), asked, got, "cores", note)
