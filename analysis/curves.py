"""Accuracy against device time, rounds, bytes, joules and FLOPs, of a run and over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetbed.analysis.runs import Evaluation, Run
from fleetbed.analysis.study import Series

Axis = Literal["time", "rounds", "bytes", "joules", "flops"]
AXES: tuple[Axis, ...] = ("time", "rounds", "bytes", "joules", "flops")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Accuracy after x: a step function, since a model stays what it is until the next evaluation."""

    x: Floats
    accuracy: Floats

    def first_reaching(self, target: float) -> float | None:
        reached = np.flatnonzero(self.accuracy >= target)
        return float(self.x[reached[0]]) if len(reached) else None


@dataclass(frozen=True)
class Band:
    """Mean and standard deviation over seeds on a common axis; `deviation` is 0 where one seed is left."""

    x: Floats
    mean: Floats
    deviation: Floats
    seeds: int


def counted(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Those that make up a run's accuracy: on the whole test set or, where there is none, on own parts."""
    tested = [evaluation for evaluation in evaluations if evaluation.samples]
    return [evaluation for evaluation in tested if not evaluation.local] or tested


def mean_accuracy(evaluations: Sequence[Evaluation]) -> float:
    """Over models, weighted by test samples, which on the whole test set is the plain mean."""
    weights = [evaluation.samples for evaluation in evaluations]
    return float(np.average([evaluation.accuracy for evaluation in evaluations], weights=weights))


@lru_cache(maxsize=512)  # a report asks for each several times
def curve(run: Run, axis: Axis) -> Curve | None:
    """None where the run was never evaluated, or (joules) where no device states its watts."""
    by_version: dict[int, list[Evaluation]] = {}
    for evaluation in counted(run.evaluations):
        by_version.setdefault(evaluation.version, []).append(evaluation)
    if not by_version:
        return None
    groups = [by_version[version] for version in sorted(by_version)]
    accuracy = np.array([mean_accuracy(group) for group in groups])
    times = np.array([group[0].device_s for group in groups])
    if axis == "time":
        return Curve(times, accuracy)
    if axis == "rounds":
        return Curve(np.array([float(group[0].round) for group in groups]), accuracy)
    spent = _spending(run, axis)
    if spent is None:
        return None
    moments, amounts = spent
    total = np.concatenate([[0.0], np.cumsum(amounts)])
    return Curve(total[np.searchsorted(moments, times, side="right")], accuracy)


def _spending(run: Run, axis: Axis) -> tuple[Floats, Floats] | None:
    """When how much was spent by the whole fleet, in order of device time."""
    spent: list[tuple[float, float]] = []
    for task in run.tasks:
        if axis == "bytes":
            spent.append((task.downloaded_s or task.dispatched_s, task.bytes_down))
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


def band(series: Series, axis: Axis, points: int = 200) -> Band | None:
    """Over the seeds of a series, evaluation by evaluation: a point is after the same round in all of them.

    On the other axes it stands at the mean of what that round took. A finished run keeps its last accuracy to where
    the longest one ends; a run that did not finish counts as far as it went.
    """
    found = []
    for run in series.runs:
        rounds, one = curve(run, "rounds"), curve(run, axis)
        if rounds is not None and one is not None:
            found.append((run.finished, dict(zip(rounds.x, zip(one.x, one.accuracy, strict=True), strict=True))))
    if not found:
        return None
    numbers = np.array(sorted({number for _, by_round in found for number in by_round}))
    if len(numbers) > points:
        numbers = np.unique(np.concatenate([numbers[:: len(numbers) // points + 1], numbers[-1:]]))
    x, accuracy = np.full((2, len(found), len(numbers)), np.nan)
    for row, (finished, by_round) in enumerate(found):
        for column, number in enumerate(numbers):
            if number in by_round:
                x[row, column], accuracy[row, column] = by_round[number]
            elif finished and number > max(by_round):
                accuracy[row, column] = by_round[max(by_round)][1]
    count = (~np.isnan(accuracy)).sum(axis=0)
    mean = np.nansum(accuracy, axis=0) / count
    deviation = np.sqrt(np.nansum((accuracy - mean) ** 2, axis=0) / np.maximum(count - 1, 1))
    # where only slower seeds are left the mean must not go back
    return Band(np.maximum.accumulate(np.nanmean(x, axis=0)), mean, deviation, len(found))


def to_target(run: Run, axis: Axis, target: float) -> float | None:
    """What it took until an evaluation was first at or above the target; None: never."""
    one = curve(run, axis)
    return None if one is None else one.first_reaching(target)


def targets_of(runs: Sequence[Run], base: Series, asked: Sequence[float]) -> tuple[float, ...]:
    """Those asked for, or of the experiments, or the highest whole 5 % that the base always reached."""
    if asked:
        return tuple(asked)
    named = {target for run in runs for target in run.config.experiment.evaluation.targets}
    if named:
        return tuple(sorted(named))
    best = [one.accuracy.max() for run in base.runs if (one := curve(run, "rounds")) is not None]
    step = float(np.floor(min(best, default=0.0) * 20 + 1e-9) / 20)
    untrained = [one.accuracy[0] for run in runs if (one := curve(run, "rounds")) is not None and one.x[0] == 0]
    return (step,) if step > max(untrained, default=0.0) else ()
