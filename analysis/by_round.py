"""Methods round by round: the accuracy after each that was evaluated, and what a round costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from fleetbed.analysis.compare import spread
from fleetbed.analysis.curves import curve
from fleetbed.analysis.runs import Run
from fleetbed.analysis.study import Series, series_of
from fleetbed.analysis.tables import Table
from fleetbed.analysis.units import data_bytes, digits, flops, seconds


@dataclass(frozen=True)
class Costs:
    """Means over the runs of a method: of a round of the whole fleet, and of a task of one client."""

    method: str
    tasks: float
    device_s: float
    cpu_s: float | None  # of training on the host; None where a run did not measure it
    flops: float
    bytes_down_per_task: float
    bytes_up_per_task: float  # of those that came that far


def accuracies(runs: Sequence[Run]) -> list[tuple[str, dict[int, dict[int, float]]]]:
    """By method: round -> seed -> accuracy. A round with several evaluations counts as its last."""
    found = []
    for series in series_of(runs):
        rounds: dict[int, dict[int, float]] = {}
        for run in series.runs:
            one = curve(run, "rounds")
            if one is None:
                continue
            for number, accuracy in zip(one.x, one.accuracy, strict=True):
                rounds.setdefault(int(number), {})[run.config.seed] = float(accuracy)
        found.append((series.label, rounds))
    return found


def accuracy_table(runs: Sequence[Run]) -> Table:
    found = accuracies(runs)
    numbers = sorted({number for _, rounds in found for number in rounds})
    rows = tuple((label, *(spread(rounds.get(number, {})) for number in numbers)) for label, rounds in found)
    return Table(("Method", *(f"Round {number}" for number in numbers)), rows)


def accuracy_records(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {"method": label, "round": number, "seed": seed, "accuracy": accuracy}
        for label, rounds in accuracies(runs)
        for number, by_seed in sorted(rounds.items())
        for seed, accuracy in sorted(by_seed.items())
    ]


def costs(runs: Sequence[Run]) -> list[Costs]:
    return [_costs(series) for series in series_of(runs) if any(run.tasks for run in series.runs)]


def _costs(series: Series) -> Costs:
    started = [run for run in series.runs if run.tasks]
    tasks = [task for run in started for task in run.tasks]
    rounds = sum(max(task.round for task in run.tasks) for run in started)
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


def cost_table(runs: Sequence[Run]) -> Table:
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
        for one in costs(runs)
    )
    return Table(columns, rows, ("Of a round of the whole fleet; messages as the meters counted them.",))


def cost_records(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [asdict(one) for one in costs(runs)]
