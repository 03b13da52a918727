"""Methods side by side: what each reached, what it took, and how it differs from a base, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from fleetbed.analysis.curves import AXES, Axis, curve, targets_of, to_target
from fleetbed.analysis.runs import Run
from fleetbed.analysis.stragglers import waste
from fleetbed.analysis.study import Series, base_of, differences, series_of
from fleetbed.analysis.tables import Table
from fleetbed.analysis.units import FORMATS, MISSING, data_bytes, percent, target_text
from fleetbed.profiles.errors import BadInput

RESAMPLES = 10_000
TITLES: dict[Axis, str] = {
    "time": "Time",
    "rounds": "Rounds",
    "bytes": "Bytes",
    "joules": "Energy",
    "flops": "FLOPs",
}
COSTS: tuple[Axis, ...] = ("time", "bytes", "joules", "flops")


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float | None  # None: one pair says nothing about spread
    high: float | None
    pairs: int


@dataclass(frozen=True)
class ToTarget:
    """What it took each seed on one axis; None where the target was never reached, or never measured."""

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
class Summary:
    series: Series
    final: dict[int, float]  # by seed
    best: dict[int, float]
    to_target: dict[tuple[float, Axis], ToTarget]
    peak_bytes: int | None
    dropped: float | None  # the part of all FLOPs that never counted
    difference: Interval | None  # of the final accuracy to the base, paired by seed; None for the base itself

    def speed_up(self, base: Summary, target: float, axis: Axis) -> float | None:
        """How many times less it took than the base, over common seeds; None unless all of them got there."""
        own, other = self.to_target[target, axis], base.to_target[target, axis]
        pairs = [(own.by_seed[seed], other.by_seed[seed]) for seed in own.by_seed.keys() & other.by_seed.keys()]
        spent = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
        if not spent or len(spent) < len(pairs):
            return None
        total = sum(mine for mine, _ in spent)
        return sum(theirs for _, theirs in spent) / total if total else None


def bootstrap(differences: Sequence[float], seed: int = 0) -> Interval:
    """The mean, and the 95 % percentile interval of means of resampled pairs; the same on every call."""
    values = np.asarray(differences, dtype=float)
    if len(values) < 2:
        return Interval(float(values.mean()), None, None, len(values))
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high), len(values))


def summarise(series: Sequence[Series], base: Series, targets: Sequence[float]) -> list[Summary]:
    final = {one.label: _accuracies(one, -1) for one in series}
    summaries = []
    for one in series:
        own, other = final[one.label], final[base.label]
        pairs = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
        flops = sum(task.flops for run in one.runs for task in run.tasks if task.compute_start_s is not None)
        lost = sum(group.flops for run in one.runs for group in waste(run).values())
        peaks = [task.peak_bytes for run in one.runs for task in run.tasks if task.peak_bytes is not None]
        summaries.append(
            Summary(
                series=one,
                final=own,
                best=_accuracies(one, None),
                to_target={
                    (target, axis): ToTarget(
                        target, axis, {run.config.seed: to_target(run, axis, target) for run in one.runs}
                    )
                    for target in targets
                    for axis in AXES
                },
                peak_bytes=max(peaks, default=None),
                dropped=lost / flops if flops else None,
                difference=bootstrap(pairs) if pairs and one is not base else None,
            )
        )
    return summaries


def _accuracies(series: Series, place: int | None) -> dict[int, float]:
    """By seed: the accuracy of the evaluation at `place`, or the best one."""
    found = {}
    for run in series.runs:
        one = curve(run, "rounds")
        if one is not None:
            found[run.config.seed] = float(one.accuracy.max() if place is None else one.accuracy[place])
    return found


@dataclass(frozen=True)
class Comparison:
    summaries: tuple[Summary, ...]
    base: Summary
    targets: tuple[float, ...]
    notes: tuple[str, ...]


def compare(runs: Sequence[Run], base_name: str | None, asked_targets: Sequence[float]) -> Comparison:
    """Runs on different data are refused, and so are different targets where none was asked for."""
    differ = differences(runs)
    if "data" in differ:
        raise BadInput(f"{differ['data'][:-1]}; compare those of one data set at a time.")
    if "targets" in differ and not asked_targets:
        raise BadInput(f"{differ['targets'][:-1]}; say by --target which one counts.")
    return side_by_side(runs, base_name, asked_targets)


def side_by_side(runs: Sequence[Run], base_name: str | None, asked_targets: Sequence[float]) -> Comparison:
    """The same without refusing anything: what differs is in the notes."""
    series = series_of(runs)
    base = base_of(series, base_name)
    targets = targets_of(runs, base, asked_targets)
    summaries = summarise(series, base, targets)
    (base_summary,) = (summary for summary in summaries if summary.series is base)
    return Comparison(tuple(summaries), base_summary, targets, tuple(_notes(runs, series, targets)))


def table(comparison: Comparison) -> Table:
    """For people: means and spreads with their units."""
    base = comparison.base
    columns = ["Method", "Seeds", "Final accuracy", "Best accuracy", f"Difference to {base.series.label}"]
    for target in comparison.targets:
        columns += [f"{TITLES[axis]} to {target_text(target)}" for axis in COSTS]
        columns.append(f"Speed-up to {target_text(target)}")
    columns += ["Peak memory", "Dropped work"]
    rows = []
    for summary in comparison.summaries:
        cells = [summary.series.label, str(len(summary.series.runs))]
        cells += [spread(summary.final), spread(summary.best), difference_text(summary.difference)]
        for target in comparison.targets:
            cells += [to_target_text(summary.to_target[target, axis]) for axis in COSTS]
            cells.append(factor(summary.speed_up(base, target, "time")))
        rows.append((*cells, data_bytes(summary.peak_bytes), percent(summary.dropped)))
    return Table(tuple(columns), tuple(rows), comparison.notes)


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """For programs: the same as plain numbers in SI units; None where there is none."""
    found = []
    for summary in comparison.summaries:
        interval = summary.difference
        row: dict[str, Any] = {
            "method": summary.series.label,
            "policy": summary.series.policy,
            "seeds": len(summary.series.runs),
            "final_mean": _mean(summary.final),
            "final_sd": _deviation(summary.final),
            "best_mean": _mean(summary.best),
            "best_sd": _deviation(summary.best),
            "difference_mean": interval.mean if interval else None,
            "difference_low": interval.low if interval else None,
            "difference_high": interval.high if interval else None,
            "peak_bytes": summary.peak_bytes,
            "dropped": summary.dropped,
        }
        for target in comparison.targets:
            for axis in AXES:
                to = summary.to_target[target, axis]
                row[f"{axis}_to_{target:g}"] = mean(to.reached) if to.always else None
            row[f"reached_{target:g}"] = len(summary.to_target[target, "time"].reached)
            row[f"speed_up_{target:g}"] = summary.speed_up(comparison.base, target, "time")
        found.append(row)
    return found


def _mean(by_seed: dict[int, float]) -> float | None:
    return mean(by_seed.values()) if by_seed else None


def _deviation(by_seed: dict[int, float]) -> float | None:
    return stdev(by_seed.values()) if len(by_seed) > 1 else None


def spread(by_seed: dict[int, float]) -> str:
    values = list(by_seed.values())
    if not values:
        return MISSING
    if len(values) == 1:
        return percent(values[0])
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f} %"


def difference_text(interval: Interval | None) -> str:
    if interval is None:
        return MISSING
    text = f"{100 * interval.mean:+.1f}".replace("-", "−")
    if interval.low is None or interval.high is None:
        return text
    low, high = (f"{100 * bound:+.1f}".replace("-", "−") for bound in (interval.low, interval.high))
    return f"{text} [{low}, {high}]"


def to_target_text(to: ToTarget) -> str:
    """The mean over seeds, only where all of them got there."""
    if to.always:
        return FORMATS[to.axis](mean(to.reached))
    if not to.reached:
        return "not reached"
    return f"reached by {len(to.reached)} of {len(to.by_seed)}"


def factor(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}×"


def _notes(runs: Sequence[Run], series: Sequence[Series], targets: Sequence[float]) -> list[str]:
    notes = list(differences(runs).values())
    notes += [f"{run.folder.name}: {run.state}." for run in runs if not run.finished]
    if any(len(one.runs) > 1 for one in series):
        notes.append(
            "Accuracies are mean ± standard deviation over seeds; differences are in percentage points, "
            f"paired by seed, with a 95 % bootstrap interval ({RESAMPLES} resamples)."
        )
    if any(task.joules is None for run in runs for task in run.tasks):
        notes.append("Energy covers the devices whose profile states their power.")
    if not targets:
        notes.append("No target was named, and the base reached no whole 5 % that an untrained model does not have.")
    return notes
