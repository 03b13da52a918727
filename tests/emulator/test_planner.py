"""Plans in device seconds against hand-computed ones."""

from __future__ import annotations

import msgspec
import pytest

from fleetbed.emulator.planner import Plan, Planner
from fleetbed.models.base import InputSpec
from fleetbed.models.families import family
from fleetbed.models.work import Work
from fleetbed.profiles.experiment import Optimizer
from fleetbed.profiles.resolve import load_device
from fleetbed.profiles.types import Device, Throttle

WORK = Work(steps=10, batch=4)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(
        source="calibrated",
        family=family("resnet-stage", {"base_width": 4}),
        spec=InputSpec((3, 32, 32), 10),
        optimizer=Optimizer(),
        host_gflops=20.0,
        seconds=lambda _: 0.5,  # every step, on the host
    )


@pytest.fixture(scope="module")
def device() -> Device:
    """A tenth of the host's rate, so a step takes 5 s on it."""
    found = load_device("raspberry-pi-4b-4gb", (), "")
    cpu = msgspec.structs.replace(found.cpu, fp32_gflops=2.0)
    return msgspec.structs.replace(found, trains_on="cpu", cpu=cpu, train_scale=1.0, throttle=None)


def plan(planner: Planner, device: Device, work: Work = WORK) -> Plan:
    return planner.plan(device, "resnet10", work, 0)


def test_a_cool_device_keeps_its_rate(planner: Planner, device: Device) -> None:
    found = plan(planner, device)
    assert (found.step_s, found.total_s) == (pytest.approx(5.0), pytest.approx(50.0))


def test_a_hot_device_goes_on_at_a_part_of_its_rate(planner: Planner, device: Device) -> None:
    hot = msgspec.structs.replace(device, throttle=Throttle(after_s=20.0, rate=0.5))
    found = plan(planner, hot)
    assert found.total_s == pytest.approx(20.0 + 30.0 / 0.5)
    assert found.step_s == pytest.approx(8.0)  # steps are paced evenly
    assert found.flops == plan(planner, device).flops
    short = msgspec.structs.replace(WORK, steps=4)
    assert plan(planner, hot, short) == plan(planner, device, short)


def test_the_modelled_time_is_flops_over_the_rate(planner: Planner, device: Device) -> None:
    assert planner.modelled_s(device, "resnet10", WORK) == pytest.approx(plan(planner, device).flops / 2e9)
