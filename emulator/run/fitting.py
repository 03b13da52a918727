"""Chooses the variant that each client trains, and describes the choice for the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from fleetbed.emulator.engine.layout import Layout
from fleetbed.emulator.engine.participant import Participant
from fleetbed.emulator.method.algorithm import Client
from fleetbed.emulator.records.tables import ClientRow
from fleetbed.models.cost.choose import Choice, choose_variant
from fleetbed.models.cost.predict import cost
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import ClientSpec, Device

MIB = 1 << 20
Seconds = Callable[[Device, str, Work], float]
WorkOf = Callable[[str], Work]


def choose_variants(layout: Layout, seconds: Seconds) -> dict[int, Choice]:
    """Choose a variant for every client of the fleet, including clients that are unfit.

    Raises BadInput if no client fits, or if one does not fit and all must.
    """
    config = layout.config
    experiment = config.experiment
    heaviest = HeaviestWork(layout)
    assigned = layout.assigned
    compared = [] if assigned else layout.compared()
    common = {one.config.algorithm.title: HeaviestWork(one) for one in compared}
    found: dict[tuple[Any, ...], Choice] = {}
    choices: dict[int, Choice] = {}
    for spec in layout.specs:
        work = heaviest.of(spec)
        works = {title: each.of(spec) for title, each in common.items()}
        fixed = assigned.get(spec.number)
        smallest = fixed or layout.family.variants[0]
        key = (
            fixed,
            msgspec.json.encode([spec.device, spec.link]),
            msgspec.json.encode([each(smallest) for each in (work, *works.values())]),
        )
        if key not in found:
            found[key] = _fixed_choice(layout, fixed, work) if fixed else _choose(layout, spec, work, works, seconds)
        choices[spec.number] = found[key]
    unfit = {number: choice for number, choice in choices.items() if choice.variant is None}
    if unfit and (experiment.budgets.all_must_fit or len(unfit) == len(choices)):
        number, choice = next(iter(unfit.items()))
        kind = layout.specs[number].kind
        raise BadInput(
            f"{experiment.fleet}: {len(unfit)} of {len(choices)} clients are unfit; first, {kind}: {choice.reason}"
        )
    return choices


class HeaviestWork:
    """The work of a client's heaviest task under the method of a layout, by variant."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._method = layout.stand_in
        self._state = self._method.setup()

    def of(self, spec: ClientSpec) -> WorkOf:
        samples = len(self._layout.split.train[spec.number])
        return lambda variant: self._method.heaviest(self._state, Client(spec.number, variant, samples))


def _choose(layout: Layout, spec: ClientSpec, work: WorkOf, common: Mapping[str, WorkOf], seconds: Seconds) -> Choice:
    experiment = layout.config.experiment
    return choose_variant(
        device=spec.device,
        link=spec.link,
        family=layout.family,
        spec=layout.dataset.spec,
        work=work,
        optimizer=experiment.training.optimizer,
        budgets=experiment.budgets,
        seconds=lambda variant, work: seconds(spec.device, variant, work),
        common=common,
    )


def _fixed_choice(layout: Layout, variant: str, work: WorkOf) -> Choice:
    """Return the variant that the experiment fixes, with its predicted cost."""
    optimizer = layout.config.experiment.training.optimizer
    predicted = cost(layout.family, variant, layout.dataset.spec, work(variant), optimizer)
    everyone = layout.config.algorithm.variant is not None
    reason = "the experiment gives every client this variant" if everyone else "the experiment assigns it"
    return Choice(variant=variant, cost=predicted, reason=reason)


class Trial(Protocol):
    """Runs one training step of `samples` samples under a memory cap; returns the problem, None if there was none."""

    def try_out(self, name: str, variant: str, samples: int, cap_bytes: int) -> str | None: ...


def try_out(layout: Layout, choices: dict[int, Choice], trial: Trial) -> dict[int, Choice]:
    """Try each choice under its real memory cap, and replace a variant that does not fit by the next smaller one.

    The smallest cap comes first: a variant that fits under it also fits under a larger one and is not tried again.
    Variants that the experiment fixes are not tried, because they need not fit. Variants common to several methods are
    tried with the largest batch of any of them, so that all of their runs get the same result.
    """
    if layout.assigned:
        return choices
    methods = [HeaviestWork(one) for one in layout.compared() or [layout]]
    fits: set[tuple[str, int]] = set()
    found: dict[tuple[float, str, int], Choice] = {}
    tried = dict(choices)
    for number in sorted(choices, key=lambda number: (layout.specs[number].device.cap_mib, number)):
        choice, spec = choices[number], layout.specs[number]
        if choice.variant is None:
            continue
        works = [method.of(spec)(choice.variant) for method in methods]
        phases = [phase for work in works for phase in work.phases]
        samples = max(phase.batch + sum(p.samples for p in phase.each_step if p.kind == "train") for phase in phases)
        key = (spec.device.cap_mib, choice.variant, samples)
        if key not in found:
            known = (choice.variant, samples) in fits
            found[key] = choice if known else _step_down(layout, spec, choice, samples, trial)
        if found[key].variant == choice.variant:
            fits.add((choice.variant, samples))
        else:
            tried[number] = msgspec.structs.replace(choice, variant=found[key].variant, reason=found[key].reason)
    return tried


def _step_down(layout: Layout, spec: ClientSpec, choice: Choice, samples: int, trial: Trial) -> Choice:
    variants = layout.family.variants
    variant = choice.variant
    while variant is not None:
        cap_bytes = int(spec.device.cap_mib * MIB)
        problem = trial.try_out(f"trial-{cap_bytes >> 10}-{variant}-{samples}", variant, samples, cap_bytes)
        if problem is None:
            return choice
        position = variants.index(variant)
        larger, variant = variant, variants[position - 1] if position else None
        reason = f"{larger} was tried under the memory cap of {spec.device.cap_mib:.0f} MiB and did not fit: {problem}"
        choice = msgspec.structs.replace(choice, variant=variant, reason=reason)
    return choice


def describe_clients(
    layout: Layout, choices: dict[int, Choice], participants: Mapping[int, Participant]
) -> list[ClientRow]:
    """The rows of all clients, those included that no variant fits."""
    classes, labels = max(1, layout.dataset.spec.classes), layout.dataset.strata("train")
    rows = []
    for spec in layout.specs:
        choice, device = choices[spec.number], spec.device
        mine = layout.split.train[spec.number]
        rows.append(
            ClientRow(
                client=spec.number,
                name=spec.name,
                device=spec.kind,
                device_title=device.title,
                link=spec.link_name,
                variant=choice.variant,
                reason=choice.reason,
                memory_predicted_bytes=choice.cost.memory_bytes,
                memory_cap_bytes=int(device.cap_mib * MIB),
                rate_gflops=device.rate_gflops,
                slowdown=participants[spec.number].slowdown if spec.number in participants else None,
                load_w=device.power.load_w,
                idle_w=device.power.idle_w,
                samples=len(mine),
                test_samples=len(layout.split.test[spec.number]),
                label_counts=msgspec.json.encode(np.bincount(labels[mine], minlength=classes).tolist()).decode(),
            )
        )
    return rows
