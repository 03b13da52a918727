"""A worker as the broker sees it: the states of its process, and what leads from one to another.

    ABSENT ─spawn─> STARTING ─forked─> FORKED ─greeted─> IDLE ─sent─> BUSY ─answered─> IDLE or LEAVING
       ^                                                                                  │
       └───────settled─── EXITED <──exited── KILLED <──────────────killed─────────────────┘

A hello may overtake the report of the fork, and a process can be killed, or end by itself, in every state from STARTING
to LEAVING.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fleetbed.emulator.limits.plan import LimitPlan
from fleetbed.emulator.processes.executor import SERVICE, Order
from fleetbed.emulator.wire.messages import Exited, Slot


class WorkerState(Enum):
    ABSENT = "it has no process"
    STARTING = "the zygote was told to fork its process"
    FORKED = "its process runs, and its hello is due"
    IDLE = "its process is inside its limits and waits for an order"
    BUSY = "it was sent its order, and its answer is due"
    LEAVING = "it has answered its one order, and its process is about to end"
    KILLED = "the zygote was told to kill its process"
    EXITED = "its process has ended; its last answer may still be on its way"


ABSENT, STARTING, FORKED, IDLE, BUSY, LEAVING, KILLED, EXITED = WorkerState

#: a process was asked for, and nothing has ended it yet
ALIVE = {STARTING, FORKED, IDLE, BUSY, LEAVING}
#: the process that the worker has or gets will carry out an order that is assigned now
ACCEPTING = {ABSENT, STARTING, FORKED, IDLE}


@dataclass
class Worker:
    """The state of a worker, the facts about its process, and the order that it was given.

    An order outlives the process that it was sent to: a process that is lost is replaced.
    """

    name: str
    title: str
    plan: LimitPlan
    state: WorkerState = ABSENT
    since_s: float = 0.0  # when it entered that state, by the broker's clock
    # its process
    identity: bytes = b""  # the name of its process on the broker's socket
    socket: int | None = None  # the file descriptor of its connection, by which the loss of it is reported
    slot: Slot | None = None  # in the shared memory; the process may write there until it has answered or ended
    killed_for: str = ""  # why the broker had the latest process killed
    exit: Exited | None = None  # how its process ended, while the state is EXITED
    # its order
    order: Order | None = None
    load: int = 0  # of that order
    sent_s: float | None = None  # when the order was sent to the present process, by the monotonic clock
    losses: int = 0  # processes that were lost with that order
    lost_by: str = ""  # how the latest of them was lost
    has_run_before: bool = False  # it has had an order before, so the next one will be quicker

    @property
    def is_service(self) -> bool:
        return self.name.startswith(SERVICE)

    @property
    def is_free(self) -> bool:
        """Whether it can be given an order."""
        return self.order is None and self.state in ACCEPTING

    @property
    def is_starting(self) -> bool:
        return self.state in (STARTING, FORKED)

    @property
    def is_ending(self) -> bool:
        """Whether its process has been killed or has ended, so that it needs no killing."""
        return self.state in (KILLED, EXITED)

    # the transitions: each names the states that it may start from; `now_s` is the broker's clock

    def spawn(self, identity: bytes, now_s: float) -> None:
        self._go({ABSENT}, STARTING, now_s)
        self.identity, self.sent_s, self.killed_for = identity, None, ""

    def forked(self, now_s: float) -> None:
        """Note the report of the fork, unless something else was reported before it."""
        if self.state is STARTING:
            self._go({STARTING}, FORKED, now_s)

    def greeted(self, socket: int, now_s: float) -> None:
        self._go({STARTING, FORKED}, IDLE, now_s)
        self.socket = socket

    def sent(self, at_s: float, now_s: float) -> None:
        self._go({IDLE}, BUSY, now_s)
        self.sent_s = at_s

    def answered(self, now_s: float, *, leaves: bool) -> None:
        """Note an answer, which changes nothing about a process that is ending anyway."""
        if not self.is_ending:
            self._go({BUSY}, LEAVING if leaves else IDLE, now_s)

    def killed(self, why: str, now_s: float) -> None:
        self._go(ALIVE, KILLED, now_s)
        self.killed_for = why

    def exited(self, how: Exited, now_s: float) -> None:
        self._go(ALIVE | {KILLED}, EXITED, now_s)
        self.exit = how

    def settled(self, now_s: float) -> Exited:
        """Note that nothing more can come from the process; returns how it ended."""
        self._go({EXITED}, ABSENT, now_s)
        assert self.exit is not None
        how, self.exit, self.socket = self.exit, None, None
        return how

    def _go(self, allowed: set[WorkerState], to: WorkerState, now_s: float) -> None:
        assert self.state in allowed, f"{self.name} cannot go from {self.state.name} to {to.name}"
        self.state, self.since_s = to, now_s
