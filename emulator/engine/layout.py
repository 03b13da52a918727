"""The layout of a run, made before any process exists: fleet, server, data, partition and model family, all checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.data import Dataset, Split, divide, open_dataset, prepare_dataset
from fleetbed.emulator.engine.guarded import make_guarded
from fleetbed.emulator.machine.capacity import check_model
from fleetbed.emulator.method.algorithm import Client, ServerHalf
from fleetbed.emulator.method.context import make_context
from fleetbed.emulator.records.kept_merges import check_kept
from fleetbed.emulator.timeline.making_policies import check_policy
from fleetbed.emulator.timeline.own_policies import is_own, works_like
from fleetbed.emulator.timeline.traces import LinkRates, Presence, load_presence, load_rates
from fleetbed.models.base import Family, InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.models.families.own import OwnFamily
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Evaluation, Model, RunConfig
from fleetbed.profiles.resolve import clients_of, load_device, load_fleet, load_link
from fleetbed.profiles.types import ClientSpec, Device, Link

FIRST_SAMPLES = 16  # that a user's own model is tried with


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The fleet, its server and its network: what the engine needs to know, whatever the clients do."""

    config: RunConfig
    specs: tuple[ClientSpec, ...]
    server: Device
    server_link: Link
    presence: Presence | None  # the traces of experiment.availability
    rates: LinkRates | None


@dataclass(frozen=True, kw_only=True)
class Layout(Surroundings):
    folder: Path  # of the prepared data
    dataset: Dataset
    split: Split
    family: Family

    @property
    def assigned(self) -> dict[int, str]:
        """The variant of every client where the experiment fixes it, whether it fits or not; otherwise empty."""
        fixed = self.config.algorithm.variant
        names = self.config.model.assign if fixed is None else (fixed,)
        groups = np.array_split(np.arange(len(self.specs)), len(names)) if names else []
        return {int(number): name for name, group in zip(names, groups, strict=True) for number in group}

    @cached_property
    def stand_in(self) -> ServerHalf:
        """The method with one client of every variant in question, for questions that come before the choice."""
        return self.method(stand_ins(self.family, set(self.assigned.values())))

    def method(self, clients: Sequence[Client]) -> ServerHalf:
        """The method for these clients. Raises BadInput, naming it, where it does not fit the experiment."""
        context = make_context(self.config, self.dataset, self.split, clients)
        algorithm = self.config.algorithm
        method = make_guarded(algorithm.name, lambda: load_method(algorithm, context))
        check_method(self.config, method)
        return method

    def compared(self) -> list[Layout]:
        """The layout under each algorithm that a common variant has to fit; empty where variants need not be common."""
        experiment = self.config.experiment
        if self.config.model.choose != "common":
            return []
        algorithms = [*experiment.algorithms]
        if self.config.algorithm not in algorithms:
            algorithms.append(self.config.algorithm)
        configs = [msgspec.structs.replace(self.config, algorithm=one) for one in algorithms if one.variant is None]
        same = [config for config in configs if config.model == self.config.model]
        return [replace(self, config=config) for config in same]


def stand_ins(model: Family, assigned: Collection[str]) -> list[Client]:
    """One client of each assigned variant, or of every variant of the model where none is assigned."""
    variants = [variant for variant in model.variants if variant in assigned] or model.variants
    return [Client(number, variant, 1) for number, variant in enumerate(variants)]


def surroundings(config: RunConfig, search: Sequence[Path]) -> Surroundings:
    """Load the fleet, the server and the traces that the configuration names."""
    experiment = config.experiment
    specs = clients_of(load_fleet(experiment.fleet, search, "fleet"), search, experiment.fleet)
    return Surroundings(
        config=config,
        specs=specs,
        server=load_device(experiment.server.device, search, "server.device"),
        server_link=load_link(experiment.server.link, search, "server.link"),
        presence=load_presence(experiment, len(specs)),
        rates=load_rates(experiment, len(specs), config.seed),
    )


