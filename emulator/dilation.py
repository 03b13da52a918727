"""How many host seconds a device second takes in paced runs: a number that was asked for, or as few as tasks allow.

Under `auto` a run begins carefully, for what a task takes beside its steps, and what else happens on the host, is not
known yet. From then on it goes by what tasks really took, and so keeps the host busy without making tasks late.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

from fleetbed.emulator.pacing import BUSY_LOAD, LARGEST_LOAD

#: so many tasks are looked back on, and before so many have ended nothing is changed
LOOKED_AT, ENOUGH = 40, 10
#: of those looked at, so many may be late: the twentieth beyond which a run counts as degraded
MAY_BE_LATE = 2
#: how many times slower than it began a run may become
SLOWEST = 2.0
#: measured over planned; a late wake-up is not lateness
ON_TIME = 1.01


class Dilation:
    """Two paces: at one a task of the fastest device leaves its core some time, at the other all leave the host some.

    A task that has a core for itself goes by the first. Where several share a core they make up for each other, and go
    by the second, as many times slower as there are on a core.
    """

    def __init__(self, start: float, *, fixed: bool) -> None:
        self.fixed = fixed
        self._alone = self._together = start
        self._smallest = start * LARGEST_LOAD / BUSY_LOAD  # what the ceilings of the clients are made for
        self._largest = start * SLOWEST  # a method that does more than it declares is late at any pace
        self._needed: deque[float] = deque(maxlen=LOOKED_AT)
        self._late: deque[float] = deque(maxlen=LOOKED_AT)

    @property
    def now(self) -> float:
        """That of a task that has a core for itself."""
        return self.of(1.0)

    def of(self, spread: float) -> float:
        """That of tasks of which so many share a core."""
        return self._alone if self.fixed else max(self._alone, spread * self._together)

    def spread(self, dilation: float) -> float:
        """How many tasks at this dilation a core can take: the inverse of `of`, or a little more."""
        return 1.0 if self.fixed else dilation / self._together

    def note(self, *, dilation: float, spread: float, load: float, overrun: float) -> None:
        """How a task went that was paced at this dilation, with so many on a core.

        `load` is the part of a core that it would have filled on the fastest device of the fleet.
        """
        if self.fixed:
            return
        self._needed.append(dilation * load / BUSY_LOAD)
        self._late.append(dilation / spread * overrun if overrun > ON_TIME else 0.0)
        if len(self._needed) >= ENOUGH:
            self._alone = self._bounded(sorted(self._needed)[-2])  # all but one would have been on time
            late = sorted(self._late)[-1 - MAY_BE_LATE]
            self._together = self._bounded(max(fmean(self._needed), late))

    def _bounded(self, dilation: float) -> float:
        return min(self._largest, max(self._smallest, dilation))
