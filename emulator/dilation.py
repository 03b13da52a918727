"""How many host seconds a device second takes in paced runs: a number that was asked for, or as few as tasks allow.

Under `auto` a run begins carefully, for what a task takes beside its steps, and what else happens on the host, is not
known yet. From then on it goes by what tasks really took, and so keeps the host busy without making tasks late.
"""

from __future__ import annotations

from collections import deque

from fleetbed.emulator.pacing import BUSY_LOAD, LARGEST_LOAD

#: so many tasks are looked back on, and before so many have ended nothing is changed
LOOKED_AT, ENOUGH = 40, 10
#: how many times slower than it began a run may become
SLOWEST = 2.0
#: measured over planned; a late wake-up is not lateness
ON_TIME = 1.01


class Dilation:
    def __init__(self, start: float, *, fixed: bool) -> None:
        self.now = start
        self.fixed = fixed
        self._smallest = start * LARGEST_LOAD / BUSY_LOAD  # what the ceilings of the clients are made for
        self._largest = start * SLOWEST  # a method that does more than it declares is late at any pace
        self._needed: deque[float] = deque(maxlen=LOOKED_AT)

    def note(self, *, dilation: float, load: float, overrun: float) -> None:
        """How a task went that was paced at this dilation.

        `load` is the part of a core that it would have filled on the fastest device of the fleet.
        """
        if self.fixed:
            return
        late = overrun if overrun > ON_TIME else 0.0
        self._needed.append(dilation * max(load / BUSY_LOAD, late))
        if len(self._needed) >= ENOUGH:
            # all but one of those tasks would have been on time
            self.now = min(self._largest, max(self._smallest, sorted(self._needed)[-2]))
