"""`model.choose: common`: all runs of a study give a client the same variant, one that fits under every method."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.run.fitting import choose_variants, try_out
from fleetbed.models.cost.choose import Choice
from fleetbed.models.work import Work
from fleetbed.profiles import BadInput, load_experiment, runs
from fleetbed.profiles.experiment import RunConfig
from fleetbed.profiles.types import Device

pytestmark = pytest.mark.usefixtures("own_cache")
CASES = [
    ("[{name: heteroavg}, {name: fedin}]", "{round_s: 6.0}"),
    ("[{name: fedin, params: {z: projection}}, {name: private}, {name: fedhe}]", "{memory_margin: 0.87}"),
    ("[{name: heteroavg}, {name: fedhenn, params: {rad: 64}}, {name: fedin}]", "{memory_margin: 0.9}"),
    ("[{name: heteroavg}, {name: fedin}]", "{round_bytes: 3.0e+6}"),
]


def configs(algorithms: str, budgets: str, *sets: str, choose: str = "common") -> list[RunConfig]:
    asked = (f"algorithms={algorithms}", f"budgets={budgets}", f"model.choose={choose}", "data.public=64", *sets)
    small = ("data.train_limit=400", "data.test_limit=100", "timing.source=modelled", "training.batch=32")
    small += ("model.variants=[resnet10, resnet18, resnet26]",)
    return runs(load_experiment("demo", sets=(*small, *asked)))


def seconds(device: Device, variant: str, work: Work) -> float:
    passes = work.steps * (work.batch + sum(extra.samples for extra in work.each_step))
    return passes * (1 + int(variant.removeprefix("resnet"))) / 40 / device.rate_gflops


def chosen(config: RunConfig) -> dict[int, Choice]:
    return choose_variants(lay_out(config, ()), seconds)


def variants(found: dict[int, Choice]) -> list[str | None]:
    return [found[number].variant for number in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithms", "budgets"), CASES)
def test_all_runs_choose_the_same_variants_that_fit_under_every_method(algorithms: str, budgets: str) -> None:
    together = [chosen(config) for config in configs(algorithms, budgets)]
    apart = [chosen(config) for config in configs(algorithms, budgets, choose="per-method")]
    assert all(variants(found) == variants(together[0]) for found in together)
    assert all(found[number].reason == together[0][number].reason for found in together for number in found)
    order: list[Any] = [None, *lay_out(configs(algorithms, budgets)[0], ()).family.variants]
    smallest = [min(column, key=order.index) for column in zip(*map(variants, apart), strict=True)]
    assert variants(together[0]) == smallest  # these families grow with every variant
    assert all(choice.reason.startswith("common to ") for choice in together[0].values())
    for own, alone in zip(together, apart, strict=True):  # what is predicted is of the run's own method
        assert all(own[n].cost == alone[n].cost for n in own if own[n].variant == alone[n].variant)


@pytest.mark.slow
def test_the_reason_names_the_method_that_stopped_the_next_variant() -> None:
    methods = "[{name: heteroavg}, {name: fedhenn, label: ours, params: {rad: 64}}]"
    asked = (methods, "{memory_margin: 0.87}", "model.variants=[]")  # all
    found = chosen(configs(*asked)[0])
    assert variants(found) != variants(chosen(configs(*asked, choose="per-method")[0]))
    assert found[0].reason.startswith("common to heteroavg, ours: resnet")
    assert " under ours, " in found[0].reason


@pytest.mark.slow
def test_an_algorithm_with_a_variant_of_its_own_takes_no_part() -> None:
    largest = "{name: heteroavg, label: AllLarge, variant: resnet26}"
    asked = configs(f"[{{name: heteroavg}}, {largest}]", "{round_s: 6.0}")
    alone = configs("[{name: heteroavg}]", "{round_s: 6.0}")
    assert variants(chosen(asked[0])) == variants(chosen(alone[0]))
    assert set(variants(chosen(asked[1]))) == {"resnet26"}


@pytest.mark.slow
def test_common_variants_are_tried_with_the_most_samples_of_any_method() -> None:
    class Trial:
        samples: list[int] = []  # noqa: RUF012 (of this test alone)

        def try_out(self, name: str, variant: str, samples: int, cap_bytes: int) -> str | None:
            self.samples.append(samples)
            return "killed" if variant == "resnet26" else None

    def tried(config: RunConfig) -> list[str | None]:
        layout: Layout = lay_out(config, ())
        return variants(try_out(layout, choose_variants(layout, seconds), Trial()))

    found = [tried(config) for config in configs("[{name: heteroavg}, {name: fedin}]", "{memory_margin: 0.1}")]
    assert found[0] == found[1]
    assert "resnet26" not in found[0]
    assert max(Trial.samples) == 64  # FedIN's pairs beside the batch, in the run of HeteroAvg too
    assert Trial.samples[: len(Trial.samples) // 2] == Trial.samples[len(Trial.samples) // 2 :]


def test_assigned_variants_leave_nothing_to_choose() -> None:
    (config,) = configs("[{name: heteroavg}]", "{}", "model.assign=[resnet10]")
    with pytest.raises(BadInput, match=r"model\.choose is common, but model\.assign fixes the variants"):
        lay_out(config, ())


def test_an_unknown_way_to_choose_is_refused() -> None:
    with pytest.raises(BadInput, match=r'model\.choose is "all", but one of common, per-method is needed'):
        configs("[{name: heteroavg}]", "{}", choose="all")
