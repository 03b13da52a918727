"""Admission: the workers of a run, the orders that wait for them, and which order may begin next.

It never admits more load than the host can carry. Loads are summed in whole numbers, millionths of a core, because sums
of floats that come and go would drift.
"""

from __future__ import annotations

import heapq

from fleetbed.emulator.processes.executor import SERVICE, Order
from fleetbed.emulator.processes.worker_state import Worker

#: the order with the smallest one goes first; the last part, the number of the task, is unique
Urgency = tuple[float, float, bool, int]


class Admission:
    def __init__(self, capacity: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.assigned: dict[str, Worker] = {}  # the workers that have an order
        self.capacity = capacity
        self._services: list[Worker] = []
        self._load = 0  # of all assigned orders
        self._waiting: list[tuple[Urgency, int, Order]] = []  # a heap of the orders that are not assigned yet

    def enlist(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        if worker.is_service:
            self._services.append(worker)

    def queue(self, order: Order) -> None:
        """Queue an order until the host can carry its load."""
        worker = self.workers.get(order.worker)
        has_run_before = worker is None or worker.has_run_before
        urgency = (order.start_s, -order.expected_s, has_run_before, order.task)
        heapq.heappush(self._waiting, (urgency, _parts(order.load), order))

    def admit(self) -> Worker | None:
        """Assign the next order if the host can carry its load; returns the worker that got it.

        Orders are taken by device start time; of those with the same start the longest goes first, so that all cores
        stay busy to the end. In a tie, workers on their first task go first, because it is slower.
        """
        if not self._waiting:
            return None
        _, load, order = self._waiting[0]
        if self.assigned and self._load + load > _parts(self.capacity):
            return None
        worker = self._worker_for(order)
        if worker is None:
            return None
        heapq.heappop(self._waiting)
        worker.order, worker.load, worker.sent_s = order, load, None
        worker.has_run_before, worker.losses = True, 0
        self.assigned[worker.name] = worker
        self._load += load
        return worker

    def free(self, worker: Worker) -> None:
        """Take the order, which has ended, from its worker."""
        self._load -= worker.load
        worker.order = None
        del self.assigned[worker.name]

    def drop(self, task: int) -> Worker | None:
        """Forget an order whose outcome is no longer needed; return the worker that it was assigned to, if any."""
        self._waiting = [entry for entry in self._waiting if entry[2].task != task]
        heapq.heapify(self._waiting)
        for worker in self.assigned.values():
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
    """A load in millionths of a core, rounded down so that rounding never keeps out what fits."""
    return int(load * 1e6 + 1e-3)
