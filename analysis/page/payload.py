"""The data of the report page: one JSON value, made small by columns and whole numbers.

Device times of tasks are counted in ticks of `tick_s` seconds, so that a task needs some 60 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from msgspec import structs

from fleetbed.analysis.figures.style import looks
from fleetbed.analysis.tables.clients import OUTCOMES, ClientResources, client_rows, kind_medians
from fleetbed.analysis.tables.compare import Comparison, SeriesGroup
from fleetbed.analysis.tables.curves import Axis, Measure, MergeMetric, band, y_range
from fleetbed.analysis.tables.metrics import client_means, merge_metrics, values_of_tasks
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series
from fleetbed.analysis.tables.stragglers import (
    participation,
    round_costs,
    staleness,
    waited_for,
    waste,
)
from fleetbed.emulator.method.series import TITLES

SHOWN_AXES: tuple[Axis, ...] = ("time", "rounds", "bytes", "joules")
PHASES = ("download", "compute", "upload")
PATH = (*PHASES, "server", "rest")
#: With more tasks than this on one page, only the first seed of each series has a timeline: the page stays below 5 MB.
MOST_TASKS = 50_000
MOST_METRICS = 40  # of merges, and of tasks, that have a curve; the files beside the page have all of them
MOST_VALUES = 200_000  # of metrics of tasks


def payload(comparison: Comparison) -> dict[str, Any]:
    series = comparison.series
    look = looks(series)
    runs = [(one, run) for one in series for run in one.runs]
    with_timeline = _with_timeline(series)
    found = {task.outcome for _, run in runs for task in run.tasks}
    outcomes = [*OUTCOMES, *sorted(found - set(OUTCOMES))]  # a later version may have more of them
    metric = comparison.series[0].metric
    return {
        "metric": {"name": metric.name, "title": metric.title.capitalize()},
        "unevaluated": _unevaluated(series),
        "groups": [
            {
                "shown": group.shown,
                "title": TITLES[group.shown],
                "targets": list(group.targets),
                "range": _range(group),
            }
            for group in comparison.groups
        ],
        "series": [
            {
                "label": one.label,
                "shown": one.shown,
                "colour": look[one.label].colour_number,
                "marker": look[one.label].marker_number,
                "policy": one.policy,
            }
            for one in series
        ],
        "curves": {axis: [_curve(one, axis) for one in series] for axis in SHOWN_AXES},
        "metrics": [
            {"name": name, "curves": [_curve(one, "time", MergeMetric(name)) for one in series]}
            for name in list(dict.fromkeys(name for _, run in runs for name in merge_metrics(run)))[:MOST_METRICS]
        ],
        "losses": [_curve(one, "time", "loss") for one in series],
        "outcomes": outcomes,
        "phases": list(PHASES),
        "path": list(PATH),
        "columns": list(ClientResources.__struct_fields__),
        "runs": [_run(one, run, outcomes if run in with_timeline else None) for one, run in runs],
    }


def _unevaluated(series: Sequence[Series]) -> str:
    """Return what stands in place of a chart without a curve."""
    runs = [run for one in series for run in one.runs]
    if all(run.finished and run.config.experiment.flower is not None for run in runs):
        return "The app reports no accuracy together with a loss; its own metrics are below."
    return "There is no evaluation yet."


def _range(group: SeriesGroup) -> tuple[float, float]:
    bands = [band(one.series, "rounds") for one in group.summaries]
    return y_range([one for one in bands if one is not None], group.targets, group.metric)


def _with_timeline(series: Sequence[Series]) -> list[Run]:
    """Choose the runs that get a timeline: first seeds before second ones, up to MOST_TASKS tasks."""
    chosen: list[Run] = []
    left = MOST_TASKS
    for turn in range(max(len(one.runs) for one in series)):
        for one in series:
            if turn < len(one.runs) and (turn == 0 or len(one.runs[turn].tasks) <= left):
                chosen.append(one.runs[turn])
                left -= len(one.runs[turn].tasks)
    return chosen


def _curve(one: Series, axis: Axis, measure: Measure = "accuracy") -> dict[str, Any] | None:
    found = band(one, axis, measure)
    if found is None:
        return None
    deviation = [_short(value) for value in found.deviation] if found.seeds > 1 else None  # NaN becomes null: a gap
    means = [_short(value) for value in found.mean]
    return {"x": [_short(value) for value in found.x], "mean": means, "sd": deviation, "seeds": found.seeds}


def _short(value: Any) -> Any:
    """Round a float to the digits that are shown; return anything else unchanged."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _run(one: Series, run: Run, outcomes: list[str] | None) -> dict[str, Any]:
    """Return the data of a run; it has no timeline if `outcomes` is None."""
    rows = client_rows(run, one.shown)
    return {
        "label": f"{one.label}, seed {run.config.seed}",
        "series": one.label,
        "state": "" if run.finished else run.state,
        "in_rounds": run.in_rounds,
        "clients": [[_short(value) for value in structs.astuple(row)] for row in rows],
        "medians": {
            kind: {column: _short(value) for column, value in columns.items()}
            for kind, columns in kind_medians(rows).items()
        },
        "rounds": _rounds(run),
        "waste": [{"outcome": outcome, **asdict(lost)} for outcome, lost in waste(run).items()],
        "participation": [asdict(row) for row in participation(run)],
        "staleness": list(staleness(run).items()),
        "metrics": {
            name: {
                client.name: _short(by_client[client.client]) for client in run.clients if client.client in by_client
            }
            for name, by_client in client_means(run).items()
        },
        "tasks": None if outcomes is None else _tasks(run, outcomes),
    }