def lay_out(config: RunConfig, search: Sequence[Path]) -> Layout:
    """Load and check everything that the configuration names. Nothing is written but the data's cache."""
    experiment = config.experiment
    around = surroundings(config, search)
    specs = around.specs
    model = family(config.model.family, config.model.options).narrow(config.model.variants)
    if config.algorithm.variant is not None:
        model.check_variant(config.algorithm.variant)
    check_assign(config.model, model, len(specs))
    check_policy(experiment, config.policy, len(specs))
    folder = prepare_dataset(experiment.data)
    dataset = open_dataset(folder)
    check_targets(experiment.evaluation, dataset.spec)
    model.check_input(dataset.spec)
    check_model(model, dataset.spec)
    if isinstance(model, OwnFamily):
        first = np.arange(min(FIRST_SAMPLES, len(dataset.y_train)))
        model.check_start(*dataset.batch("train", first), dataset.spec)
    split = divide(dataset, experiment.data, len(specs), config.seed)
    layout = Layout(**vars(around), folder=folder, dataset=dataset, split=split, family=model)
    method = layout.stand_in  # raises where method and experiment do not fit together
    check_kept(method, experiment.evaluation, config.algorithm.title)
    return layout


def check_targets(evaluation: Evaluation, spec: InputSpec) -> None:
    """Refuse a target that no accuracy can reach; an error has the scale of its labels."""
    for number, target in enumerate(evaluation.targets):
        if target > 1 and not spec.targets:
            raise BadInput(
                f"evaluation.targets.{number} is {target:g}, but the labels are classes, so it is an accuracy from 0 "
                f"to 1{f': write {target / 100:g}' if target <= 100 else ''}."
            )


def check_assign(asked: Model, model: Family, clients: int | None) -> None:
    """Refuse variants that do not exist, and more variants than clients where the number of clients is known."""
    names = asked.assign
    if names and asked.choose == "common":
        raise BadInput(
            "model.choose is common, but model.assign fixes the variants, so there is nothing to choose: "
            "leave one of them out."
        )
    for name in names:
        if name not in model.variants:
            raise nearest(name, model.variants, "variant", f"model.assign, of the family {model.name}")
    if clients is not None and len(names) > clients:
        raise BadInput(
            f"model.assign has {len(names)} variants, but the fleet has {clients} clients, so that some would have "
            f"no client: list at most {clients}, or use a larger fleet."
        )


def check_method(config: RunConfig, method: ServerHalf) -> None:
    needs, name, kind = method.needs, config.algorithm.title, works_like(config.policy)
    if kind not in needs.policies:
        allowed = ", ".join(sorted(needs.policies))
        told = f"{config.policy.title}, which works like {kind}" if is_own(config.policy) else kind
        raise BadInput(f"policies: {name} does not run under {told}: {needs.policies_why} Allowed are: {allowed}.")
    if len(needs.stages) > 1 and kind in ("async", "buffered"):
        raise BadInput(
            f"policies: {name} goes through {len(needs.stages)} stages a round, so {kind} has no rounds for it"
        )
    if len(needs.stages) > 1 and kind == "deadline" and config.policy.late == "next-round":
        raise BadInput(
            f"policies: {name} goes through {len(needs.stages)} stages a round, and a late result may be of another "
            f"stage than what it would be merged with: set late to drop"
        )
    family, spec = method.context.family, method.context.spec
    if needs.cuts and not family.has_cuts(spec):
        raise BadInput(
            f"algorithms: {name} works on parts of a model, but those of {family.name} are plain torch modules: derive "
            f"them from fleetbed.models.base.Net, with extract, intermediate and classify (docs/writing-a-model.md), "
            f"or choose a method that takes whole models, such as heteroavg."
        )
    if needs.classes and spec.targets:
        raise BadInput(
            f"algorithms: {name} goes by the classes of samples, but the labels of {config.experiment.data.name} are "
            f"numbers: choose a method that averages weights, such as heteroavg or fedavg."
        )
    public = method.context.public
    if needs.public_samples and (public is None or len(public) < needs.public_samples):
        found = 0 if public is None else len(public)
        raise BadInput(
            f"data.public: {name} draws {needs.public_samples} samples from the server's own pool, which has {found}: "
            f"set data.public to {needs.public_samples} or more"
        )
    method.check()
