"""The states of a worker: which transitions there are, what each one records, and that no other is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fleetbed.emulator.limits.plan import LimitPlan
from fleetbed.emulator.processes.executor import Order
from fleetbed.emulator.processes.worker_state import Worker, WorkerState
from fleetbed.emulator.wire.messages import Exited, Measure

ENDED = Exited("a", -9, oom=False, ordered=True)
ORDER = Order(
    header=Measure(task=1, variant="v", kind="train", part="all", samples=1, optimise=False),
    worker="a",
)
#: every transition, by name
ACTS: dict[str, Callable[[Worker], object]] = {
    "spawn": lambda worker: worker.spawn(b"a-1", 1.0),
    "forked": lambda worker: worker.forked(2.0),
    "greeted": lambda worker: worker.greeted(5, 3.0),
    "sent": lambda worker: worker.sent(77.0, 4.0),
    "answered": lambda worker: worker.answered(5.0, leaves=False),
    "answered its one order": lambda worker: worker.answered(5.0, leaves=True),
    "killed": lambda worker: worker.killed("it was late", 6.0),
    "exited": lambda worker: worker.exited(ENDED, 7.0),
    "settled": lambda worker: worker.settled(8.0),
}
#: the acts that lead to each state by the longest way
WAYS = {
    WorkerState.ABSENT: "",
    WorkerState.STARTING: "spawn",
    WorkerState.FORKED: "spawn forked",
    WorkerState.IDLE: "spawn forked greeted",
    WorkerState.BUSY: "spawn forked greeted sent",
    WorkerState.LEAVING: "spawn forked greeted sent,answered its one order",
    WorkerState.KILLED: "spawn killed",
    WorkerState.EXITED: "spawn exited",
}
#: the state that each act leads to, by the state before it; no other act is allowed
TABLE = {
    WorkerState.ABSENT: {"spawn": WorkerState.STARTING},
    WorkerState.STARTING: {"forked": WorkerState.FORKED, "greeted": WorkerState.IDLE},
    WorkerState.FORKED: {"greeted": WorkerState.IDLE},
    WorkerState.IDLE: {"sent": WorkerState.BUSY},
    WorkerState.BUSY: {"answered": WorkerState.IDLE, "answered its one order": WorkerState.LEAVING},
    WorkerState.LEAVING: {},
    WorkerState.KILLED: {"exited": WorkerState.EXITED},
    WorkerState.EXITED: {"settled": WorkerState.ABSENT},
}
for _state in ("STARTING", "FORKED", "IDLE", "BUSY", "LEAVING"):
    TABLE[WorkerState[_state]] |= {"killed": WorkerState.KILLED, "exited": WorkerState.EXITED}
#: reports that may come late and are ignored then
LATE = {
    "forked": set(WorkerState) - {WorkerState.STARTING},
    "answered": {WorkerState.KILLED, WorkerState.EXITED},
    "answered its one order": {WorkerState.KILLED, WorkerState.EXITED},
}


def worker_in(state: WorkerState) -> Worker:
    worker = Worker("a", "title", LimitPlan("a"), order=ORDER)
    first, *rest = WAYS[state].split(",")
    for act in (*first.split(), *rest):
        ACTS[act](worker)
    assert worker.state is state
    return worker


@pytest.mark.parametrize("state", WorkerState)
@pytest.mark.parametrize("act", ACTS)
def test_only_these_transitions_change_a_state(state: WorkerState, act: str) -> None:
    worker = worker_in(state)
    before = replace(worker)
    if act in TABLE[state]:
        ACTS[act](worker)
        assert worker.state is TABLE[state][act]
    elif state in LATE.get(act, ()):
        ACTS[act](worker)
        assert worker == before
    else:
        with pytest.raises(AssertionError, match=f"a cannot go from {state.name} to "):
            ACTS[act](worker)
        assert worker == before


def test_the_time_in_a_state_is_counted_from_its_entry() -> None:
    assert worker_in(WorkerState.STARTING).since_s == 1.0
    assert worker_in(WorkerState.FORKED).since_s == 2.0
    assert worker_in(WorkerState.BUSY).since_s == 4.0
    assert worker_in(WorkerState.LEAVING).since_s == 5.0
    assert worker_in(WorkerState.KILLED).since_s == 6.0
    assert worker_in(WorkerState.EXITED).since_s == 7.0


def test_an_order_survives_the_process_that_it_was_sent_to() -> None:
    worker = worker_in(WorkerState.BUSY)
    assert worker.sent_s == 77.0
    worker.killed("its heartbeats stopped", 5.0)
    worker.exited(ENDED, 6.0)
    assert worker.settled(7.0) is ENDED
    assert (worker.socket, worker.exit, worker.order) == (None, None, ORDER)
    assert worker.killed_for == "its heartbeats stopped"
    worker.spawn(b"a-2", 8.0)
    assert (worker.identity, worker.sent_s, worker.killed_for, worker.order) == (b"a-2", None, "", ORDER)


def test_orders_are_given_only_to_a_worker_without_one_that_is_not_on_its_way_out() -> None:
    for state in WorkerState:
        worker = worker_in(state)
        assert not worker.is_free
        worker.order = None
        on_its_way_out = state in (WorkerState.LEAVING, WorkerState.KILLED, WorkerState.EXITED)
        assert worker.is_free == (not on_its_way_out and state is not WorkerState.BUSY)