def _rounds(run: Run) -> dict[str, Any]:
    costs = round_costs(run)
    return {
        "number": [cost.round for cost in costs],
        "stage": [cost.stage for cost in costs],
        "start": _seconds(cost.start_s for cost in costs),
        "duration": _seconds(cost.duration_s for cost in costs),
        "last": [cost.last for cost in costs],
        "without": [None if cost.without_last_s is None else round(cost.without_last_s, 3) for cost in costs],
        "path": {name: _seconds(cost.path.get(name, 0.0) for cost in costs) for name in PATH},
        "idle": round(sum(cost.idle_s for cost in costs), 3),
        "busy": round(sum(cost.busy_s for cost in costs), 3),
        "waited_for": waited_for(costs),
    }


def _seconds(values: Any) -> list[float]:
    return [round(value, 3) for value in values]


def _tasks(run: Run, outcomes: list[str]) -> dict[str, Any]:
    """Return columns in order of dispatch; `start` has the differences to the previous task."""
    tasks = sorted(run.tasks, key=lambda task: (task.dispatched_s, task.client))
    tick = max(1e-3, run.device_s / 1e6)
    starts = np.round([task.dispatched_s / tick for task in tasks]).astype(int)
    columns: dict[str, Any] = {
        "tick_s": tick,
        "client": [task.client for task in tasks],
        "start": np.diff(starts, prepend=0).tolist(),
        "outcome": [outcomes.index(task.outcome) for task in tasks],
        "merged": [int(task.merged_version is not None) for task in tasks],
    }
    lengths = [task.phases() for task in tasks]
    for phase in PHASES:
        columns[phase] = [round(found.get(phase, 0.0) / tick) for found in lengths]
    columns["cpu"] = _whole((task.cpu_s for task in tasks), 1e-3)
    columns["peak"] = _whole((task.peak_bytes for task in tasks), 1024)
    columns["bytes"] = _whole((task.bytes_both for task in tasks), 1)
    columns["joules"] = _whole((task.joules for task in tasks), 1e-2)
    columns["loss"] = _whole((task.loss for task in tasks), 1e-3)
    most = min(MOST_METRICS, MOST_VALUES // max(1, len(tasks)))
    columns["metrics"] = {
        name: [_short(values.get(task.task)) for task in tasks]
        for name, values in list(values_of_tasks(run).items())[:most]
    }
    return columns


def _whole(values: Iterable[float | None], unit: float) -> list[int | None]:
    """Return values in whole units; None stays None, and so does a value that is not finite."""
    return [None if value is None or not np.isfinite(value) else round(value / unit) for value in values]
