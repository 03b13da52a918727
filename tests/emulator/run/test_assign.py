"""`model.assign`: the experiment fixes the variant of each client, whatever fits the devices."""

from __future__ import annotations

import pytest

from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.engine.participant import ClientProgress
from fleetbed.emulator.engine.timing import Modelled, TrainingCosts
from fleetbed.emulator.run.fitting import choose_variants, try_out
from fleetbed.emulator.run.preparation import prepare_variants
from fleetbed.models.work import Work
from fleetbed.profiles import BadInput, load_experiment, runs
from fleetbed.profiles.types import Device

pytestmark = pytest.mark.usefixtures("own_cache")
MIB = 1 << 20


def laid_out(assign: str, algorithm: str = "{name: heteroavg}", *more: str) -> Layout:
    sets = (f"model.assign={assign}", f"algorithms=[{algorithm}]", "data.train_limit=400", "data.test_limit=100")
    return lay_out(runs(load_experiment("demo", sets=(*sets, "timing.source=modelled", *more)))[0], ())


def no_time(device: Device, variant: str, work: Work) -> float:
    raise AssertionError("what is assigned is not chosen by time")


def test_a_client_gets_its_assigned_variant_even_if_it_does_not_fit() -> None:
    # at full width and batch 256 the largest ResNet is beyond the smallest board
    layout = laid_out("[resnet26, resnet10]", "{name: heteroavg}", "model.options={}", "training.batch=256")
    choices = choose_variants(layout, no_time)
    assert [choices[number].variant for number in range(8)] == ["resnet26"] * 4 + ["resnet10"] * 4
    assert {choice.reason for choice in choices.values()} == {"the experiment assigns it"}
    smallest = layout.specs[0].device
    assert choices[0].cost.memory_bytes > smallest.cap_mib * MIB  # predicted and recorded all the same
    assert choices[0].cost.memory_bytes > choices[7].cost.memory_bytes


def test_assigned_variants_are_neither_tried_nor_limited() -> None:
    class Trial:
        def try_out(self, name: str, variant: str, samples: int, cap_bytes: int) -> str | None:
            raise AssertionError(f"{variant} was tried out")

    layout = laid_out("[resnet10, resnet14]")
    choices = choose_variants(layout, no_time)
    assert try_out(layout, choices, Trial()) == choices
    optimizer = layout.config.experiment.training.optimizer
    timing = Modelled(TrainingCosts(layout.family, layout.dataset.spec, optimizer))
    clients = {number: ClientProgress("resnet10") for number in range(8)}
    for assigned, capped in ((layout, False), (laid_out("[]"), True)):
        found, _ = prepare_variants(assigned, timing, None, clients, Observer())
        assert {who.capped for who in found.participants.values()} == {capped}


def test_a_variant_for_all_wins() -> None:
    layout = laid_out("[resnet10, resnet26]", "{name: fedavg, variant: resnet18}")
    choices = choose_variants(layout, no_time)
    assert {choice.variant for choice in choices.values()} == {"resnet18"}
    assert {choice.reason for choice in choices.values()} == {"the experiment gives every client this variant"}


def test_the_method_sees_only_assigned_variants() -> None:
    """fedhenn_homo takes clients of one variant alone, and the family has five."""
    pool = ("data.public=64",)
    laid_out("[resnet14]", "{name: fedhenn_homo, params: {rad: 64}}", *pool)
    with pytest.raises(BadInput, match="resnet14, resnet26 are in use"):
        laid_out("[resnet26, resnet14]", "{name: fedhenn_homo, params: {rad: 64}}", *pool)


@pytest.mark.parametrize(
    ("assign", "more", "expected"),
    [
        ("[resnet10, resnet17]", (), "model.assign, of the family resnet-stage: there is no variant 'resnet17'"),
        ("[resnet10]", ("model.variants=[resnet14]",), "model.assign, of the family resnet-stage: there is no variant"),
        (f"[{', '.join(['resnet10'] * 9)}]", (), "model.assign has 9 variants, but the fleet has 8 clients"),
    ],
)
def test_bad_assignments(assign: str, more: tuple[str, ...], expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        laid_out(assign, "{name: heteroavg}", *more)
    assert str(caught.value).startswith(expected), str(caught.value)
