"""The figures of a run as trackers take them: named numbers, each at a round and at a device time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from statistics import mean
from typing import Any

import msgspec
from msgspec import Struct

from fleetbed.analysis.tables.curves import counted, mean_accuracy, mean_loss
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import shown_of
from fleetbed.emulator.records.tables import EvaluationRow, TaskRow

#: runs with this status get no more points unless they are given more rounds
COMPLETE = ("done", "empty")


@dataclass(frozen=True)
class TrackedPoint:
    round: int
    device_s: float
    values: dict[str, float]  # all finite


class Sent(Struct, frozen=True):
    """How far a tracker has got with a run."""

    round: int = -1
    version: int = -1  # the last one whose evaluations were sent


def new_points(run: Run, sent: Sent) -> tuple[list[TrackedPoint], Sent]:
    """Return the points that were not sent yet, and how far these reach.

    A round is sent when it can no longer change: when its model was evaluated, or when the next round has merged
    something; the evaluations of a model when those of the next one have begun. So a run that is killed and resumed
    repeats nothing that was sent.
    """
    rounds = [(number, end_s) for number, end_s in _ended_rounds(run) if number > sent.round]
    evaluations = [group for group in _evaluated(run) if group[0].version > sent.version]
    points = [*_of_rounds(run, rounds), *(_of_evaluations(run, group) for group in evaluations)]
    reached = Sent(
        max([sent.round, *(number for number, _ in rounds)]),
        max([sent.version, *(group[0].version for group in evaluations)]),
    )
    return sorted(points, key=lambda point: (point.round, point.device_s)), reached


def _ended_rounds(run: Run) -> list[tuple[int, float]]:
    """Number and device time of the end of each round; before them round 0, at which all sums are 0."""
    last_merges = {one.round: one for one in run.rounds}
    tested = max((one.version for one in run.evaluations), default=-1)
    last = run.rounds[-1].round if run.rounds else 0
    ended = [
        (number, merge.device_end_s)
        for number, merge in last_merges.items()
        if number < last or merge.version <= tested or run.about.status in COMPLETE
    ]
    return [(0, 0.0), *ended] if ended else []


def _evaluated(run: Run) -> Iterator[list[EvaluationRow]]:
    """The evaluations of each version of which no more can come."""
    by_version: dict[int, list[EvaluationRow]] = {}
    for one in run.evaluations:
        by_version.setdefault(one.version, []).append(one)
    newest = max(by_version, default=0)
    for version in sorted(by_version):
        if version < newest or run.about.status in COMPLETE:
            yield by_version[version]


def _of_evaluations(run: Run, group: list[EvaluationRow]) -> TrackedPoint:
    """The means over models, as in the report's curves, and the figures of each global model."""
    metric, shown = run.metric.name, counted(group, shown_of([run], None))
    values: dict[str, float | None] = {}
    if shown:
        values |= {f"test/{metric}": mean_accuracy(shown), "test/loss": mean_loss(shown)}
    for one in group:
        if one.client is None and one.samples:
            figures = {metric: one.score, "f1": one.f1, "loss": one.loss}
            values |= {f"models/{part(one.target)}/{name}": value for name, value in figures.items()}
    return TrackedPoint(group[0].round, group[0].device_s, finite(values))


def _of_rounds(run: Run, rounds: list[tuple[int, float]]) -> Iterator[TrackedPoint]:
    """What each round took, and what the fleet and each kind of device have used by its end."""
    kinds = {client.client: part(client.device) for client in run.clients}
    groups = {"fleet": list(run.tasks)}
    groups |= {
        f"devices/{kind}": [task for task in run.tasks if kinds.get(task.client) == kind] for kind in kinds.values()
    }
    reported = _reported(run)
    ends_s = dict(_ended_rounds(run))
    for number, end_s in rounds:
        start_s = max((other_s for other, other_s in ends_s.items() if other < number), default=0.0)
        values: dict[str, float | None] = {"time/device_s": end_s}
        for name, tasks in groups.items():
            values |= {f"{name}/{key}": value for key, value in _spent(tasks, start_s, end_s).items()}
        if number:
            recent = [task for task in run.tasks if start_s < task.end_s <= end_s]
            losses = [task.loss for task in recent if task.loss is not None and isfinite(task.loss)]
            values |= {
                "round/duration_s": end_s - start_s,
                "round/merged": sum(one.merged for one in run.rounds if one.round == number),
                "round/failed": sum(task.outcome != "ok" for task in recent),
                "train/loss": mean(losses) if losses else None,
                **{name: mean(found) for name, found in reported.get(number, {}).items()},
            }
        yield TrackedPoint(number, end_s, finite(values))


def _spent(tasks: Sequence[TaskRow], start_s: float, end_s: float) -> dict[str, float | None]:
    """Sums from the start of the run to `end_s`, and peaks since `start_s`; nothing where nothing is known."""
    found: dict[str, float | None] = {}
    for name, of in (("cpu_s", "cpu_s"), ("bytes", "bytes_both"), ("joules", "joules")):
        known = [(task.end_s, value) for task in tasks if (value := getattr(task, of)) is not None]
        found[name] = sum(value for at_s, value in known if at_s <= end_s) if known else None
    peaks = [(task.peak_bytes, task.cap_bytes) for task in tasks if task.peak_bytes and start_s < task.end_s <= end_s]
    found["peak_bytes"] = max((peak for peak, _ in peaks), default=None)
    found["peak_of_cap"] = max((peak / cap for peak, cap in peaks if cap), default=None)
    return found


def _reported(run: Run) -> dict[int, dict[str, list[float]]]:
    """The method's own figures by round and name: one about the merge, or one from each task."""
    rounds = {one.version: one.round for one in run.rounds}
    found: dict[int, dict[str, list[float]]] = {}
    for metric in run.metrics:
        if metric.value is not None and isfinite(metric.value) and metric.version in rounds:
            by_name = found.setdefault(rounds[metric.version], {})
            by_name.setdefault(f"method/{part(metric.name)}", []).append(metric.value)
    return found


def finite(values: dict[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and isfinite(value)}


def part(text: str) -> str:
    """Return text as a part of a name that every tracker takes: MLflow allows the fewest characters."""
    return re.sub(r"[^\w .-]", "_", text.replace("/", "."), flags=re.ASCII).strip(" .") or "_"


def started_s(run: Run) -> float:
    """Return when the run began, in seconds since 1970; times in a tracker are this and the device time."""
    return 0.0 if run.about.started is None else datetime.fromisoformat(run.about.started).timestamp()


def settings(run: Run) -> dict[str, str]:
    """Return the configuration as text by dotted key, and what a reader needs to repeat the run."""
    found: dict[str, str] = {}

    def flatten(key: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                flatten(f"{key}.{name}" if key else str(name), inner)
        else:
            found[key] = value if isinstance(value, str) else msgspec.json.encode(value).decode()

    flatten("", msgspec.to_builtins(run.config))
    kinds = dict.fromkeys(client.device for client in run.clients)
    flatten("clients", {kind: sum(client.device == kind for client in run.clients) for kind in kinds})
    flatten("fleetbed", run.about.fleetbed_version or "")
    flatten("command", run.about.command or "")
    flatten("host", msgspec.to_builtins(run.about.host) or "")
    return {part(key): value for key, value in found.items()}
