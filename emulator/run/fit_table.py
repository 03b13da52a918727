"""Which variant each device of an experiment trains, and what stops the next larger one, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.engine.timing import Modelled, TrainingCosts
from fleetbed.emulator.run.fitting import MIB, HeaviestWork, choose_variants
from fleetbed.models.cost.choose import Choice, FitRow, round_bytes, transfer_seconds
from fleetbed.profiles.experiment import Experiment, runs
from fleetbed.profiles.types import ClientSpec


def fit_experiment(experiment: Experiment, search: Sequence[Path]) -> list[FitRow]:
    """Choose as the runs would: by the declarations of each method, the partition of the first seed, and the budgets.

    A run also tries its choices out under their memory caps, and may step down.
    """
    chosen = [
        config
        for config in runs(experiment)
        if config.policy == config.experiment.policies[0] and config.seed == config.experiment.seeds[0]
    ]
    return [row for config in chosen for row in _fit_run(lay_out(config, search))]


def _fit_run(layout: Layout) -> list[FitRow]:
    timing = Modelled(TrainingCosts(layout.family, layout.dataset.spec, layout.config.experiment.training.optimizer))
    choices = choose_variants(layout, timing.budget_s)
    heaviest = HeaviestWork(layout)
    groups: dict[tuple[str, str, str | None, str], list[ClientSpec]] = {}
    for spec in layout.specs:
        choice = choices[spec.number]
        groups.setdefault((spec.kind, spec.link_name, choice.variant, choice.reason), []).append(spec)
    return [_row(layout, members, choices[members[0].number], heaviest, timing) for members in groups.values()]


def _row(
    layout: Layout, members: Sequence[ClientSpec], choice: Choice, heaviest: HeaviestWork, timing: Modelled
) -> FitRow:
    one = members[0]
    variant = choice.variant or layout.family.variants[0]
    work = heaviest.of(one)(variant)
    down, up = round_bytes(work, choice.cost.state_bytes)
    return FitRow(
        method=layout.config.title,
        device=one.kind,
        link=one.link_name,
        clients=[member.number for member in members],
        variant=choice.variant,
        memory_bytes=choice.cost.memory_bytes,
        cap_bytes=round(one.device.cap_mib * MIB),
        compute_s=timing.budget_s(one.device, variant, work),
        transfer_s=transfer_seconds(one.link, down, up),
        round_bytes=down + up,
        reason=choice.reason,
        stopped_by=choice.stopped_by,
    )
