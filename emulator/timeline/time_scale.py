"""The time scale of paced runs: host seconds per device second.

By default it is fixed before the run, so that the fastest device fills 0.6 of a core: tasks are then on time whatever
else happens on the host. `fast` begins there and adapts to what tasks really take, which keeps the cores busier and
makes some tasks late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fleetbed.emulator.timeline.pacing import BUSY_LOAD, LARGEST_LOAD, check_scale, smallest_scale
from fleetbed.profiles.experiment import TimeScaleChoice

#: how many of the last tasks count, and how many must have ended before the scale changes
LOOKED_AT, ENOUGH = 40, 10
#: by how much a run may become slower: a method that does more than it declares is late at any pace
SLOWEST = 2.0


class TimeScale:
    """A time scale that is set once: `auto`, or a number in the experiment."""

    def __init__(self, asked: TimeScaleChoice) -> None:
        self._asked = asked
        self.now = 1.0

    def fit(self, slowdowns: Mapping[str, float], busy_to_alone: float) -> None:
        """Decide on the scale, given how many times slower than this host each kind of device is."""
        if isinstance(self._asked, str):
            self.now = smallest_scale(slowdowns.values(), busy_to_alone)
        else:
            check_scale(self._asked, slowdowns, busy_to_alone)
            self.now = self._asked

    def resume(self, now: float) -> None:
        self.now = now

    def largest(self, share: float) -> float:
        """The largest value that a share of a core may reach during the run."""
        return share

    def note(self, scale: float, *, load: float, overrun: float) -> None:
        """Note how a task went at this scale: the part of a core that it filled, and measured over planned time."""


class FastTimeScale(TimeScale):
    """The smallest scale at which all but two of the last forty tasks would have been on time."""

    def __init__(self, asked: TimeScaleChoice) -> None:
        super().__init__(asked)
        self._start = self.now
        self._needed: deque[float] = deque(maxlen=LOOKED_AT)

    def fit(self, slowdowns: Mapping[str, float], busy_to_alone: float) -> None:
        super().fit(slowdowns, busy_to_alone)
        self._start = self.now

    def resume(self, now: float) -> None:
        self.now = self._start = now

    def largest(self, share: float) -> float:
        return share * BUSY_LOAD / LARGEST_LOAD

    def note(self, scale: float, *, load: float, overrun: float) -> None:
        self._needed.append(scale * max(load / BUSY_LOAD, overrun if overrun > 1.01 else 0.0))
        if len(self._needed) >= ENOUGH:
            needed = sorted(self._needed)[-3]
            smallest, largest = self._start * LARGEST_LOAD / BUSY_LOAD, self._start * SLOWEST
            self.now = min(largest, max(smallest, needed))


def make_time_scale(asked: TimeScaleChoice) -> TimeScale:
    return FastTimeScale(asked) if asked == "fast" else TimeScale(asked)
