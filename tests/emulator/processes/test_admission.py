"""Who may begin: by device time, as much as the host can honour, and nobody twice."""

from __future__ import annotations

from fleetbed.emulator.limits.plan import LimitPlan
from fleetbed.emulator.processes.admission import Admission
from fleetbed.emulator.processes.executor import SERVICE, Order
from fleetbed.emulator.processes.worker_state import Worker
from fleetbed.emulator.wire.messages import Exited, Measure


def crew(capacity: float, *names: str) -> Admission:
    made = Admission(capacity)
    for name in names:
        made.enlist(Worker(name, name, LimitPlan(name)))
    return made


def order(task: int, worker: str, load: float = 1.0, start_s: float = 0.0, expected_s: float = 0.0) -> Order:
    header = Measure(task=task, variant="", kind="train", part="all", samples=1, optimise=True)
    return Order(header=header, worker=worker, load=load, start_s=start_s, expected_s=expected_s)


def admitted(of: Admission) -> list[str]:
    return [worker.name for worker in iter(of.admit, None)]


def test_orders_begin_by_their_device_time_and_then_by_their_number() -> None:
    found = crew(9.0, "a", "b", "c")
    for task, worker, start_s in ((2, "a", 1.0), (1, "b", 1.0), (3, "c", 0.5)):
        found.queue(order(task, worker, start_s=start_s))
    assert admitted(found) == ["c", "b", "a"]
    assert admitted(found) == []


def test_of_those_that_start_together_the_longest_come_first() -> None:
    found = crew(9.0, "a", "b", "c")
    for task, worker, expected_s in ((1, "a", 1.0), (2, "b", 3.0), (3, "c", 2.0)):
        found.queue(order(task, worker, expected_s=expected_s))
    assert admitted(found) == ["b", "c", "a"]


def test_of_equals_that_start_together_who_is_new_comes_first() -> None:
    found = crew(9.0, "a", "b", "c")
    found.queue(order(1, "a"))
    assert admitted(found) == ["a"]
    found.free(found.workers["a"])
    for task, worker, start_s in ((2, "a", 1.0), (3, "b", 1.0), (4, "c", 2.0)):
        found.queue(order(task, worker, start_s=start_s))
    assert admitted(found) == ["b", "a", "c"]


def test_no_more_load_than_the_host_can_honour_and_exactly_as_much() -> None:
    found = crew(0.3, "a", "b", "c", "d")
    for task, worker in enumerate("abcd"):
        found.queue(order(task, worker, load=0.1))
    assert admitted(found) == ["a", "b", "c"]  # 0.1 + 0.1 + 0.1 is more than 0.3 in floats
    found.free(found.workers["b"])
    assert admitted(found) == ["d"]


def test_who_alone_is_more_than_that_works_alone() -> None:
    found = crew(1.2, "a", "b")
    found.queue(order(0, "a", load=2.0))
    found.queue(order(1, "b", load=0.1))
    assert admitted(found) == ["a"]
    found.free(found.workers["a"])
    assert admitted(found) == ["b"]


def test_one_who_is_at_work_or_leaving_gets_nothing_and_nobody_overtakes() -> None:
    found = crew(9.0, "a", "b")
    for task, worker in ((0, "a"), (1, "a"), (2, "b")):
        found.queue(order(task, worker))
    assert admitted(found) == ["a"]
    worker = found.workers["a"]
    worker.spawn(b"a-1", 0.0)
    worker.killed("as a test", 0.0)
    found.free(worker)
    assert admitted(found) == []
    worker.exited(Exited("a", -9, oom=False, ordered=True), 0.0)
    assert admitted(found) == []
    worker.settled(0.0)
    assert admitted(found) == ["a", "b"]


def test_any_service_that_is_free_will_do() -> None:
    found = crew(9.0, f"{SERVICE}-0", f"{SERVICE}-1", "a")
    for task in (-1, -2, -3):
        found.queue(order(task, SERVICE, start_s=-task))
    assert admitted(found) == [f"{SERVICE}-0", f"{SERVICE}-1"]
    found.free(found.workers[f"{SERVICE}-1"])
    assert admitted(found) == [f"{SERVICE}-1"]


def test_what_nobody_asks_for_any_more_neither_waits_nor_counts() -> None:
    found = crew(1.0, "a", "b", "c")
    for task, worker in enumerate("abc"):
        found.queue(order(task, worker))
    assert admitted(found) == ["a"]
    assert found.drop(1) is None
    assert found.drop(0) is found.workers["a"]
    assert admitted(found) == ["c"]
    assert list(found.assigned) == ["c"]
