"""The check of predicted memory: its arithmetic, and a few real processes."""

from __future__ import annotations

import pytest

from fleetbed.emulator.checks.memory_check import (
    MemoryResult,
    Meter,
    checked_methods,
    compare_memory,
    method_cases,
    predict,
    standard_cases,
    summarise_memory,
    to_markdown,
)
from fleetbed.emulator.checks.memory_meter import Case
from fleetbed.models.base import InputSpec
from fleetbed.models.cost.predict import cost
from fleetbed.models.families.lookup import family
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer

MIB = 1 << 20
IMAGE = InputSpec((3, 32, 32), 10)
METHODS = ("fedavg", "scaffold")  # by default SCAFFOLD holds two models more


def result(predicted: int, measured: int, batch: int = 8) -> MemoryResult:
    return MemoryResult(Case("resnet-stage", "resnet10", IMAGE, batch, Optimizer()), predicted * MIB, measured * MIB)


def test_errors_are_against_the_measurement_and_lose_their_sign() -> None:
    results = [result(110, 100), result(80, 100, batch=64), result(95, 100)]
    assert [round(each.error, 6) for each in results] == [0.1, -0.2, -0.05]
    found = summarise_memory(results)
    assert (found.cases, round(found.median, 6), round(found.worst, 6)) == (3, 0.1, 0.2)
    assert found.worst_case.batch == 64


def test_the_page_holds_every_case_and_the_summary() -> None:
    page = to_markdown([result(110, 100), result(80, 100, batch=64)], "memory: cgroup v1")
    assert "the median error is 15.0%, the worst 20.0% (fedavg on resnet-stage resnet10, sgd, batch 64)." in page
    assert "| resnet-stage | resnet10 | fedavg | 3x32x32 | sgd | 64 | 80.0 | 100.0 | -20.0% |" in page
    assert "memory: cgroup v1" in page


def test_standard_cases_are_the_ends_and_the_middle_of_each_family() -> None:
    cases = list(standard_cases(["resnet-stage", "lstm"], [8, 16], every=False))
    assert len(cases) == (3 + 2) * 2 * 2
    assert {case.variant for case in cases} == {"resnet10", "resnet18", "resnet26", "lstm1", "lstm2"}
    assert {case.optimizer.name for case in cases} == {"sgd", "adam"}
    assert len(list(standard_cases(["resnet-stage"], [8], every=True))) == 5 * 2
    made_for = {
        case.family: case.method for case in standard_cases(["resnet-exit", "resnet-segment"], [8], every=False)
    }
    assert made_for == {"resnet-exit": "scalefl", "resnet-segment": "fedepth"}


def test_every_method_is_checked_on_a_family_that_it_goes_with() -> None:
    methods = checked_methods()
    assert {"scaffold", "moon", "fedrep", "heterofl", "fedproto", "fd", "fedmd", "fedhenn", "depthfl"} <= set(methods)
    assert not {"fedavg", "inco"} & set(methods)
    assert [case.family for case in method_cases(["fedmd", "depthfl"], [8])] == [
        *["resnet-stage"] * 2,
        *["resnet-depth"] * 2,
    ]
    cases = list(method_cases(["scaffold", "heterofl"], [8, 16, 64]))
    assert [(case.method, case.family, case.batch) for case in cases] == [
        *[("scaffold", "resnet-stage", 16)] * 2,
        *[("heterofl", "resnet-width", 16)] * 2,
    ]
    assert "plain sgd" in MemoryResult(cases[0], MIB, MIB).cells
    with pytest.raises(BadInput, match="--method is inco, which is not checked by itself; possible are"):
        list(method_cases(["inco"], [8]))


def test_what_a_method_declares_is_predicted() -> None:
    plain, variates = (Case("resnet-width", "resnet26-sixteenth", IMAGE, 4, Optimizer(), m) for m in METHODS)
    sizes = cost(family("resnet-width"), "resnet26-sixteenth", IMAGE, Work(steps=1, batch=4), Optimizer())
    assert predict(variates) - predict(plain) == 2 * sizes.state_bytes


@pytest.mark.slow
@pytest.mark.root
def test_prediction_holds_for_real_processes() -> None:
    cases = [
        Case("resnet-width", "resnet26-sixteenth", IMAGE, 16, Optimizer()),
        Case("resnet-stage", "resnet10", IMAGE, 16, Optimizer(name="adam")),
        Case("fedhe-cnn", "model9", IMAGE, 16, Optimizer()),
        Case("resnet-exit", "level2", IMAGE, 16, Optimizer(), "scalefl"),
        Case("resnet-depth", "depth3", IMAGE, 16, Optimizer(name="adam"), "depthfl"),
        Case("resnet-segment", "resnet26-in-12", IMAGE, 16, Optimizer(), "fedepth"),
        Case("lstm", "lstm1", InputSpec((25,), 2, 10_000), 64, Optimizer()),
        Case("resnet-stage", "resnet10", IMAGE, 8, Optimizer(momentum=0.0), "scaffold"),
    ]
    with Meter() as meter:
        if "memory: cgroup" not in meter.backend:
            pytest.skip(f"no memory cgroup can be written here ({meter.backend})")
        results = [compare_memory(case, meter) for case in cases]
    assert max(abs(each.error) for each in results) <= 0.25, summarise_memory(results).sentence
