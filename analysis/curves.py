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

    def at(self, x: Floats) -> Floats:
        """The last value at or before each x; NaN before the first."""
        place = np.searchsorted(self.x, x, side="right") - 1
        return np.where(place >= 0, self.accuracy[np.maximum(place, 0)], np.nan)

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
    """Over the seeds of a series.

    A finished run keeps its last accuracy, so its curve goes on level to where the longest one ends; a run
    that did not finish counts as far as it went.
    """
    curves = [(one, run.finished) for run in series.runs if (one := curve(run, axis)) is not None]
    if not curves:
        return None
    start = max(one.x[0] for one, _ in curves)
    x = np.unique(np.concatenate([one.x for one, _ in curves]))
    x = x[x >= start]
    if len(x) > points:
        x = np.unique(np.concatenate([x[:: len(x) // points + 1], x[-1:]]))
    values = np.array(
        [one.at(x) if finished else np.where(x <= one.x[-1], one.at(x), np.nan) for one, finished in curves]
    )
    present = ~np.isnan(values).all(axis=0)
    values, x = values[:, present], x[present]
    count = (~np.isnan(values)).sum(axis=0)
    mean = np.nansum(values, axis=0) / count
    squares = np.nansum((values - mean) ** 2, axis=0)
    deviation = np.sqrt(squares / np.maximum(count - 1, 1))
    return Band(x, mean, deviation, len(curves))


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
