"""Sorts runs into series: the runs of one method under one policy, which differ in their seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleetbed.analysis.runs import Run
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig


@dataclass(frozen=True)
class Series:
    """`label` is what tells it from the other series of the same study, `method` keys its colour."""

    label: str
    method: str
    policy: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.seed for run in self.runs)


def series_of(runs: Sequence[Run]) -> list[Series]:
    """In the order of the experiment: methods, then policies; seeds ascending within each."""
    groups: dict[bytes, list[Run]] = {}
    for run in sorted(runs, key=_place):
        groups.setdefault(_key(run.config), []).append(run)
    members = list(groups.values())
    labels = _labels([runs[0].config for runs in members])
    for label, group in zip(labels, members, strict=True):
        seeds = [run.config.seed for run in group]
        if len(set(seeds)) < len(seeds):
            twice = next(seed for seed in seeds if seeds.count(seed) > 1)
            folders = " and ".join(str(run.folder) for run in group if run.config.seed == twice)
            raise BadInput(f"{folders}: {label} with seed {twice} is there twice; leave one out.")
    return [
        Series(label, group[0].config.algorithm.title, group[0].config.policy.kind, tuple(group))
        for label, group in zip(labels, members, strict=True)
    ]


def base_of(series: Sequence[Series], name: str | None) -> Series:
    """The series that the others are compared with: the one named, or the first."""
    if name is None:
        return series[0]
    for one in series:
        if name.lower() in (one.label.lower(), one.method.lower()):
            return one
    known = ", ".join(one.label for one in series)
    raise BadInput(f"--base {name}: no such method among these runs; there are {known}.")


def differences(runs: Sequence[Run]) -> dict[str, str]:
    """In what the runs differ that a reader would take to be the same: a sentence for each such thing."""
    found = {}
    for what, values in (
        ("data", {_text(run.config.experiment.data) for run in runs}),
        ("targets", {_text(run.config.experiment.evaluation.targets) for run in runs}),
        ("fleet", {run.config.experiment.fleet for run in runs}),
        ("model family", {run.config.experiment.model.family for run in runs}),
        ("rounds", {str(run.config.experiment.rounds) for run in runs}),
        ("timing", {run.config.experiment.timing.source for run in runs}),
        ("test data", {_tested_on(run) for run in runs if run.evaluations}),
        ("processor", {str(run.meta.get("host", {}).get("cpu")) for run in runs}),
    ):
        if len(values) > 1:
            found[what] = f"These runs differ in their {what}: {'; '.join(sorted(values))}."
    return found


def _tested_on(run: Run) -> str:
    if all(evaluation.local for evaluation in run.evaluations):
        return "each client's own part"
    return "the whole test set"


def _text(value: object) -> str:
    """Short where it can be: of a struct only what is not the default."""
    if isinstance(value, msgspec.Struct):
        default = type(value)()
        named = {
            field: getattr(value, field)
            for field in value.__struct_fields__
            if field == "name" or getattr(value, field) != getattr(default, field)
        }
        return ", ".join(f"{field}={_text(part)}" for field, part in named.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _place(run: Run) -> tuple[str, int, int, int]:
    experiment = run.config.experiment
    methods, policies = list(experiment.algorithms), list(experiment.policies)
    method, policy = run.config.algorithm, run.config.policy
    return (
        experiment.title,
        methods.index(method) if method in methods else len(methods),
        policies.index(policy) if policy in policies else len(policies),
        run.config.seed,
    )


def _key(config: RunConfig) -> bytes:
    """Everything but the seed, and but what only says which other runs the study has."""
    setting = msgspec.structs.replace(
        config.experiment, title="", seeds=(0,), policies=(config.policy,), algorithms=(config.algorithm,)
    )
    return msgspec.json.encode(setting)


def _labels(configs: Sequence[RunConfig]) -> list[str]:
    """The method's title, and whatever else is needed to tell the series apart."""
    ways = (
        lambda c: c.algorithm.title,
        lambda c: f"{c.algorithm.title}, {c.policy.title}",
        lambda c: f"{c.algorithm.title}, {_text(c.policy).removeprefix('kind=') or 'sync'}",
        lambda c: f"{c.algorithm.title}, {c.policy.title}, {c.experiment.title}",
    )
    for way in ways:
        labels = [way(config) for config in configs]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({number})" for number, label in enumerate(labels, start=1)]
