"""The forms of timing against durations, shares and scales worked out by hand."""

from __future__ import annotations

import msgspec
import pytest
from handmade_tasks import make_task

from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.engine.timing import Enforced, Modelled, Recording, Replay, TrainingCosts
from fleetbed.emulator.machine.calibration import HostRate
from fleetbed.emulator.timeline.time_scale import ENOUGH, make_time_scale
from fleetbed.emulator.wire.messages import Trained
from fleetbed.models.base import InputSpec
from fleetbed.models.cost.operations import compute_seconds
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Work
from fleetbed.profiles.errors import FleetbedError, HostCannot
from fleetbed.profiles.experiment import Optimizer, TimeScaleChoice
from fleetbed.profiles.resolve import load_device
from fleetbed.profiles.types import Device, Throttle

WORK = Work(steps=10, batch=4)
TRAINING = TrainingCosts(family("resnet-stage", {"base_width": 4}), InputSpec((3, 32, 32), 10), Optimizer())
COST = TRAINING.of("resnet10", WORK)
FLOPS = COST.flops
RATE = HostRate(alone_gflops=20.0, busy_gflops=16.0, cores=2, alone_spread=0.0, busy_spread=0.0, other_cores=0.0)


def device(seconds: float = 50.0) -> Device:
    """A device on which the work takes so long."""
    found = msgspec.structs.replace(load_device("raspberry-pi-4b-4gb", (), ""), train_scale=1.0, throttle=None)
    return msgspec.structs.replace(found, train_scale=seconds / compute_seconds(found, COST.operations))


def enforced(scale: TimeScaleChoice = "auto") -> Enforced:
    """On a host that takes 5 s for the work, on a core that is alone."""
    return Enforced(TRAINING, RATE, lambda _, work: 0.5 * work.steps, make_time_scale(scale))


def fitted(scale: TimeScaleChoice = "auto") -> Enforced:
    timing = enforced(scale)
    timing.fit_scale([("fast", device(50.0), "resnet10", WORK), ("slow", device(200.0), "resnet10", WORK)], None)
    return timing


def answer(seconds: float, cpu_s: float) -> Trained:
    return Trained(
        task=0,
        keep=None,
        metrics={},
        steps=10,
        samples=40,
        seconds=seconds,
        cpu_s=cpu_s,
        throttled_s=None,
        peak_bytes=None,
        anon_bytes=None,
    )


def task(timing: Enforced, seconds: float = 50.0) -> Task:
    plan = timing.plan(device(seconds), "resnet10", WORK, 0)
    on_host = timing.on_host(plan, "resnet10", WORK)
    return make_task(plan_s=plan.total_s, load=on_host.load, time_scale=on_host.time_scale)


def test_a_plan_is_the_work_over_the_rate_of_the_device() -> None:
    for timing in (Modelled(TRAINING), enforced()):
        plan = timing.plan(device(), "resnet10", WORK, 3)
        assert (plan.first_s(1), plan.total_s) == (pytest.approx(5.0), pytest.approx(50.0))
        assert plan.flops == FLOPS


def test_a_hot_device_goes_on_at_a_part_of_its_rate() -> None:
    timing = Modelled(TRAINING)
    hot = msgspec.structs.replace(device(), throttle=Throttle(after_s=20.0, rate=0.5))
    plan = timing.plan(hot, "resnet10", WORK, 0)
    assert plan.total_s == pytest.approx(20.0 + 30.0 / 0.5)
    assert plan.first_s(1) == pytest.approx(8.0)  # steps are paced evenly
    assert plan.flops == FLOPS
    short = msgspec.structs.replace(WORK, steps=3)
    assert timing.plan(hot, "resnet10", short, 0) == timing.plan(device(), "resnet10", short, 0)


def test_full_speed_takes_a_core_and_keeps_to_the_plan() -> None:
    timing = Modelled(TRAINING)
    on_host = timing.on_host(timing.plan(device(), "resnet10", WORK, 0), "resnet10", WORK)
    assert (on_host.load, on_host.time_scale) == (1.0, None)
    assert timing.share(device(), "resnet10", WORK) == 1.0
    assert timing.slowdown(device(), "resnet10", WORK) is None
    assert timing.ceiling_cores(1.0) is None
    assert timing.capacity(2) == 2.0
    assert timing.measured_s(task(fitted()), answer(9.0, 9.0)) is None


