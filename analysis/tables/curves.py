"""Curves of accuracy, loss or a metric of merges against what they cost: for one run and over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetbed.analysis.tables.metrics import merge_metrics
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series
from fleetbed.emulator.method.series import TargetSeries
from fleetbed.emulator.records.metric import ACCURACY, Metric
from fleetbed.emulator.records.tables import EvaluationRow
from fleetbed.profiles.errors import BadInput

Axis = Literal["time", "rounds", "bytes", "joules", "flops"]
AXES: tuple[Axis, ...] = ("time", "rounds", "bytes", "joules", "flops")


@dataclass(frozen=True)
class MergeMetric:
    """A metric that a method or an app reported for its merges."""

    name: str


Measure = Literal["accuracy", "loss"] | MergeMetric
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A measure as a step function of x, because a model does not change until the next evaluation or merge.

    Where labels are numbers it is the mean absolute error in place of the accuracy. A value is NaN, a gap in the curve,
    if all models had diverged.
    """

    x: Floats
    y: Floats
    metric: Metric = ACCURACY

    def first_reaching(self, target: float) -> float | None:
        above = self.metric.higher_is_better
        reached = np.flatnonzero(self.y >= target if above else self.y <= target)
        return float(self.x[reached[0]]) if len(reached) else None


@dataclass(frozen=True)
class Band:
    """Mean and standard deviation over seeds on a common axis; `deviation` is 0 if only one seed is left."""

    x: Floats
    mean: Floats
    deviation: Floats
    seeds: int


def counted(evaluations: Sequence[EvaluationRow], shown: TargetSeries) -> list[EvaluationRow]:
    """Return the evaluations that make up a run's accuracy in the series shown."""
    return [evaluation for evaluation in evaluations if evaluation.samples and evaluation.series == shown]


def mean_accuracy(evaluations: Sequence[EvaluationRow]) -> float:
    """Return the mean over models, weighted by test samples; NaN if all diverged.

    On the whole test set that is the plain mean. If only some models diverged, they count with the accuracy they have:
    leaving them out would flatter the method.
    """
    if all(evaluation.diverged for evaluation in evaluations):
        return float("nan")
    values = [evaluation.score for evaluation in evaluations]
    return float(np.average(values, weights=[evaluation.samples for evaluation in evaluations]))


def mean_loss(evaluations: Sequence[EvaluationRow]) -> float:
    """Return the mean over models with a finite loss, weighted by test samples; NaN if all diverged."""
    known = [(one.loss, one.samples) for one in evaluations if one.loss is not None and not one.diverged]
    losses, samples = [loss for loss, _ in known], [count for _, count in known]
    return float(np.average(losses, weights=samples)) if known else float("nan")


@lru_cache(maxsize=512)  # a report uses each several times
def curve(run: Run, axis: Axis, shown: TargetSeries, measure: Measure = "accuracy") -> Curve | None:
    """Return the curve; None if the run did not measure this, or (joules) if no device states its power."""
    points = _points(run, shown, measure)
    if not points:
        return None
    times, rounds, y = np.array(points, dtype=float).T
    if axis == "time":
        return Curve(times, y, run.metric)
    if axis == "rounds":
        return Curve(rounds, y, run.metric)
    spent = _spending(run, axis)
    if spent is None:
        return None
    moments, amounts = spent
    total = np.concatenate([[0.0], np.cumsum(amounts)])
    return Curve(total[np.searchsorted(moments, times, side="right")], y, run.metric)


def _points(run: Run, shown: TargetSeries, measure: Measure) -> list[tuple[float, float, float]]:
    """Return device time, round and value of everything that was measured."""
    if isinstance(measure, MergeMetric):
        return [(point.device_s, point.round, point.value) for point in merge_metrics(run).get(measure.name, ())]
    by_version: dict[int, list[EvaluationRow]] = {}
    for evaluation in counted(run.evaluations, shown):
        by_version.setdefault(evaluation.version, []).append(evaluation)
    average = mean_accuracy if measure == "accuracy" else mean_loss
    groups = [by_version[version] for version in sorted(by_version)]
    return [(group[0].device_s, group[0].round, average(group)) for group in groups]


