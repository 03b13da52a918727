"""The choice of a variant, on costs given by the test."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbed.models.base import Family, InputSpec, Net
from fleetbed.models.cost import choose as module
from fleetbed.models.cost.choose import Choice, Limit, choose_variant, transfer_seconds
from fleetbed.models.cost.operations import Operations
from fleetbed.models.cost.predict import Cost
from fleetbed.models.work import Work
from fleetbed.profiles.experiment import Budgets, Optimizer
from fleetbed.profiles.types import Cpu, Device, Link, Memory

MIB = 1 << 20
LINK = Link(title="link", down_mbit_s=8, up_mbit_s=2, rtt_ms=100)


class Three(Family):
    name = "three"
    shared = False
    variants = ("s", "m", "l")

    def make(self, variant: str, spec: InputSpec) -> Net:
        raise AssertionError("a choice needs no model")


def device(cap_mib: float) -> Device:
    return Device(
        title="board",
        trains_on="cpu",
        cpu=Cpu(description="cpu", cores=1, fp32_gflops=2.0),
        memory=Memory(installed_mib=9999, visible_mib=9999, available_mib=cap_mib + 50, runtime_mib=50),
        link="link",
        train_scale=1.5,
    )


@pytest.fixture
def memory_mib(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What each variant needs; a state of 1, 2 and 3 MB."""
    needed = {"s": 50.0, "m": 100.0, "l": 200.0}

    def cost(family: Family, variant: str, spec: InputSpec, work: Work, optimizer: Optimizer) -> Cost:
        size = 1 + family.variants.index(variant)
        memory = round(needed[variant] * MIB)
        return Cost(
            memory_bytes=memory,
            memory={"model": memory},
            flops=size * 1e9 * work.steps,
            operations=Operations(),
            steps=(Operations(),),
            parameters=size * 250_000,
            state_bytes=size * 1_000_000,
        )

    monkeypatch.setattr(module, "cost", cost)
    return needed


def made(cap_mib: float, seconds: Any = None, **budgets: Any) -> Choice:
    def never(variant: str, work: Work) -> float:
        raise AssertionError("time is not limited")

    return choose_variant(
        device=device(cap_mib),
        link=LINK,
        family=Three(None),
        spec=InputSpec((1, 8, 8), 2),
        work=lambda _: Work(steps=1),
        optimizer=Optimizer(),
        budgets=Budgets(**{"memory_margin": 0.0, **budgets}),
        seconds=seconds or never,
    )


def test_the_largest_variant_that_fits_and_the_limit_of_the_next(memory_mib: dict[str, float]) -> None:
    choice = made(150)
    assert choice.variant == "m"
    assert choice.cost.memory_bytes == 100 * MIB
    assert choice.stopped_by == Limit("memory", "l", 200 * MIB, 150 * MIB)
    assert choice.reason == "l needs 200 MiB, 50 more than the 150 allowed"


def test_nothing_stops_the_largest(memory_mib: dict[str, float]) -> None:
    choice = made(200)
    assert (choice.variant, choice.stopped_by) == ("l", None)
    assert choice.reason == "l is the largest variant"


def test_the_margin_stays_free(memory_mib: dict[str, float]) -> None:
    assert made(222, memory_margin=0.1).variant == "m"
    assert made(223, memory_margin=0.1).variant == "l"


def test_no_variant_fits(memory_mib: dict[str, float]) -> None:
    choice = made(40)
    assert choice.variant is None
    assert choice.cost.memory_bytes == 50 * MIB
    assert choice.stopped_by == Limit("memory", "s", 50 * MIB, 40 * MIB)
    assert choice.reason == "no variant fits: s needs 50 MiB, 10 more than the 40 allowed"


@pytest.mark.parametrize("cap_mib", [0.0, -20.0])
def test_a_device_without_any_memory_left_is_unfit(memory_mib: dict[str, float], cap_mib: float) -> None:
    choice = made(cap_mib)
    assert choice.variant is None
    assert f"{50 - cap_mib:g} more than the {cap_mib:g} allowed" in choice.reason


def test_a_middle_variant_that_does_not_fit_is_passed_over(memory_mib: dict[str, float]) -> None:
    memory_mib |= {"m": 300.0, "l": 120.0}
    assert made(150).variant == "l"
    assert made(100).variant == "s"
    assert made(100).stopped_by == Limit("memory", "m", 300 * MIB, 100 * MIB)


def test_bytes_count_both_ways(memory_mib: dict[str, float]) -> None:
    assert made(999, round_bytes=4e6).variant == "m"
    choice = made(999, round_bytes=3.9e6)
    assert choice.variant == "s"
    assert choice.reason == "m needs 3.81 MiB per round, 0.0954 more than the 3.72 allowed"


def test_time_is_computing_and_transferring(memory_mib: dict[str, float]) -> None:
    """2 MB take 2 s down and 8 s up, 0.1 s is the round trip."""
    assert transfer_seconds(LINK, 2_000_000, 2_000_000) == pytest.approx(10.1)
    asked: list[str] = []

    def seconds(variant: str, work: Work) -> float:
        asked.append(variant)
        return 5.0

    assert made(999, seconds, round_s=15.2).variant == "m"
    assert asked == ["l", "m"]
    choice = made(999, seconds, round_s=15.0)
    assert choice.variant == "s"
    assert choice.stopped_by is not None
    assert (choice.stopped_by.name, choice.stopped_by.allowed) == ("time", 15.0)
    assert choice.stopped_by.needed == pytest.approx(15.1)


def test_memory_is_named_before_the_others(memory_mib: dict[str, float]) -> None:
    choice = made(150, lambda variant, _: 999.0 if variant == "l" else 0.0, round_s=100, round_bytes=5e6)
    assert choice.variant == "m"
    assert choice.stopped_by is not None
    assert choice.stopped_by.name == "memory"
