"""Choices are tried under their real memory caps, smallest first, except those that are known to fit."""

from __future__ import annotations

import pytest

from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.run.fitting import choose_variants, try_out
from fleetbed.models.work import Work
from fleetbed.profiles import load_experiment, runs
from fleetbed.profiles.types import Device

pytestmark = pytest.mark.usefixtures("own_cache")
MIB = 1 << 20


class Trial:
    """Fits where the cap allows a step of this variant."""

    def __init__(self, needed_mib: dict[str, float]) -> None:
        self.asked: list[tuple[str, int]] = []
        self._needed = needed_mib

    def try_out(self, name: str, variant: str, samples: int, cap_bytes: int) -> str | None:
        assert name not in {known for known, _ in self.asked}, "two processes of one name"
        self.asked.append((name, cap_bytes))
        return None if self._needed.get(variant, 0) * MIB <= cap_bytes else "killed"


@pytest.fixture(scope="module")
def layout() -> Layout:
    sets = ("fleet=iot-10", "algorithms=[{name: heteroavg}]", "data.train_limit=400", "data.test_limit=100")
    config = runs(load_experiment("demo", sets=(*sets, "data.partition.kind=iid", "budgets={}")))[0]
    return lay_out(config, ())


def no_time(device: Device, variant: str, work: Work) -> float:
    raise AssertionError("no time is limited")


def test_the_smallest_cap_speaks_for_the_larger_ones(layout: Layout) -> None:
    choices = choose_variants(layout, no_time)
    assert {choice.variant for choice in choices.values()} == {"resnet26"}
    trial = Trial({})
    assert try_out(layout, choices, trial) == choices
    assert [cap for _, cap in trial.asked] == [int(min(spec.device.cap_mib for spec in layout.specs) * MIB)]


def test_those_under_the_cap_that_is_too_small_step_down_alone(layout: Layout) -> None:
    choices = choose_variants(layout, no_time)
    smallest = min(spec.device.cap_mib for spec in layout.specs)
    small = {spec.number for spec in layout.specs if spec.device.cap_mib == smallest}
    trial = Trial({"resnet26": smallest + 1})
    found = try_out(layout, choices, trial)
    assert {number for number, choice in found.items() if choice.variant == "resnet22"} == small
    assert all("did not fit: killed" in found[number].reason for number in small)
    assert all(found[number] == choices[number] for number in found if number not in small)
    assert len(trial.asked) == 3  # resnet26 and resnet22 under the smallest cap, resnet26 under the next
