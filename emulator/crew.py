"""The crew: who there is to work for a run, which orders wait, and who may begin.

Never more load is admitted than the host can honour. Loads are summed in whole numbers, millionths of a core: sums of
floats that come and go would drift.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from fleetbed.emulator.bench import Bench
from fleetbed.emulator.executor import SERVICE, Order
from fleetbed.emulator.limits.plan import LimitPlan
from fleetbed.emulator.messages import Exited
from fleetbed.emulator.shelf import Space

Urgency = tuple[float, float, bool, int]  # the smallest goes first; its last part, the task, is nobody else's


@dataclass
class Worker:
    """A worker as the broker sees it: not started, starting (no socket yet), idle or busy."""

    name: str
    title: str
    plan: LimitPlan
    alive: bool = False
    leaving: bool = False  # killed, or done with its one task; it takes no order until its end was reported
    greeted: bool = False  # it has said hello: it is inside its limits
    socket: int | None = None  # the connection's file descriptor, by which its loss is reported
    identity: bytes = b""
    seasoned: bool = False  # it has had an order before, and will be quicker with the next
    exit: Exited | None = None  # reported by the zygote, not settled yet
    exit_s: float = 0.0
    order: Order | None = None
    load: int = 0  # of that order
    places: list[Space] = field(default_factory=list)  # of what it was sent
    room: Space | None = None  # for its answer; it may write there until it has answered or ended
    bench: Bench | None = None  # where it trains, until it has answered or ended
    sent_s: float | None = None

    @property
    def is_service(self) -> bool:
        return self.name.startswith(SERVICE)

    @property
    def is_free(self) -> bool:
        return self.order is None and not self.leaving


class Crew:
    def __init__(self, capacity: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.busy: dict[str, Worker] = {}  # those who have an order
        self._services: list[Worker] = []
        self._capacity = _parts(capacity)
        self._load = 0  # of the orders of the busy
        self._waiting: list[tuple[Urgency, int, Order, list[Space]]] = []  # a heap of orders that nobody was given yet

    def enlist(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        if worker.is_service:
            self._services.append(worker)

    def queue(self, order: Order, places: list[Space]) -> None:
        """Have an order wait, whose tensors lie in these places, until the host can honour it."""
        worker = self.workers.get(order.worker)
        seasoned = worker is None or worker.seasoned
        urgency = (order.start_s, -order.expected_s, seasoned, order.task)
        heapq.heappush(self._waiting, (urgency, _parts(order.load), order, places))

    def admit(self) -> Worker | None:
        """Give the next order out if the host can honour its load; gives who got it.

        By device start time; of those that start together the longest come first, and of equals a process's first,
        which takes a little longer: so all cores are busy to the end.
        """
        if not self._waiting:
            return None
        _, load, order, places = self._waiting[0]
        if self.busy and self._load + load > self._capacity:
            return None
        worker = self._worker_for(order)
        if worker is None:
            return None
        heapq.heappop(self._waiting)
        worker.order, worker.load, worker.places, worker.sent_s = order, load, places, None
        worker.seasoned = True
        self.busy[worker.name] = worker
        self._load += load
        return worker

    def free(self, worker: Worker) -> None:
        """Its order has come to an end."""
        self._load -= worker.load
        worker.order, worker.places = None, []
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
