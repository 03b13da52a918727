"""Groups runs into series: the runs of one method under one policy, which differ only in their seed.

Each series shows its accuracy in one target series, which defines the models and the test data. Only series with the
same target series are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleetbed.analysis.tables.runs import Run
from fleetbed.emulator.method.series import TARGET_SERIES, TargetSeries, default_series
from fleetbed.emulator.records.metric import Metric
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import RunConfig
from fleetbed.profiles.files import title_of
from fleetbed.profiles.yaml_text import plain


@dataclass(frozen=True)
class Series:
    """`label` distinguishes it from the other series of the study; `method` determines its colour."""

    label: str
    method: str
    policy: str
    runs: tuple[Run, ...]
    shown: TargetSeries = "global"  # the evaluations that make up its accuracy

    @property
    def metric(self) -> Metric:
        """What its models are judged by: all runs of a series have the same data."""
        return self.runs[0].metric

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.seed for run in self.runs)

    @property
    def evaluated(self) -> tuple[TargetSeries, ...]:
        """The target series in which its runs were evaluated."""
        return evaluated_in(self.runs)


def evaluated_in(runs: Sequence[Run]) -> tuple[TargetSeries, ...]:
    found = {evaluation.series for run in runs for evaluation in run.evaluations if evaluation.samples}
    return tuple(series for series in TARGET_SERIES if series in found)


def shown_of(runs: Sequence[Run], asked: str | None) -> TargetSeries:
    """Return the requested target series or, without a request, the one that the method's paper reports."""
    if asked is None:
        reported = next((run.about.series for run in runs if run.about.series is not None), None)
        return default_series(evaluated_in(runs), reported)
    for series in TARGET_SERIES:
        if series == asked:
            return series
    raise nearest(asked, TARGET_SERIES, "series", "--series")


def series_of(runs: Sequence[Run], asked: str | None = None) -> list[Series]:
    """Return the series in the order of the experiment: methods, then policies, with ascending seeds.

    `asked` is the target series to show; if it is None, each method shows the one that its paper reports.
    """
    groups: dict[bytes, list[Run]] = {}
    for run in sorted(runs, key=_place):
        groups.setdefault(_key(run.config), []).append(run)
    members = [part for group in groups.values() for part in _by_study(group)]
    labels = _labels([group[0] for group in members])
    for label, group in zip(labels, members, strict=True):
        seeds = [run.config.seed for run in group]
        if len(set(seeds)) < len(seeds):
            twice = next(seed for seed in seeds if seeds.count(seed) > 1)
            folders = " and ".join(str(run.folder) for run in group if run.config.seed == twice)
            raise BadInput(f"{folders}: {label} with seed {twice} occurs twice; remove one of them.")
    found = [
        Series(
            label, group[0].config.title, title_of(group[0].config.policy.kind), tuple(group), shown_of(group, asked)
        )
        for label, group in zip(labels, members, strict=True)
    ]
    there = evaluated_in(runs)
    if asked is not None and there and asked not in there:
        raise BadInput(f"--series {asked}: none of these runs has this series; they have {', '.join(there)}.")
    return found


def runs_of(series: Sequence[Series]) -> list[Run]:
    return [run for one in series for run in one.runs]


def by_shown(series: Sequence[Series]) -> dict[TargetSeries, list[Series]]:
    """Group the series that can be compared, by the target series that they show."""
    groups: dict[TargetSeries, list[Series]] = {}
    for one in series:
        groups.setdefault(one.shown, []).append(one)
    return groups


def base_series(series: Sequence[Series], name: str | None) -> Series:
    """Return the series that the others are compared with: the one with this name, or the first."""
    if name is None:
        return series[0]
    for one in series:
        if name.lower() in (one.label.lower(), one.method.lower()):
            return one
    known = ", ".join(one.label for one in series)
    raise BadInput(f"--base {name}: there is no such method in these runs; their methods are {known}.")


def short_text(value: object) -> str:
    """Format a value briefly: of a struct, only the fields that are not defaults."""
    if isinstance(value, msgspec.Struct):
        default = type(value)()
        named = {
            field: getattr(value, field)
            for field in value.__struct_fields__
            if field == "name" or getattr(value, field) != getattr(default, field)
        }
        return ", ".join(f"{field}={short_text(part)}" for field, part in named.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _place(run: Run) -> tuple[object, ...]:
    experiment = run.config.experiment
    methods, policies = list(experiment.algorithms), list(experiment.policies)
    method, policy = run.config.algorithm, run.config.policy
    return (
        experiment.title,
        methods.index(method) if method in methods else len(methods),
        policies.index(policy) if policy in policies else len(policies),
        [_sortable(value) for value in run.config.point.values()],
        run.config.seed,
    )


def _sortable(value: object) -> tuple[int, float, str]:
    """Return a key by which numbers are ordered by size, and before everything else."""
    return (0, value, "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _key(config: RunConfig) -> bytes:
    """Encode everything except the seed and the lists that only describe the other runs of the study."""
    setting = msgspec.structs.replace(
        config.experiment, title="", seeds=(0,), policies=(config.policy,), algorithms=(config.algorithm,)
    )
    return msgspec.json.encode(setting)


def _by_study(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs of equal settings by study if their seeds repeat, as in a study that was done twice."""
    seeds = [run.config.seed for run in runs]
    if len(set(seeds)) == len(seeds):
        return [list(runs)]
    studies = dict.fromkeys(run.study for run in runs)
    return [[run for run in runs if run.study == study] for study in studies]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the method's titles, with as much more as is needed to distinguish the series."""
    study_names = names_of_studies(runs)
    ways = (
        lambda run: run.config.title,
        lambda run: f"{run.config.title}, {run.config.policy.title}",
        lambda run: f"{run.config.title}, {short_text(run.config.policy).removeprefix('kind=') or 'sync'}",
        lambda run: f"{run.config.title}, {run.config.policy.title}, {study_names[run.study]}",
    )
    for way in ways:
        labels = [way(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({number})" for number, label in enumerate(labels, start=1)]


def names_of_studies(runs: Sequence[Run]) -> dict[Path, str]:
    """Name each study by its title or, where titles coincide, by its folder."""
    titles = {run.study: run.config.experiment.title for run in runs}
    names = {study: plain(study.name) for study in titles}
    if len(set(names.values())) < len(names):
        names = {study: plain(str(study)) for study in titles}
    once = [title for title in titles.values() if list(titles.values()).count(title) == 1]
    return {study: title if title in once else names[study] for study, title in titles.items()}
