"""Tables by round: the accuracy after each evaluated round, and the cost of a round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import isnan
from statistics import mean
from typing import Any

from fleetbed.analysis.tables.compare import Comparison
from fleetbed.analysis.tables.curves import curve
from fleetbed.analysis.tables.notes import cautions
from fleetbed.analysis.tables.series import Series
from fleetbed.analysis.tables.summary_table import mean_and_deviation, series_title
from fleetbed.analysis.tables.units import data_bytes, digits, flops, seconds
from fleetbed.analysis.tables.writing import Table


@dataclass(frozen=True)
class Costs:
    """Mean costs over the runs of a method: of a round of the whole fleet, and of a task of one client."""

    method: str
    tasks: float
    device_s: float
    cpu_s: float | None  # of training on the host; None if a run did not measure it
    flops: float
    bytes_down_per_task: float
    bytes_up_per_task: float  # over tasks that reached their upload


def accuracies(series: Series) -> dict[int, dict[int, float]]:
    """Return round -> seed -> accuracy; NaN if the run had diverged. The last evaluation of a round counts."""
    rounds: dict[int, dict[int, float]] = {}
    for run in series.runs:
        one = curve(run, "rounds", series.shown)
        if one is None:
            continue
        for number, accuracy in zip(one.x, one.y, strict=True):
            rounds.setdefault(int(number), {})[run.config.seed] = float(accuracy)
    return rounds


def accuracy_tables(comparison: Comparison) -> list[Table]:
    """Return one table for each target series shown."""
    tables = []
    for group in comparison.groups:
        found = {summary.series.label: accuracies(summary.series) for summary in group.summaries}
        numbers = sorted({number for rounds in found.values() for number in rounds})
        rows = tuple(
            (label, *(mean_and_deviation(rounds.get(number, {}), group.metric) for number in numbers))
            for label, rounds in found.items()
        )
        title = series_title(group) if len(comparison.groups) > 1 else ""
        tables.append(Table(("Method", *(f"Round {number}" for number in numbers)), rows, title=title))
    return [*tables[:-1], replace(tables[-1], notes=tuple(cautions(comparison.series)))]


def accuracy_records(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "method": series.label,
            "series": series.shown,
            "round": number,
            "seed": seed,
            series.metric.name: None if isnan(accuracy) else accuracy,
        }
        for series in comparison.series
        for number, by_seed in sorted(accuracies(series).items())
        for seed, accuracy in sorted(by_seed.items())
    ]


def costs(comparison: Comparison) -> list[Costs]:
    return [_costs(series) for series in comparison.series if any(run.tasks for run in series.runs)]


def _costs(series: Series) -> Costs:
    started = [run for run in series.runs if run.tasks]
    tasks = [task for run in started for task in run.tasks]
    rounds = sum(max(1, *(task.round for task in run.tasks)) for run in started)
    cpu = [task.cpu_s for task in tasks if task.cpu_s is not None]
    up = [task.bytes_up for task in tasks if task.bytes_up is not None]
    return Costs(
        method=series.label,
        tasks=len(tasks) / rounds,
        device_s=sum(max(task.end_s for task in run.tasks) for run in started) / rounds,
        cpu_s=sum(cpu) / rounds if cpu else None,
        flops=sum(task.flops for task in tasks) / rounds,
        bytes_down_per_task=mean(task.bytes_down for task in tasks),
        bytes_up_per_task=mean(up) if up else 0.0,
    )


def cost_table(comparison: Comparison) -> Table:
    columns = ("Method", "Tasks", "Device time", "CPU of training", "FLOPs", "Down per task", "Up per task")
    rows = tuple(
        (
            one.method,
            digits(one.tasks),
            seconds(one.device_s),
            seconds(one.cpu_s),
            flops(one.flops),
            data_bytes(one.bytes_down_per_task),
            data_bytes(one.bytes_up_per_task),
        )
        for one in costs(comparison)
    )
    notes = ("Costs are per round of the whole fleet; bytes are as measured.", *cautions(comparison.series))
    return Table(columns, rows, notes)


def cost_records(comparison: Comparison) -> list[dict[str, Any]]:
    return [asdict(one) for one in costs(comparison)]