def test_the_fastest_device_fills_six_tenths_of_a_busy_core() -> None:
    timing = fitted()
    # with all cores busy the work takes 5 / 0.8 s, which is to be 0.6 of the host seconds that it is given
    assert timing.scale.now == pytest.approx(5 / 0.8 / 0.6 / 50)
    plan = timing.plan(device(), "resnet10", WORK, 0)
    on_host = timing.on_host(plan, "resnet10", WORK)
    assert on_host.load == pytest.approx(0.6)
    assert on_host.expected_s == pytest.approx(5 / 0.8 / 0.6)
    assert timing.share(device(), "resnet10", WORK) == pytest.approx(0.48)
    assert timing.slowdown(device(200.0), "resnet10", WORK) == pytest.approx(40.0)
    assert timing.ceiling_cores(0.48) == pytest.approx(0.96)
    assert timing.capacity(2) == pytest.approx(1.2)
    assert timing.meta()["time_scale"] == timing.scale.now


def test_a_fleet_that_is_faster_than_the_host_is_said_so() -> None:
    fast = [("fast", device(5.0), "resnet10", WORK)]
    assert enforced().fit_scale(fast, None) == (
        "the fleet is faster than this host: a device second takes 2.08 host seconds"
    )
    assert enforced().fit_scale(fast, 3.0) is None


def test_a_scale_that_was_asked_for_is_kept_or_refused() -> None:
    assert fitted(1.0).scale.now == 1.0
    with pytest.raises(HostCannot, match=r"timing\.time_scale: 0\.1 is too small for this host: fast would need"):
        fitted(0.1)


def test_the_default_scale_stays_whatever_tasks_take() -> None:
    timing = fitted()
    before = timing.scale.now
    for _ in range(3 * ENOUGH):
        timing.learn(task(timing), answer(50.0 * before * 1.5, 4.0))
    assert timing.scale.now == before


def test_a_fast_scale_goes_by_what_tasks_took() -> None:
    timing = fitted("fast")
    start = timing.scale.now
    for _ in range(ENOUGH - 1):
        timing.learn(task(timing), answer(50.0 * start, 7.0))
    assert timing.scale.now == start
    timing.learn(task(timing), answer(50.0 * start, 7.0))
    # each had 7 s of CPU to do in 50 device seconds, and may fill 0.9 of a core
    assert timing.scale.now == pytest.approx(7 / 0.9 / 50)
    assert timing.ceiling_cores(0.48) == pytest.approx(2 * 0.48 * 1.5)
    for _ in range(ENOUGH):
        timing.learn(task(timing), answer(50.0 * timing.scale.now * 9, 5.0))
    assert timing.scale.now == pytest.approx(2 * start)  # never slower than that


def test_tasks_of_slow_devices_count_as_if_the_fastest_had_done_them() -> None:
    timing = fitted("fast")
    for _ in range(ENOUGH):
        timing.learn(task(timing, 200.0), answer(200.0 * timing.scale.now, 7.0))
    assert timing.scale.now == pytest.approx(7 / 0.9 / 50)


def test_what_was_measured_is_in_device_seconds() -> None:
    timing = fitted(2.0)
    assert timing.measured_s(task(timing), answer(110.0, 5.0)) == pytest.approx(55.0)


def replay() -> Replay:
    return Replay(
        TRAINING,
        Recording(
            variants={1: "resnet18", 2: None},
            compute_s={4: 30.0},
            flops={4: TRAINING.of("resnet10", msgspec.structs.replace(WORK, steps=7)).flops},
            failed={9: ("oom", "killed")},
        ),
    )


def test_a_replay_takes_what_was_recorded() -> None:
    timing = replay()
    assert timing.plan(device(), "resnet10", WORK, 4).total_s == 30.0
    assert timing.variants({0: "resnet10", 1: "resnet10", 2: "resnet10"}) == {0: "resnet10", 1: "resnet18", 2: None}
    assert timing.steps(device(), "resnet10", WORK, 4, lambda: 1) == 7
    assert timing.failure(9) == ("oom", "killed")
    assert timing.failure(4) is None
    with pytest.raises(FleetbedError, match="no duration of task 5"):
        timing.plan(device(), "resnet10", WORK, 5)


def test_others_cut_tasks_by_plan_and_know_of_no_failure() -> None:
    assert Modelled(TRAINING).steps(device(), "resnet10", WORK, 4, lambda: 3) == 3
    assert Modelled(TRAINING).failure(9) is None
