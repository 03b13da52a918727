"""Metrics that a method or an app reported for its tasks and its merges, besides the loss of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import isfinite
from statistics import mean
from typing import NamedTuple

from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series
from fleetbed.analysis.tables.units import digits
from fleetbed.analysis.tables.writing import Table


class TaskMetric(NamedTuple):
    run: str
    task: int
    client: int
    round: int
    name: str
    value: float | None  # None if it was not finite


def task_metrics(run: Run) -> Iterator[TaskMetric]:
    tasks = {task.task: task for task in run.tasks}
    for metric in run.metrics:
        if metric.task is not None and (task := tasks.get(metric.task)) is not None:
            finite = metric.value is not None and isfinite(metric.value)
            yield TaskMetric(
                run.name, task.task, task.client, task.round, metric.name, metric.value if finite else None
            )


class MetricPoint(NamedTuple):
    device_s: float
    round: int
    value: float


@lru_cache(maxsize=64)  # a report asks for every name
def merge_metrics(run: Run) -> dict[str, list[MetricPoint]]:
    """Return the finite metrics of merges by name; what a server measured before its first merge counts as round 0."""
    merges = {merge.version: merge for merge in run.rounds}
    name_of = _names(run)
    found: dict[str, list[MetricPoint]] = {}
    for metric in sorted(run.metrics, key=lambda metric: metric.version):  # a server's first figures are written late
        if metric.task is None and metric.value is not None and isfinite(metric.value):
            merge = merges.get(metric.version)
            end_s, number, stage = (merge.device_end_s, merge.round, merge.stage) if merge else (0.0, 0, "")
            found.setdefault(name_of(metric.name, stage), []).append(MetricPoint(end_s, number, metric.value))
    return found


def values_of_tasks(run: Run) -> dict[str, dict[int, float]]:
    """Return the finite metrics of tasks, by name and task."""
    stages = {task.task: task.stage for task in run.tasks}
    name_of = _names(run)
    found: dict[str, dict[int, float]] = {}
    for one in task_metrics(run):
        if one.value is not None:
            found.setdefault(name_of(one.name, stages[one.task]), {})[one.task] = one.value
    return found


def _names(run: Run) -> Callable[[str, str], str]:
    """Return how a metric of a stage is called: by its name, with the stage if several stages report it."""
    merges = {merge.version: merge.stage for merge in run.rounds}
    tasks = {task.task: task.stage for task in run.tasks}
    stages: dict[str, set[str]] = {}
    for metric in run.metrics:
        stage = merges.get(metric.version) if metric.task is None else tasks.get(metric.task)
        if stage is not None:
            stages.setdefault(metric.name, set()).add(stage)
    return lambda name, stage: f"{name} ({stage})" if stage and len(stages[name]) > 1 else name


def client_means(run: Run) -> dict[str, dict[int, float]]:
    """Return the mean over a client's tasks, by name and client."""
    values: dict[str, dict[int, list[float]]] = {}
    for one in task_metrics(run):
        if one.value is not None:
            values.setdefault(one.name, {}).setdefault(one.client, []).append(one.value)
    return {name: {client: mean(found) for client, found in by_client.items()} for name, by_client in values.items()}


def metric_table(series: Sequence[Series]) -> Table | None:
    """Return a table by method and name: the number of tasks, and the values of the first and the last round."""
    rows = []
    for one in series:
        found: dict[str, list[TaskMetric]] = {}
        for metric in (metric for run in one.runs for metric in task_metrics(run)):
            found.setdefault(metric.name, []).append(metric)
        for name, metrics in found.items():
            known = [(metric.round, metric.value) for metric in metrics if metric.value is not None]
            lost = len(metrics) - len(known)
            count = f"{len(metrics)}, {lost} not finite" if lost else str(len(metrics))
            figures = ["–"] * 5
            if known:
                first, last = min(number for number, _ in known), max(number for number, _ in known)
                values = [value for _, value in known]
                ends = [mean(value for number, value in known if number == end) for end in (first, last)]
                figures = [digits(value) for value in (mean(values), *ends, min(values), max(values))]
            rows.append((f"{one.label}: {name}", count, *figures))
    columns = ("Method and metric", "Tasks", "Mean", "First round", "Last round", "Minimum", "Maximum")
    return Table(columns, tuple(rows)) if rows else None
