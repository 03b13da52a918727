"""The arithmetic of rates by hand, and the pacer on a clock that tests wind."""

from __future__ import annotations

import pytest

from fleetbed.emulator.timeline import pacing
from fleetbed.emulator.timeline.pacing import Pacer
from fleetbed.emulator.timeline.plan import Pace
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.types import Cpu, Device, Memory


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds + 0.001  # a sleep always wakes up late


def device(rate: float, train_scale: float = 1.0) -> Device:
    return Device(
        title="t",
        trains_on="cpu",
        cpu=Cpu(description="t", cores=4, fp32_gflops=rate),
        memory=Memory(installed_mib=512, visible_mib=512, available_mib=400, runtime_mib=100),
        link="wifi4",
        train_scale=train_scale,
    )


def test_late_wake_ups_do_not_add_up() -> None:
    clock = Clock()
    pacer = Pacer([Pace(100, 0.1)], clock, clock.sleep)
    for _ in range(50):
        clock.now += 0.03  # the step's own work
        pacer.step()
    assert pacer.finish(5.0) == pytest.approx(5.001)
    assert len(clock.slept) == 50  # the first step is followed by the second at once, the last by the end


def test_a_late_step_is_made_up_for_by_the_next() -> None:
    clock = Clock()
    pacer = Pacer([Pace(100, 0.1)], clock, clock.sleep)
    pacer.step()
    clock.now += 0.25
    pacer.step()  # the third was to start at 0.1: late
    clock.now += 0.01
    pacer.step()  # at 0.2: still late
    assert clock.slept == []
    pacer.step()  # at 0.3
    assert clock.now == pytest.approx(100.301)


def test_a_client_is_at_most_one_step_ahead_of_its_plan() -> None:
    clock = Clock()
    pacer = Pacer([Pace(100, 0.1)], clock, clock.sleep)
    starts = []
    for _ in range(5):
        starts.append(clock.now - 100)
        clock.now += 0.01
        pacer.step()
    assert starts == pytest.approx([0, 0.01, 0.101, 0.201, 0.301])


def test_work_beside_the_steps_belongs_to_the_plan() -> None:
    clock = Clock()
    pacer = Pacer([Pace(100, 0.1)], clock, clock.sleep)
    pacer.step()
    clock.now += 0.05  # an evaluation after the last step
    assert pacer.finish(0.5) == pytest.approx(0.501)


def test_a_task_that_overran_ends_when_it_ends() -> None:
    clock = Clock()
    pacer = Pacer([Pace(100, 0.1)], clock, clock.sleep)
    clock.now += 3.0
    pacer.step()
    assert pacer.finish(0.1) == pytest.approx(3.0)


def test_each_phase_has_its_own_pace() -> None:
    """Two steps of 0.1 s, then steps of 0.5 s: each is planned to start when those before it have ended."""
    clock = Clock()
    pacer = Pacer([Pace(2, 0.1), Pace(2, 0.5)], clock, clock.sleep)
    starts = []
    for _ in range(4):
        starts.append(clock.now - 100)
        pacer.step()
    # a client may be one step ahead: the third may begin when the second was to, and so on
    assert starts == pytest.approx([0, 0, 0.101, 0.201])
    assert clock.now - 100 == pytest.approx(0.701)
    assert pacer.finish(1.2) == pytest.approx(1.201)


def test_steps_beyond_the_plan_are_not_held_up() -> None:
    clock = Clock()
    pacer = Pacer([Pace(1, 0.1)], clock, clock.sleep)
    for _ in range(5):
        pacer.step()
    assert clock.now - 100 == pytest.approx(0.101)


def test_slowdown() -> None:
    assert pacing.slowdown(180.0, device(22.5)) == 8.0
    assert pacing.slowdown(180.0, device(22.5, train_scale=1.5)) == 12.0


def test_the_fastest_device_gets_six_tenths_of_a_busy_core() -> None:
    # a core does 180 GFLOPS alone and 120 with all cores busy; the devices do 90 and 5.625
    slowdowns = [180 / 90, 180 / 5.625]
    scale = pacing.smallest_scale(slowdowns, 120 / 180)
    # with all cores busy, 0.6 of a core does 72 GFLOPS: a device second of 90 takes 1.25 host seconds
    assert scale == pytest.approx(90 / 72)
    assert pacing.share(slowdowns[0], scale) == pytest.approx(0.4)  # of a core alone: 72 / 180
    assert pacing.share(slowdowns[1], scale) == pytest.approx(0.025)


def test_time_is_compressed_where_the_host_is_faster_than_the_fleet() -> None:
    # 0.6 x 100 = 60 GFLOPS can be held, the only device has 6: ten times faster than life
    assert pacing.smallest_scale([100 / 6], 1.0) == pytest.approx(0.1)


def test_admitted_load_and_ceiling() -> None:
    assert pacing.capacity(2) == pytest.approx(1.2)
    assert pacing.ceiling_cores(0.4) == pytest.approx(0.8)


def test_a_time_scale_that_the_host_cannot_honour_is_refused() -> None:
    slowdowns = {"fast-board": 2.0, "slow-board": 32.0}
    pacing.check_scale(1.25, slowdowns, 120 / 180)
    with pytest.raises(HostCannot) as caught:
        pacing.check_scale(1.0, slowdowns, 120 / 180)
    assert str(caught.value) == (
        "timing.time_scale: 1 is too small for this host: fast-board would need 0.75 of a core, and 0.6 is the most "
        "that is sure to be held; use `auto`, or 1.25 or more, or timing.source `modelled`, which needs no real time"
    )
    assert caught.value.exit_code == 3
