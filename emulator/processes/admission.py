"""Admission: which workers a run has, which orders wait, and which may begin.

Never more load is admitted than the host can honour. Loads are summed in whole numbers, millionths of a core: sums of
floats that come and go would drift.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from fleetbed.emulator.limits.plan import LimitPlan
from fleetbed.emulator.processes.executor import SERVICE, Order
from fleetbed.emulator.wire.messages import Exited, Slot

Urgency = tuple[float, float, bool, int]  # the smallest goes first; its last part, the task, is nobody else's


@dataclass
class Worker:
    """A worker as the broker sees it: not started, starting (no socket yet), idle or busy."""

    name: str
    title: str
    plan: LimitPlan
    alive: bool = False
    forked: bool = False  # its process has begun
    leaving: bool = False  # killed, or done with its one task; it takes no order until its end was reported
    killed_for: str = ""  # why the broker had it killed
    greeted: bool = False  # it has said hello: it is inside its limits
    socket: int | None = None  # the connection's file descriptor, by which its loss is reported
    identity: bytes = b""
    has_run_before: bool = False  # it has had an order before, and will be quicker with the next
    exit: Exited | None = None  # reported by the zygote, not settled yet
    since_s: float = 0.0  # when it began what it is doing now, by the broker's clock
    losses: int = 0  # processes that were lost with the order at hand
    lost_by: str = ""  # how the last one was
    order: Order | None = None
    load: int = 0  # of that order
    slot: Slot | None = None  # of the shared memory; it may write there until it has answered or ended
    sent_s: float | None = None

    @property
    def is_service(self) -> bool:
        return self.name.startswith(SERVICE)

    @property
    def is_free(self) -> bool:
        return self.order is None and not self.leaving


class Admission:
    def __init__(self, capacity: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.busy: dict[str, Worker] = {}  # those who have an order
        self._services: list[Worker] = []
        self.capacity = capacity
        self._load = 0  # of the orders of the busy
        self._waiting: list[tuple[Urgency, int, Order]] = []  # a heap of orders that nobody was given yet

    def enlist(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        if worker.is_service:
            self._services.append(worker)

    def queue(self, order: Order) -> None:
        """Have an order wait until the host can honour it."""
        worker = self.workers.get(order.worker)
        has_run_before = worker is None or worker.has_run_before
        urgency = (order.start_s, -order.expected_s, has_run_before, order.task)
        heapq.heappush(self._waiting, (urgency, _parts(order.load), order))

    def admit(self) -> Worker | None:
        """Give the next order out if the host can honour its load; gives who got it.

        By device start time; of those that start together the longest come first, and of equals a process's first,
        which takes a little longer: so all cores are busy to the end.
        """
        if not self._waiting:
            return None
        _, load, order = self._waiting[0]
        if self.busy and self._load + load > _parts(self.capacity):
            return None
        worker = self._worker_for(order)
        if worker is None:
            return None
        heapq.heappop(self._waiting)
        worker.order, worker.load, worker.sent_s = order, load, None
        worker.has_run_before, worker.losses = True, 0
        self.busy[worker.name] = worker
        self._load += load
        return worker

    def free(self, worker: Worker) -> None:
        """Its order has come to an end."""
        self._load -= worker.load
        worker.order = None
        del self.busy[worker.name]

    def drop(self, task: int) -> Worker | None:
        """Nobody asks for this any more: it waits no longer. Gives who is at work on it and no longer need be."""
        self._waiting = [entry for entry in self._waiting if entry[2].task != task]
        heapq.heapify(self._waiting)
        for worker in self.busy.values():
            if worker.order is not None and worker.order.task == task:
                self.free(worker)
                return worker
        return None

    def _worker_for(self, order: Order) -> Worker | None:
        if order.worker != SERVICE:
            worker = self.workers[order.worker]
            return worker if worker.is_free else None
        return next((worker for worker in self._services if worker.is_free), None)


def _parts(load: float) -> int:
    """A load in millionths of a core, rounded down: what fits must not fail to by rounding."""
    return int(load * 1e6 + 1e-3)
