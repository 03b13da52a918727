"""What a task is charged that was cut off: the bytes, seconds, FLOPs and joules until then, and no more."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from handmade_tasks import make_task
from hypothesis import given
from hypothesis import strategies as st

from fleetbed.emulator.engine.task import task_row
from fleetbed.emulator.records.tables import TaskRow
from fleetbed.emulator.timeline.events import Event, Kind, Timeline
from fleetbed.emulator.timeline.network import Pipe, Transfer
from fleetbed.profiles.types import Cpu, Device, Memory, Power

DEVICE = Device(
    title="board",
    trains_on="cpu",
    cpu=Cpu(description="cpu", cores=1, fp32_gflops=2.0),
    memory=Memory(installed_mib=999, visible_mib=999, available_mib=500, runtime_mib=50),
    link="link",
    power=Power(load_w=5.0, idle_w=2.0),
)
transfers = st.lists(
    st.tuples(
        st.floats(1.0, 1e6),  # bits
        st.floats(0.1, 1e4),  # bit/s
        st.floats(0.0, 2.0),  # delay
    ),
    min_size=1,
    max_size=6,
)


def begun(sizes: list[tuple[float, float, float]], capacity_bit_s: float, kind: Kind) -> Timeline:
    line = Timeline(Pipe(capacity_bit_s), Pipe(capacity_bit_s))
    for number, (bits, limit, delay) in enumerate(sizes):
        line.send(kind, Transfer(number, number, bits, limit, delay))
    return line


def passed_by(line: Timeline, count: int, moment_s: float) -> dict[int, float]:
    """The part of each transfer that has passed when the timeline has come to a moment; arrived ones are left out."""
    line.add(Event(moment_s, Kind.TIMER))
    under_way = set(range(count))
    while (event := line.pop()) is not None and event.kind is not Kind.TIMER:
        under_way.remove(event.task)
    return {number: line.forget(number) for number in sorted(under_way)}


@given(transfers, st.floats(0.1, 2e4), st.sampled_from([Kind.UPLOADED, Kind.DOWNLOADED]), st.lists(st.floats(0.0, 1e3)))
def test_no_transfer_is_charged_more_than_its_links_let_through(
    sizes: list[tuple[float, float, float]], capacity: float, kind: Kind, moments: list[float]
) -> None:
    found = [(moment, passed_by(begun(sizes, capacity, kind), len(sizes), moment)) for moment in sorted(moments)]
    for moment, parts in found:
        bits = {number: part * sizes[number][0] for number, part in parts.items()}
        for number, (size, limit, _) in enumerate(sizes):
            assert -1e-9 <= bits.get(number, 0.0) <= size
            assert bits.get(number, 0.0) <= limit * moment * (1 + 1e-9) + 1e-9 * size
        assert sum(bits.values()) <= capacity * moment * (1 + 1e-9) + 1e-6
        if len(parts) == len(sizes) and max(parts.values()) < 1:  # all had the link to themselves from the start
            rate = min(capacity, sum(limit for _, limit, _ in sizes))
            assert sum(bits.values()) == pytest.approx(rate * moment, rel=1e-9, abs=1e-6 * sum(s for s, _, _ in sizes))
    for (_, before), (_, after) in pairwise(found):
        assert all(part >= before[number] - 1e-12 for number, part in after.items())


@given(transfers, st.floats(0.1, 2e4), st.floats(0.0, 500.0), st.floats(0.0, 500.0))
def test_a_timeline_that_was_stored_in_between_cuts_at_the_same_bytes(
    sizes: list[tuple[float, float, float]], capacity: float, first_s: float, then_s: float
) -> None:
    line = begun(sizes, capacity, Kind.UPLOADED)
    line.add(Event(first_s, Kind.RATE))
    arrived = set()
    while (event := line.pop()) is not None and event.kind is not Kind.RATE:
        arrived.add(event.task)
    copy = msgspec.json.decode(msgspec.json.encode(line), type=Timeline)
    parts = []
    for each in (line, copy):
        each.add(Event(first_s + then_s, Kind.TIMER))
        while (event := each.pop()) is not None and event.kind is not Kind.TIMER:
            pass
        parts.append([each.forget(number) for number in range(len(sizes)) if number not in arrived])
    assert parts[0] == parts[1]


def test_what_has_left_its_pipe_and_is_only_delayed_has_passed_whole() -> None:
    line = begun([(10.0, 10.0, 5.0)], 100.0, Kind.UPLOADED)
    assert passed_by(line, 1, 3.0) == {0: 1.0}
    assert line.pop() is None


def test_a_link_that_is_down_lets_nothing_pass() -> None:
    line = begun([(100.0, 10.0, 0.0)], 100.0, Kind.UPLOADED)
    line.add(Event(2.0, Kind.RATE, 0, 0))
    line.pop()
    line.limit(0, 0.0)
    assert passed_by(line, 1, 50.0) == {0: pytest.approx(0.2)}


# a task that downloads from 10 s to 12 s, computes until 20 s and uploads until 25 s
MOMENTS = {"downloaded_s": 12.0, "compute_start_s": 12.0, "compute_end_s": 20.0, "uploaded_s": 25.0}


def row_at(moment_s: float) -> TaskRow:
    """Of the task, cut off at a moment."""
    task = make_task(dispatched_s=10.0, plan_s=8.0, flops=800.0, bytes_down=200)
    for name, reached_s in MOMENTS.items():
        if reached_s <= moment_s:
            setattr(task, name, reached_s)
    passed = (moment_s - 10.0) / 2.0
    if task.compute_end_s is not None:
        task.bytes_up = 500
        passed = (moment_s - 20.0) / 5.0
    task.cut(passed if task.compute_start_s is None or task.compute_end_s is not None else 1.0)
    task.ended_s = moment_s
    return task_row(task, DEVICE)


@pytest.mark.parametrize(
    ("moment_s", "down", "up", "flops", "joules"),
    [
        (10.0, 0, None, 0.0, 0.0),
        (11.0, 100, None, 0.0, 2.0),
        (12.0, 200, None, 0.0, 4.0),
        (14.0, 200, None, 200.0, 4.0 + 10.0),
        (20.0, 200, 0, 800.0, 4.0 + 40.0),
        (22.5, 200, 250, 800.0, 4.0 + 40.0 + 5.0),
        (25.0, 200, 500, 800.0, 4.0 + 40.0 + 10.0),
    ],
)
def test_by_hand(moment_s: float, down: int, up: int | None, flops: float, joules: float) -> None:
    row = row_at(moment_s)
    assert (row.bytes_down, row.bytes_up, row.flops, row.joules) == (down, up, flops, joules)
    assert (row.plan_flops, row.plan_s) == (800.0, 8.0)


@given(st.lists(st.floats(10.0, 25.0), min_size=2, max_size=5))
def test_what_is_charged_never_falls_with_the_moment_of_the_cut(moments: list[float]) -> None:
    rows = [row_at(moment) for moment in sorted(moments)]
    for before, after in pairwise(rows):
        for name in ("bytes_down", "bytes_up", "flops", "joules"):
            assert (getattr(before, name) or 0) <= (getattr(after, name) or 0) + 1e-9


def test_an_overrun_is_reckoned_with() -> None:
    # the host took twice as long, and it was cut off on the way to that end
    task = make_task(plan_s=8.0, measured_s=16.0, flops=800.0, compute_start_s=0.0, ended_s=12.0)
    assert task.done_flops == 600.0
