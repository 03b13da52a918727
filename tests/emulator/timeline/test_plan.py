"""The plan of work in phases: how long its first steps take, and what becomes of it on a hot device."""

from __future__ import annotations

import msgspec
import pytest

from fleetbed.emulator.timeline.plan import Pace, Plan, plan_of
from fleetbed.models.base import InputSpec
from fleetbed.models.cost.operations import compute_seconds
from fleetbed.models.cost.predict import cost
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Pass, Phase, Work
from fleetbed.profiles.experiment import Optimizer
from fleetbed.profiles.resolve import load_device
from fleetbed.profiles.types import Throttle

PLAN = Plan(paces=(Pace(3, 2.0), Pace(2, 5.0)), total_s=18.0, flops=1.0)
HEAD = Phase(steps=6, batch=4, trains="classifier", each_step=(Pass("forward", "features", 4),))
WORK = Work(earlier=(HEAD,), steps=2, batch=4)
BOARD = msgspec.structs.replace(load_device("raspberry-pi-4b-4gb", (), ""), throttle=None)


@pytest.mark.parametrize(("steps", "seconds"), [(0, 0), (1, 2), (3, 6), (4, 11), (5, 16), (9, 16)])
def test_the_first_steps_are_those_of_the_first_phase(steps: int, seconds: float) -> None:
    assert PLAN.first_s(steps) == seconds
    assert PLAN.steps_s == 16


def plan(work: Work, throttle: Throttle | None = None) -> Plan:
    found = cost(family("resnet-stage", {"base_width": 4}), "resnet10", InputSpec((3, 32, 32), 10), work, Optimizer())
    return plan_of(msgspec.structs.replace(BOARD, throttle=throttle), found, work)


def test_a_phase_has_the_pace_of_its_own_step() -> None:
    found, plain = plan(WORK), plan(Work(steps=2, batch=4))
    assert [pace.steps for pace in found.paces] == [6, 2]
    assert found.paces[1] == plain.paces[0]
    assert found.paces[0].step_s < plain.paces[0].step_s  # no gradients below the head
    assert found.total_s == pytest.approx(found.steps_s)


@pytest.mark.parametrize(("steps", "paces"), [(4, [4]), (6, [6]), (7, [6, 1])])
def test_a_cut_keeps_the_paces_and_drops_phases_without_steps(steps: int, paces: list[int]) -> None:
    cut, whole = plan(WORK.cut(steps)), plan(WORK)
    assert [pace.steps for pace in cut.paces] == paces
    assert [pace.step_s for pace in cut.paces] == [pace.step_s for pace in whole.paces[: len(paces)]]
    assert cut.total_s == pytest.approx(whole.first_s(steps))


def test_a_hot_device_slows_all_phases_alike() -> None:
    cool = plan(WORK)
    hot = plan(WORK, Throttle(after_s=cool.total_s / 2, rate=0.5))
    assert hot.total_s == pytest.approx(1.5 * cool.total_s)
    assert [p.step_s for p in hot.paces] == pytest.approx([1.5 * p.step_s for p in cool.paces])
    assert hot.steps_s == pytest.approx(hot.total_s)


def test_what_comes_after_the_last_step_is_beside_the_steps() -> None:
    once = msgspec.structs.replace(WORK, once=(Pass("forward", "all", 100),))
    found = plan(once)
    assert found.paces == plan(WORK).paces
    assert found.total_s > found.steps_s


def test_seconds_are_those_of_the_work_by_class() -> None:
    found = cost(family("resnet-stage", {"base_width": 4}), "resnet10", InputSpec((3, 32, 32), 10), WORK, Optimizer())
    assert plan(WORK).first_s(1) == compute_seconds(BOARD, found.steps[0])
