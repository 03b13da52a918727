"""What the pace of a run follows from: how its tasks went."""

from __future__ import annotations

import pytest

from fleetbed.emulator.dilation import ENOUGH, LOOKED_AT, SLOWEST, Dilation
from fleetbed.emulator.pacing import BUSY_LOAD, LARGEST_LOAD


def noted(dilation: Dilation, times: int, *, load: float, overrun: float = 1.0, spread: float = 1.0) -> float:
    """Tasks that fill this part of a core at a dilation of 2: a quicker pace makes it more."""
    for _ in range(times):
        now = dilation.of(spread)
        on_a_core = dilation.spread(now)
        dilation.note(dilation=now, spread=on_a_core, load=load * 2 / now, overrun=overrun)
    return dilation.of(spread)


def test_it_waits_until_enough_is_known() -> None:
    dilation = Dilation(2.0, fixed=False)
    assert noted(dilation, ENOUGH - 1, load=0.7) == 2.0
    assert noted(dilation, 1, load=0.7) < 2.0


def test_tasks_come_to_fill_what_they_may() -> None:
    dilation = Dilation(2.0, fixed=False)
    now = noted(dilation, 100, load=0.7)
    assert 0.7 * 2 / now == pytest.approx(BUSY_LOAD)


def test_those_who_share_a_core_fill_what_they_may_together() -> None:
    dilation = Dilation(2.0, fixed=False)
    for load in (0.5, 0.9) * 20:
        noted(dilation, 1, load=load, spread=3.0)
    assert 0.9 * 2 / dilation.now == pytest.approx(BUSY_LOAD)  # each alone: the largest counts
    assert 3 * 0.7 * 2 / dilation.of(3.0) == pytest.approx(BUSY_LOAD)  # three: what they need on average
    assert dilation.spread(dilation.of(3.0)) == pytest.approx(3.0)


def test_those_who_share_a_core_and_are_late_get_more_time() -> None:
    dilation = Dilation(2.0, fixed=False)
    assert noted(dilation, ENOUGH, load=0.5, overrun=1.2, spread=2.0) == pytest.approx(2 * 2.4)


def test_a_host_slower_than_was_thought_gets_more_time() -> None:
    dilation = Dilation(2.0, fixed=False)
    assert noted(dilation, 100, load=0.99) == pytest.approx(2.0 * 0.99 / BUSY_LOAD)


def test_tasks_that_wait_for_each_other_are_late_though_they_compute_little() -> None:
    dilation = Dilation(2.0, fixed=False)
    assert noted(dilation, ENOUGH, load=0.5, overrun=1.2) == pytest.approx(2.4)


def test_two_late_tasks_of_forty_change_nothing_and_five_do() -> None:
    dilation = Dilation(2.0, fixed=False)
    quick = noted(dilation, 100, load=0.7)
    assert noted(dilation, 2, load=0.7, overrun=1.5) == pytest.approx(quick)
    assert noted(dilation, 5, load=0.7, overrun=1.5) > 1.3 * quick


def test_what_is_long_past_is_forgotten() -> None:
    dilation = Dilation(2.0, fixed=False)
    noted(dilation, 30, load=0.7, overrun=1.3)
    assert noted(dilation, LOOKED_AT, load=0.7) == pytest.approx(2 * 0.7 / BUSY_LOAD)


def test_it_is_never_quicker_than_the_ceilings_of_the_clients_allow() -> None:
    dilation = Dilation(2.0, fixed=False)
    assert noted(dilation, 100, load=0.1) == pytest.approx(2.0 * LARGEST_LOAD / BUSY_LOAD)


def test_a_method_that_does_more_than_it_declares_does_not_slow_a_run_down_for_ever() -> None:
    dilation = Dilation(2.0, fixed=False)
    assert noted(dilation, 1000, load=0.5, overrun=1.05) == 2.0 * SLOWEST


def test_a_number_that_was_asked_for_stays() -> None:
    dilation = Dilation(2.0, fixed=True)
    assert noted(dilation, 100, load=0.3, overrun=1.5) == 2.0
    assert dilation.of(3.0) == 2.0
    assert dilation.spread(2.0) == 1.0
