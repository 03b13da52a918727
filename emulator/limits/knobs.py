"""What every back end of a knob can do. The cap is written and read back when the knob is made."""

from __future__ import annotations

from typing import Protocol

from fleetbed.emulator.limits.plan import Cap


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


def judged(knob: str, backend: str, asked: float, got: float, unit: str, note: str = "") -> Cap:
    """A cap that was read back: it holds if the kernel kept what was written, or something stricter."""
    if got <= asked * 1.01:
        return Cap(knob, "enforced", backend, asked, got, unit, note)
    return Cap(
        knob,
        "unavailable",
        backend,
        asked,
        got,
        unit,
        note or "the kernel kept another value than was written",
    )
