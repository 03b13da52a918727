"""The limits of a client, and the caps that came of them: plain data, decided without touching the host."""

from __future__ import annotations

import mmap
from typing import Literal

from msgspec import Struct

Status = Literal["enforced", "modelled", "unavailable"]

PERIOD_US = 100_000
LONGEST_PERIOD_US = 1_000_000
SMALLEST_QUOTA_US = 1_000


class GpuPlan(Struct, frozen=True):
    """A part of one card: the share of its multiprocessors and the memory that may be allocated on it."""

    share: float
    memory_bytes: int
    index: int = 0


class LimitPlan(Struct, frozen=True):
    """The limits of one client. None: no limit, but it is still metered."""

    name: str
    memory_bytes: int | None = None
    cpu_cores: float | None = None  # the ceiling, twice the largest share that the client is paced to
    gpu: GpuPlan | None = None


class Cap(Struct, frozen=True):
    """One knob of a plan: the value asked for, and the value read back after it was written."""

    knob: str
    status: Status
    backend: str
    asked: float | None
    got: float | None
    unit: str
    note: str = ""


class Usage(Struct, frozen=True):
    """The resources that a client has used since it joined (CPU) and since its peak was last reset (memory)."""

    cpu_s: float
    throttled_s: float
    peak_bytes: int
    anon_bytes: int
    gpu_bytes: int | None = None  # on its card now; None: it trains on the CPU
    gpu_w: float | None = None  # what the whole card draws


def with_headroom(cap_bytes: int) -> int:
    """The limit to write for a cap: whole pages, and some headroom for memory that is not the client's own.

    Page tables, kernel stacks and the rounding of allocators take up to 0.3 % and 0.4 MiB; without it a
    client would die just below its cap.
    """
    pages = -(-(cap_bytes + cap_bytes // 256 + 2**19) // mmap.PAGESIZE)
    return pages * mmap.PAGESIZE


class Quota(Struct, frozen=True):
    quota_us: int
    period_us: int

    @property
    def cores(self) -> float:
        return self.quota_us / self.period_us


def weight_for(cores: float, of_core: int, smallest: int) -> int:
    """The CPU weight that goes with a ceiling: small shares wait for large ones, so that no client is late."""
    return max(smallest, round(of_core * cores))


def quota_for(cores: float) -> Quota:
    """The CFS quota of a ceiling in cores.

    The kernel accepts no quota below 1 ms, so a tiny share gets a longer period, and the tiniest shares get the
    smallest possible ceiling.
    """
    period = PERIOD_US
    if cores * period < SMALLEST_QUOTA_US:
        period = min(LONGEST_PERIOD_US, round(SMALLEST_QUOTA_US / cores))
    return Quota(max(SMALLEST_QUOTA_US, round(cores * period)), period)
