"""Compares methods: the accuracy of each, its cost, and its difference to a base method, paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import mean, stdev
from typing import Any

from fleetbed.analysis.tables.curves import AXES, Axis, best_accuracy, curve, targets_of, to_target
from fleetbed.analysis.tables.intervals import LEAST_PAIRS, Interval, paired_interval
from fleetbed.analysis.tables.notes import cautions, run_differences
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series, base_series, by_shown, runs_of, series_of
from fleetbed.analysis.tables.stragglers import waste
from fleetbed.emulator.method.series import TargetSeries
from fleetbed.emulator.records.metric import ACCURACY, Metric
from fleetbed.profiles.errors import BadInput

TITLES: dict[Axis, str] = {
    "time": "Time",
    "rounds": "Rounds",
    "bytes": "Bytes",
    "joules": "Energy",
    "flops": "FLOPs",
}


@dataclass(frozen=True)
class ToTarget:
    """The cost of each seed to reach a target, on one axis; None if the target was never reached."""

    target: float
    axis: Axis
    by_seed: dict[int, float | None]

    @property
    def reached(self) -> list[float]:
        return [value for value in self.by_seed.values() if value is not None]

    @property
    def always(self) -> bool:
        return len(self.reached) == len(self.by_seed) > 0


@dataclass(frozen=True)
class Tightest:
    """The task that came closest to the memory cap of its device."""

    device: str
    peak_bytes: int
    cap_bytes: int


@dataclass(frozen=True)
class MethodSummary:
    series: Series
    final: dict[int, float]  # by seed; NaN if the run had diverged
    best: dict[int, float]
    to_target: dict[tuple[float, Axis], ToTarget]
    peak_bytes: dict[int, int]  # by seed
    dropped: dict[int, float]  # by seed: the fraction of all FLOPs whose result was never merged
    tightest: Tightest | None
    degraded: bool  # whether the host was too slow for the plan in any of its runs
    difference: Interval | None  # of the final accuracy to the base, paired by seed; None for the base itself

    def speed_up(self, base: MethodSummary, target: float, axis: Axis) -> float | None:
        """Return base / own cost over common seeds; None unless all of them reached the target."""
        spent = self._spent(base, target, axis)
        total = sum(mine for mine, _ in spent)
        return sum(theirs for _, theirs in spent) / total if total else None

    def ratios(self, base: MethodSummary, target: float, axis: Axis) -> list[float]:
        """Return base / own cost of each common seed; nothing unless all of them reached the target."""
        return [theirs / mine for mine, theirs in self._spent(base, target, axis) if mine]

    def _spent(self, base: MethodSummary, target: float, axis: Axis) -> list[tuple[float, float]]:
        own, other = self.to_target[target, axis], base.to_target[target, axis]
        pairs = [(own.by_seed[seed], other.by_seed[seed]) for seed in sorted(own.by_seed.keys() & other.by_seed.keys())]
        spent = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
        return spent if len(spent) == len(pairs) else []


@dataclass(frozen=True)
class SeriesGroup:
    """Methods that show the same target series, so that they can be compared."""

    shown: TargetSeries
    summaries: tuple[MethodSummary, ...]
    base: MethodSummary
    targets: tuple[float, ...]

    @property
    def metric(self) -> Metric:
        return self.base.series.metric


@dataclass(frozen=True)
class Comparison:
    groups: tuple[SeriesGroup, ...]
    notes: tuple[str, ...]

    @property
    def series(self) -> list[Series]:
        return [summary.series for group in self.groups for summary in group.summaries]

    @property
    def targets(self) -> tuple[float, ...]:
        return tuple(sorted({target for group in self.groups for target in group.targets}))


def compare_runs(
    runs: Sequence[Run], base_name: str | None, asked_targets: Sequence[float], asked_series: str | None = None
) -> Comparison:
    """Compare runs; refuse different data, and also different targets if no target was requested."""
    differ = run_differences(runs)
    if "data" in differ:
        raise BadInput(f"{differ['data'][:-1]}; compare the runs of one data set at a time.")
    if "targets" in differ and not asked_targets:
        raise BadInput(f"{differ['targets'][:-1]}; choose one with --target.")
    return side_by_side(runs, base_name, asked_targets, asked_series)


def side_by_side(
    runs: Sequence[Run], base_name: str | None, asked_targets: Sequence[float], asked_series: str | None = None
) -> Comparison:
    """Compare runs without refusing any: the notes list the differences."""
    series = series_of(runs, asked_series)
    named = base_series(series, base_name)
    groups = []
    for shown, members in by_shown(series).items():
        base = named if named in members else members[0]
        targets = targets_of(runs_of(members), base, asked_targets)
        summaries = summarise_methods(members, base, targets)
        groups.append(SeriesGroup(shown, tuple(summaries), summaries[members.index(base)], targets))
    return Comparison(tuple(groups), tuple(_notes(groups)))


def summarise_methods(series: Sequence[Series], base: Series, targets: Sequence[float]) -> list[MethodSummary]:
    final = {one.label: _accuracies(one)[0] for one in series}
    summaries = []
    for one in series:
        own, other = final[one.label], final[base.label]
        pairs = {seed: own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())}
        pairs = {seed: difference for seed, difference in pairs.items() if not isnan(difference)}
        peaks = {run.config.seed: [task.peak_bytes for task in run.tasks if task.peak_bytes] for run in one.runs}
        summaries.append(
            MethodSummary(
                series=one,
                final=own,
                best=_accuracies(one)[1],
                to_target={
                    (target, axis): ToTarget(target, axis, _taken(one, axis, target))
                    for target in targets
                    for axis in AXES
                },
                peak_bytes={seed: max(found) for seed, found in peaks.items() if found},
                dropped={run.config.seed: part for run in one.runs if (part := _dropped(run)) is not None},
                tightest=_tightest(one.runs),
                degraded=any(run.about.degraded for run in one.runs),
                difference=paired_interval(pairs) if pairs and one is not base else None,
            )
        )
    return summaries


def _dropped(run: Run) -> float | None:
    flops = sum(task.flops for task in run.tasks if task.compute_start_s is not None)
    return sum(group.flops for group in waste(run).values()) / flops if flops else None


def _tightest(runs: Sequence[Run]) -> Tightest | None:
    measured = [(run, task) for run in runs for task in run.tasks if task.peak_bytes and task.cap_bytes]
    if not measured:
        return None
    run, task = max(measured, key=lambda pair: (pair[1].peak_bytes or 0) / pair[1].cap_bytes)
    device = next(client.device for client in run.clients if client.client == task.client)
    return Tightest(device, task.peak_bytes or 0, task.cap_bytes)


def _taken(series: Series, axis: Axis, target: float) -> dict[int, float | None]:
    """Return the cost to reach a target by seed, for the runs that have a curve on this axis."""
    measured = [run for run in series.runs if curve(run, axis, series.shown) is not None]
    return {run.config.seed: to_target(run, axis, target, series.shown) for run in measured}


def _accuracies(series: Series) -> tuple[dict[int, float], dict[int, float]]:
    """Return the last and the best accuracy, each by seed."""
    curves = {run.config.seed: curve(run, "rounds", series.shown) for run in series.runs}
    known = {seed: one for seed, one in curves.items() if one is not None}
    last = {seed: float(one.y[-1]) for seed, one in known.items()}
    return last, {seed: best_accuracy(one) for seed, one in known.items()}


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the same for programs: plain numbers in SI units; None if there is no value."""
    seeds = sorted(
        {seed for group in comparison.groups for one in group.summaries for seed in (one.difference or _NONE).by_seed}
    )
    return [_record(summary, group, comparison, seeds) for group in comparison.groups for summary in group.summaries]


