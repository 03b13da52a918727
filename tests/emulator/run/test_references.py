"""Reference times: which passes a task is made of, and that each is measured once per host, undisturbed if possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbed.emulator.machine.calibration import Calibration, HostRate, Store
from fleetbed.emulator.processes.executor import SERVICE, Order, Outcome
from fleetbed.emulator.run.references import Reference, References, references
from fleetbed.emulator.wire.messages import Measure, Measured
from fleetbed.models.base import InputSpec
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import Model, Optimizer

pytestmark = pytest.mark.usefixtures("own_cache")
RATE = HostRate(alone_gflops=20.0, busy_gflops=16.0, cores=2, alone_spread=0.0, busy_spread=0.0, other_cores=0.0)
STEP = Reference("v", "train", "all", 4, optimise=True)
FIRST = Reference("v", "first", "all", 4, optimise=True)


class Clock:
    """An executor whose measurements are given in advance."""

    def __init__(self, *found: Measured | str) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.asked: list[Order] = []
        self._found = list(found)

    def submit(self, order: Order) -> None:
        self.asked.append(order)

    def wait(self, task: int) -> Outcome:
        assert self.asked[-1].task == task
        found = self._found.pop(0)
        if isinstance(found, str):
            return Outcome(kind="crash", detail=found)
        return Outcome(kind="ok", answer=found)

    def cancel(self, task: int) -> None: ...

    def close(self) -> None: ...


def measured(seconds: float, spread: float = 0.0, other_cores: float = 0.0) -> Measured:
    return Measured(task=0, seconds=seconds, spread=spread, other_cores=other_cores)


def made(folder: Path, clock: Clock, optimizer: Optimizer | None = None) -> References:
    """The references of a host whose calibration is in this folder."""
    store = Store(folder / "calibration.json")
    calibration = store.load("here") or Calibration("here", "2020-01-01", RATE)
    store.save(calibration)
    spec = InputSpec((1, 16, 16), 4)
    return References(calibration, store, clock, Model(family="mine"), spec, optimizer or Optimizer(), lambda _: None)


def test_a_task_is_its_steps_and_the_passes_beside_them() -> None:
    work = Work(
        steps=5,
        batch=4,
        each_step=(Pass("forward", "features", 8),),
        once=(Pass("forward", "all", 100),),
        parameter_passes=2,
    )
    assert dict(references("v", work)) == {
        FIRST: 1,
        STEP: 4,
        Reference("v", "forward", "features", 8): 5,
        Reference("v", "parameters", "all", 1): 10,
        Reference("v", "forward", "all", 100): 1,
    }
    assert dict(references("v", Work())) == {}


def test_the_time_of_work_is_the_sum_over_its_passes(tmp_path: Path) -> None:
    clock = Clock(measured(0.75), measured(0.5), measured(0.125))
    work = Work(steps=4, batch=4, once=(Pass("forward", "all", 100),))
    assert made(tmp_path, clock).host_s("v", work) == 0.75 + 3 * 0.5 + 0.125
    assert {order.worker for order in clock.asked} == {SERVICE}
    headers = [order.header for order in clock.asked]
    kinds = [(h.kind, h.samples) for h in headers if isinstance(h, Measure)]
    assert kinds == [("first", 4), ("train", 4), ("forward", 100)]
    assert len({order.task for order in clock.asked}) == 3
    assert all(order.task < -(1 << 39) for order in clock.asked), "far from the numbers of evaluations"


def test_a_pass_is_measured_once_and_kept_for_later_runs(tmp_path: Path) -> None:
    clock = Clock(measured(0.5))
    here = made(tmp_path, clock)
    assert [here.seconds(STEP), here.seconds(STEP)] == [0.5, 0.5]
    assert made(tmp_path, Clock()).seconds(STEP) == 0.5
    assert list(here.calibration.steps.values()) == [0.5]


def test_what_another_run_measured_meanwhile_is_not_measured_again(tmp_path: Path) -> None:
    waiting = made(tmp_path, Clock())
    made(tmp_path, Clock(measured(0.5))).seconds(STEP)
    assert waiting.seconds(STEP) == 0.5


def test_another_optimiser_has_times_of_its_own(tmp_path: Path) -> None:
    made(tmp_path, Clock(measured(0.5))).seconds(STEP)
    other = Optimizer(name="adam")
    assert made(tmp_path, Clock(measured(0.75)), other).seconds(STEP) == 0.75


def test_a_disturbed_measurement_is_repeated(tmp_path: Path) -> None:
    clock = Clock(measured(9.0, spread=0.5), measured(8.0, other_cores=1.0), measured(0.5))
    here = made(tmp_path, clock)
    assert here.seconds(STEP) == 0.5
    assert here.calibration.disturbed == {}


def test_one_that_is_always_disturbed_counts_at_its_quickest_and_is_not_kept(tmp_path: Path) -> None:
    here = made(tmp_path, Clock(*(measured(seconds, spread=0.5) for seconds in (3.0, 1.0, 2.0))))
    assert here.seconds(STEP) == 1.0
    assert here.calibration.warning is not None
    kept = Store(tmp_path / "calibration.json").load("here")
    assert kept is not None
    assert kept.steps == {}


def test_a_pass_that_cannot_be_measured_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FleetbedError, match=r"measuring Reference\(variant='v'.* on this host failed: out of memory"):
        made(tmp_path, Clock("out of memory")).seconds(STEP)
