"""What a run stands on before any process exists: fleet, server, data, partition, model family, methods checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleetbed.emulator.algorithm import Algorithm, Client
from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.context import make_context
from fleetbed.emulator.data import Dataset, Split, open_dataset, partition, prepare
from fleetbed.emulator.policies import check_policy
from fleetbed.emulator.traces import Presence, Rates, load_presence, load_rates
from fleetbed.models.base import Family
from fleetbed.models.families import family
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import RunConfig
from fleetbed.profiles.resolve import clients_of, load_device, load_fleet, load_link
from fleetbed.profiles.types import ClientSpec, Device, Link


@dataclass(frozen=True, kw_only=True)
class Layout:
    config: RunConfig
    specs: tuple[ClientSpec, ...]
    server: Device
    server_link: Link
    folder: Path  # of the prepared data
    dataset: Dataset
    split: Split
    family: Family
    presence: Presence | None  # the traces of experiment.availability
    rates: Rates | None

    @property
    def assigned(self) -> dict[int, str]:
        """The variant of every client where the experiment fixes it, whether it fits or not; else nothing."""
        fixed = self.config.algorithm.variant
        names = self.config.experiment.model.assign if fixed is None else (fixed,)
        groups = np.array_split(np.arange(len(self.specs)), len(names)) if names else []
        return {int(number): name for name, group in zip(names, groups, strict=True) for number in group}

    def stand_ins(self) -> list[Client]:
        """A client of every variant in question, so that the method can say what each would do."""
        assigned = set(self.assigned.values())
        variants = [variant for variant in self.family.variants if variant in assigned or not assigned]
        return [Client(number, variant, 1) for number, variant in enumerate(variants)]

    def method(self, clients: Sequence[Client]) -> Algorithm:
        """The method for these clients, refused by name where it does not go with the experiment."""
        method = load_method(self.config.algorithm, make_context(self.config, self.dataset, self.split, clients))
        check_method(self.config, method)
        return method


def lay_out(config: RunConfig, search: Sequence[Path]) -> Layout:
    """Load and check everything that the configuration names. Nothing is written but the data's cache."""
    experiment = config.experiment
    specs = clients_of(load_fleet(experiment.fleet, search, "fleet"), search, experiment.fleet)
    model = family(experiment.model.family, experiment.model.options).narrow(experiment.model.variants)
    if config.algorithm.variant is not None:
        model.check_variant(config.algorithm.variant)
    _check_assign(experiment.model.assign, model, specs)
    check_policy(experiment.participation, config.policy, len(specs))
    folder = prepare(experiment.data)
    dataset = open_dataset(folder)
    model.check_input(dataset.spec)
    split = partition(dataset.y_train, dataset.y_test, dataset.spec.classes, experiment.data, len(specs), config.seed)
    layout = Layout(
        config=config,
        specs=specs,
        server=load_device(experiment.server.device, search, "server.device"),
        server_link=load_link(experiment.server.link, search, "server.link"),
        folder=folder,
        dataset=dataset,
        split=split,
        family=model,
        presence=load_presence(experiment, len(specs)),
        rates=load_rates(experiment, len(specs), config.seed),
    )
    layout.method(layout.stand_ins())  # refuses what does not go together
    return layout


def _check_assign(names: Sequence[str], model: Family, specs: Sequence[ClientSpec]) -> None:
    for name in names:
        if name not in model.variants:
            raise nearest(name, model.variants, "variant", f"model.assign, of the family {model.name}")
    if len(names) > len(specs):
        raise BadInput(
            f"model.assign has {len(names)} variants, but the fleet has {len(specs)} clients, so that some would be "
            f"nobody's: name at most {len(specs)}, or take a larger fleet."
        )


def check_method(config: RunConfig, method: Algorithm) -> None:
    needs, name, kind = method.needs, config.algorithm.title, config.policy.kind
    if kind not in needs.policies:
        allowed = ", ".join(sorted(needs.policies))
        raise BadInput(f"policies: {name} does not run under {kind}: {needs.policies_why} Allowed are: {allowed}.")
    if len(needs.stages) > 1 and kind in ("async", "buffered"):
        raise BadInput(
            f"policies: {name} goes through {len(needs.stages)} stages a round, so {kind} has no rounds for it"
        )
    if len(needs.stages) > 1 and kind == "deadline" and config.policy.late == "next-round":
        raise BadInput(
            f"policies: {name} goes through {len(needs.stages)} stages a round, and a late result may be of another "
            f"stage than what it would be merged with: set late to drop"
        )
    public = method.context.public
    if needs.public_samples and (public is None or len(public) < needs.public_samples):
        found = 0 if public is None else len(public)
        raise BadInput(
            f"data.public: {name} draws {needs.public_samples} samples from the server's own pool, which has {found}: "
            f"set data.public to {needs.public_samples} or more"
        )
    method.check()
