"""Pacing holds a client to its device's rate: the arithmetic of slowdown, time scale and share, and the pacer.

A step takes `reference` seconds on a host core that is hot and alone. On the device it takes
`reference x slowdown`, and the client is given `reference x slowdown x time_scale` host seconds for it. So it
fills a share of 1 / (slowdown x time_scale) of a core, and sleeps through the rest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from fleetbed.emulator.timeline.plan import Pace
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.types import Device

#: the part of a core that the fastest device fills by its reference times, before any of its tasks was measured
LARGEST_LOAD = 0.6
#: the part of a core that a task may really fill; the rest is for the host's other work
BUSY_LOAD = 0.9


class Pacer:
    """Sleeps until the planned start of each step, counted from its own start, so that errors do not add up.

    A client may be one step ahead of its plan: what the host then takes from a step does not make its task late. A step
    that came late is made up for by the next ones.
    """

    def __init__(
        self,
        paces: Sequence[Pace],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._step_s = itertools.chain.from_iterable(itertools.repeat(pace.step_s, pace.steps) for pace in paces)
        self._clock, self._sleep = clock, sleep
        self._start = clock()
        self._planned_s = 0.0  # of the steps before the last one

    def step(self) -> None:
        """Sleep until the next step may begin; called after each optimiser step."""
        self._sleep_until(self._start + self._planned_s)
        self._planned_s += next(self._step_s, 0.0)

    def finish(self, total_s: float) -> float:
        """Sleep until the whole task, planned to take `total_s`, is due; returns the seconds that it took."""
        self._sleep_until(self._start + total_s)
        return self._clock() - self._start

    def _sleep_until(self, deadline: float) -> None:
        remaining = deadline - self._clock()
        if remaining > 0:
            self._sleep(remaining)


def slowdown(host_alone_gflops: float, device: Device) -> float:
    """How many times longer a step takes on the device than on a host core that is hot and alone.

    Both rates are of the same kernel, an FP32 matrix product. `train_scale` corrects for what it leaves out:
    training takes that many times longer on the device than the ratio of the rates says.
    """
    return host_alone_gflops / device.rate_gflops * device.train_scale


def share(slowdown: float, time_scale: float) -> float:
    """Return the part of a core, warmed up and otherwise idle, that a client fills while it trains."""
    return 1 / (slowdown * time_scale)


def ceiling_cores(share: float) -> float:
    """The quota for a paced client: so high that a client that paces itself never reaches it."""
    return 2 * share


def capacity(cores: int) -> float:
    """Return how much load, as a sum of shares, may be paced at once."""
    return LARGEST_LOAD * cores


def smallest_scale(slowdowns: Iterable[float], busy_to_alone: float) -> float:
    """Host seconds per device second at which the fastest device fills `LARGEST_LOAD` of a core.

    `busy_to_alone` is the rate of a core with all cores busy against its rate alone. Below 1 the host is
    faster than the fleet, and time is compressed.
    """
    return 1 / (LARGEST_LOAD * min(slowdowns) * busy_to_alone)


def check_scale(time_scale: float, slowdowns: Mapping[str, float], busy_to_alone: float) -> None:
    """Refuse a time scale, given as a number, at which the host is too slow for one of the named devices."""
    fastest = min(slowdowns, key=lambda name: slowdowns[name])
    smallest = smallest_scale([slowdowns[fastest]], busy_to_alone)
    if time_scale < smallest * (1 - 1e-9):
        needed = share(slowdowns[fastest], time_scale) / busy_to_alone
        raise HostCannot(
            f"timing.time_scale: {time_scale:g} is too small for this host: {fastest} would need {needed:.2f} of "
            f"a core, and {LARGEST_LOAD:g} is the most that is sure to be held; use `auto`, or {smallest:.3g} or "
            f"more, or timing.source `modelled`, which needs no real time"
        )