_NONE = Interval(0.0, None, None, {})


def _record(summary: MethodSummary, group: SeriesGroup, comparison: Comparison, seeds: Sequence[int]) -> dict[str, Any]:
    interval = summary.difference
    row: dict[str, Any] = {
        "method": summary.series.label,
        "policy": summary.series.policy,
        "series": group.shown,
        "metric": group.metric.name,
        "seeds": len(summary.series.runs),
        "diverged": sum(map(isnan, summary.final.values())),
        "final_mean": _mean(summary.final),
        "final_sd": _deviation(summary.final),
        "best_mean": _mean(summary.best),
        "best_sd": _deviation(summary.best),
        "base": None if summary is group.base else group.base.series.label,
        "pairs": interval.pairs if interval else 0,
        "difference_mean": interval.mean if interval else None,
        "difference_low": interval.low if interval else None,
        "difference_high": interval.high if interval else None,
        **{f"difference_seed_{seed}": (interval or _NONE).by_seed.get(seed) for seed in seeds},
        "peak_bytes": max(summary.peak_bytes.values(), default=None),
        "peak_bytes_sd": _deviation(summary.peak_bytes),
        "tightest_device": summary.tightest.device if summary.tightest else None,
        "tightest_peak_bytes": summary.tightest.peak_bytes if summary.tightest else None,
        "tightest_cap_bytes": summary.tightest.cap_bytes if summary.tightest else None,
        "dropped": _mean(summary.dropped),
        "dropped_sd": _deviation(summary.dropped),
        "degraded": summary.degraded,
    }
    for target in comparison.targets:
        here = target in group.targets
        for axis in AXES:
            to = summary.to_target[target, axis] if here else None
            always = to is not None and to.always
            row[f"{axis}_to_{target:g}"] = mean(to.reached) if to and always else None
            row[f"{axis}_to_{target:g}_sd"] = stdev(to.reached) if to and always and len(to.reached) > 1 else None
        row[f"reached_{target:g}"] = len(summary.to_target[target, "time"].reached) if here else None
        row[f"speed_up_{target:g}"] = summary.speed_up(group.base, target, "time") if here else None
        ratios = summary.ratios(group.base, target, "time") if here else []
        row[f"speed_up_{target:g}_sd"] = stdev(ratios) if len(ratios) > 1 else None
    return row