def _spending(run: Run, axis: Axis) -> tuple[Floats, Floats] | None:
    """Return times and amounts of what the whole fleet spent, in order of device time."""
    spent: list[tuple[float, float]] = []
    for task in run.tasks:
        if axis == "bytes":
            spent.append((task.end_s if task.downloaded_s is None else task.downloaded_s, task.bytes_down))
            spent.append((task.end_s, task.bytes_up or 0))
        elif axis == "joules":
            if task.joules is not None:
                spent.append((task.end_s, task.joules))
        else:
            spent.append((task.end_s, task.flops))
    if axis == "joules" and not spent:
        return None
    table = np.array(sorted(spent), dtype=float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def band(series: Series, axis: Axis, measure: Measure = "accuracy", points: int = 200) -> Band | None:
    """Return mean and deviation over the seeds of a series; each point is after the same round in all of them.

    On the other axes its position is the mean cost up to that round. A finished run keeps its last value until the
    longest run ends; an unfinished run counts only as far as it went.
    """
    found = []
    for run in series.runs:
        rounds, one = (curve(run, each, series.shown, measure) for each in ("rounds", axis))
        if rounds is not None and one is not None:
            found.append((run.finished, dict(zip(rounds.x, zip(one.x, one.y, strict=True), strict=True))))
    if not found:
        return None
    numbers = np.array(sorted({number for _, by_round in found for number in by_round}))
    if len(numbers) > points:
        numbers = np.unique(np.concatenate([numbers[:: len(numbers) // points + 1], numbers[-1:]]))
    x, y = np.full((2, len(found), len(numbers)), np.nan)
    for row, (finished, by_round) in enumerate(found):
        for column, number in enumerate(numbers):
            if number in by_round:
                x[row, column], y[row, column] = by_round[number]
            elif finished and number > max(by_round):
                y[row, column] = by_round[max(by_round)][1]
    count = (~np.isnan(y)).sum(axis=0)
    mean = np.where(count > 0, np.nansum(y, axis=0) / np.maximum(count, 1), np.nan)
    deviation = np.sqrt(np.nansum((y - mean) ** 2, axis=0) / np.maximum(count - 1, 1))
    # the mean must not go back when only slower seeds are left
    return Band(np.maximum.accumulate(np.nanmean(x, axis=0)), mean, deviation, len(found))


def to_target(run: Run, axis: Axis, target: float, shown: TargetSeries) -> float | None:
    """Return the cost until an evaluation was first as good as the target; None if it never was."""
    one = curve(run, axis, shown)
    return None if one is None else one.first_reaching(target)


def best_accuracy(one: Curve) -> float:
    """Return the highest accuracy, or the lowest error; NaN if there is none."""
    known = one.y[~np.isnan(one.y)]
    if not len(known):
        return float("nan")
    return float(known.max() if one.metric.higher_is_better else known.min())


def targets_of(runs: Sequence[Run], base: Series, asked: Sequence[float]) -> tuple[float, ...]:
    """Return the requested targets, or those of the experiments, or the highest 5 % step the base always reached."""
    for target in asked:
        if base.metric is ACCURACY and not 0 <= target <= 1:
            raise BadInput(f"--target {target:g}: an accuracy is from 0 to 1, such as 0.6.")
    if asked:
        return tuple(asked)
    named = {target for run in runs for target in run.config.experiment.evaluation.targets}
    if named:
        return tuple(sorted(named))
    if base.metric is not ACCURACY:  # an error has no scale of its own to take a step from
        return ()
    curves = {run: one for run in [*base.runs, *runs] if (one := curve(run, "rounds", base.shown)) is not None}
    best = [best_accuracy(curves[run]) for run in base.runs if run in curves]
    untrained = [one.y[0] for one in curves.values() if one.x[0] == 0]
    if not best or np.isnan([*best, *untrained]).any():
        return ()
    step = float(np.floor(min(best) * 20 + 1e-9) / 20)
    return (step,) if step > max(untrained, default=0.0) else ()


def y_range(bands: Sequence[Band], targets: Sequence[float], metric: Metric = ACCURACY) -> tuple[float, float]:
    """Return the ends of the axis for these curves, with room for bands and targets.

    For accuracies they are multiples of 5 %; an error begins at 0.
    """
    low = [value for one in bands for value in one.mean - one.deviation if not np.isnan(value)]
    high = [value for one in bands for value in one.mean + one.deviation if not np.isnan(value)]
    if metric is not ACCURACY:
        return 0.0, 1.05 * float(max([*high, *targets], default=1.0)) or 1.0
    bottom = max(0.0, np.floor(min([*low, *targets], default=0.0) * 20) / 20)
    top = np.ceil(max([*high, *(target + 0.02 for target in targets)], default=0.0) * 20) / 20
    return float(bottom), float(max(bottom + 0.05, min(1.0, top)))
