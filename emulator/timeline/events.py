"""The timeline: events in device time, handled strictly in that order, regardless of when the host did the work.

It is sound because handling an event at t only ever adds events at or after t, a planned end is a floor that can only
move later, and ties are broken by kind, client and task number, never by arrival.
"""

from __future__ import annotations

import heapq
import math
from enum import IntEnum

from msgspec import Struct

from fleetbed.emulator.timeline.network import Pipe, Transfer


class Kind(IntEnum):
    """What an event is; at the same instant the server finishes first, then results count, then timers fire."""

    SERVER_DONE = 0
    UPLOADED = 1
    LEFT = 2
    COMPUTED = 3
    DOWNLOADED = 4
    CAME = 5
    TIMER = 6
    RATE = 7


class Event(Struct, frozen=True, order=True, array_like=True):
    time_s: float
    kind: Kind
    client: int = -1
    task: int = -1


class Timeline(Struct):
    """A heap of events and the two directions of the server's link. It is plain data that checkpoints hold."""

    down: Pipe
    up: Pipe
    now_s: float = 0.0
    events: list[Event] = []

    def add(self, event: Event) -> None:
        if event.time_s < self.now_s:
            raise ValueError(f"an event at {event.time_s} s after the timeline has reached {self.now_s} s")
        heapq.heappush(self.events, event)

    def send(self, kind: Kind, transfer: Transfer) -> None:
        """Start a transfer now; the event comes when it has arrived."""
        self._pipe(kind).start(self.now_s, transfer)

    def limit(self, task: int, limit_bit_s: float) -> bool:
        """Change the rate of a client's link from now on; returns False if no transfer of the task is under way."""
        pipes = [pipe for pipe in (self.down, self.up) if any(t.task == task for t in pipe.transfers)]
        for pipe in pipes:
            pipe.limit(self.now_s, task, limit_bit_s)
        return bool(pipes)

    def pop(self) -> Event | None:
        """Return the next event in device time; None if there is none."""
        while True:
            head_s = self.events[0].time_s if self.events else math.inf
            for kind in (Kind.DOWNLOADED, Kind.UPLOADED):
                pipe = self._pipe(kind)
                if (end_s := pipe.next_s()) <= head_s and end_s < math.inf:
                    done = pipe.finish()
                    self.add(Event(end_s + done.delay_s, kind, done.client, done.task))
                    break
            else:
                if not self.events:
                    return None
                event = heapq.heappop(self.events)
                self.now_s = event.time_s
                return event

    def forget(self, task: int) -> float:
        """Take every event and transfer of a task off the timeline.

        Returns the part of its latest transfer that has passed. That is 1 where no transfer is in a pipe: one whose
        last bit has left is only delayed.
        """
        self.events = [event for event in self.events if event.task != task]
        heapq.heapify(self.events)
        for pipe in (self.down, self.up):
            if any(t.task == task for t in pipe.transfers):
                return pipe.drop(max(self.now_s, pipe.clock_s), task).passed
        return 1.0

    def _pipe(self, kind: Kind) -> Pipe:
        return self.down if kind is Kind.DOWNLOADED else self.up