def _known(by_seed: Mapping[int, float]) -> list[float]:
    return [value for value in by_seed.values() if not isnan(value)]


def _mean(by_seed: Mapping[int, float]) -> float | None:
    return mean(known) if (known := _known(by_seed)) else None


def _deviation(by_seed: Mapping[int, float]) -> float | None:
    return stdev(known) if len(known := _known(by_seed)) > 1 else None


def _notes(groups: Sequence[SeriesGroup]) -> list[str]:
    series = [summary.series for group in groups for summary in group.summaries]
    runs = runs_of(series)
    notes, metric = cautions(series), series[0].metric
    if any(len(one.runs) > 1 for one in series):
        notes.append(
            "Figures are mean ± standard deviation over seeds; a speed-up is the ratio of the mean times, and ± the "
            "deviation of the ratio over seeds."
        )
    if any(summary.difference for group in groups for summary in group.summaries):
        notes.append(
            f"Differences of the final {metric.title} are in {metric.difference} and paired by seed: the mean and its "
            f"95 % t interval with {LEAST_PAIRS} or more pairs, the difference of each pair with fewer."
        )
    if any(task.joules is None for run in runs for task in run.tasks):
        notes.append("Energy covers only the devices whose profile states their power.")
    if not any(group.targets for group in groups):
        why = (
            "none was given, and the base reached no multiple of 5 % above an untrained model."
            if metric is ACCURACY
            else "none was given. Set evaluation.targets, or use --target, to see when an error is reached."
        )
        notes.append(f"There is no target: {why}")
    return notes
