"""Computes from the records which clients rounds waited for, what that cost the others, and the wasted work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fleetbed.analysis.tables.runs import Run
from fleetbed.emulator.records.tables import RoundRow, TaskRow


@dataclass(frozen=True)
class RoundCost:
    """One merge: its duration in device time along the path of the client whose result came last."""

    version: int
    round: int
    stage: str
    start_s: float
    duration_s: float
    last: int | None  # the client whose result came last; None if no result counted
    path: dict[str, float]  # download, compute, upload of that client, then server, then rest
    without_last_s: float | None  # the duration without that client; None if rounds have no last client
    idle_s: float  # idle time of the others, from their own end to the end of the round
    busy_s: float


@dataclass(frozen=True)
class Waste:
    """Work whose result was never merged."""

    tasks: int
    flops: float  # up to the cut-off; a task that failed half-way counts in full
    bytes: int
    joules: float | None  # None if none of the devices states its power
    device_s: float


@dataclass(frozen=True)
class ClientParticipation:
    device: str
    clients: int
    tasks: int
    merged: int
    last: int  # the number of merges that waited for a client of this kind
    without_s: float | None  # mean duration of a round without this kind; None if rounds have no end or no other kind


@lru_cache(maxsize=64)  # a report uses them five times
def round_costs(run: Run) -> tuple[RoundCost, ...]:
    merged: dict[int, list[TaskRow]] = {}
    invited: dict[tuple[int, str], list[TaskRow]] = {}
    for task in run.tasks:
        if task.merged_version is not None:
            merged.setdefault(task.merged_version, []).append(task)
        invited.setdefault((task.round, task.stage), []).append(task)
    return tuple(
        _round_cost(one, merged.get(one.version, []), invited.get((one.round, one.stage), []), run.in_rounds)
        for one in run.rounds
    )


def _round_cost(one: RoundRow, merged: list[TaskRow], invited: list[TaskRow], in_rounds: bool) -> RoundCost:
    waited_until = one.device_end_s - one.server_s
    by_end = sorted(merged, key=lambda task: (task.end_s, task.client))
    last = by_end[-1] if by_end else None
    path = dict(last.phases()) if last else {}
    path["server"] = one.server_s
    begun = min(one.device_start_s, last.dispatched_s) if last else one.device_start_s
    path["rest"] = max(0.0, one.device_end_s - begun - sum(path.values()))
    without = None
    # A round that continued after the last result waited for a deadline or a failure, not for that client.
    if in_rounds and last is not None and len(by_end) > 1:
        saved = last.end_s - by_end[-2].end_s if last.end_s >= waited_until - 1e-6 else 0.0
        without = one.device_end_s - one.device_start_s - max(0.0, saved)
    others = [task for task in invited if in_rounds and task.end_s <= waited_until]
    return RoundCost(
        version=one.version,
        round=one.round,
        stage=one.stage,
        start_s=one.device_start_s,
        duration_s=one.device_end_s - one.device_start_s,
        last=last.client if last else None,
        path=path,
        without_last_s=without,
        idle_s=sum(waited_until - task.end_s for task in others),
        busy_s=sum(task.end_s - task.dispatched_s for task in invited),
    )


def waited_for(costs: Sequence[RoundCost]) -> list[tuple[int, int, float]]:
    """Return the clients that rounds waited for, how often, and the total seconds spent on each alone."""
    found: dict[int, tuple[int, float]] = {}
    for cost in costs:
        if cost.last is not None and cost.without_last_s is not None:
            times, seconds = found.get(cost.last, (0, 0.0))
            found[cost.last] = (times + 1, seconds + cost.duration_s - cost.without_last_s)
    order = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))
    return [(client, times, seconds) for client, (times, seconds) in order]


def waste(run: Run) -> dict[str, Waste]:
    """Return wasted work by outcome, the most frequent first. A wasted `ok` arrived after the last merge."""
    groups: dict[str, list[TaskRow]] = {}
    for task in run.tasks:
        if task.merged_version is None:
            groups.setdefault(task.outcome, []).append(task)
    return {
        outcome: Waste(
            tasks=len(tasks),
            flops=sum(task.flops for task in tasks if task.compute_start_s is not None),
            bytes=sum(task.bytes_both for task in tasks),
            joules=_known_sum(task.joules for task in tasks),
            device_s=sum(task.end_s - task.dispatched_s for task in tasks),
        )
        for outcome, tasks in sorted(groups.items(), key=lambda item: -len(item[1]))
    }


def _known_sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def participation(run: Run) -> list[ClientParticipation]:
    """Return the participation of each device kind, in the order of the fleet."""
    kind = {client.client: client.device for client in run.clients}
    clients = Counter(kind.values())
    tasks = Counter(kind[task.client] for task in run.tasks)
    merged = Counter(kind[task.client] for task in run.tasks if task.merged_version is not None)
    last = Counter(kind[client] for client, times, _ in waited_for(round_costs(run)) for _ in range(times))
    without = rounds_without(run)
    return [
        ClientParticipation(device, clients[device], tasks[device], merged[device], last[device], without.get(device))
        for device in clients
    ]


def rounds_without(run: Run) -> dict[str, float]:
    """Return the mean duration that rounds would have had without each kind of device, for kinds that can be spared.

    A round ends when the last of the others has ended, unless one of them was still not there when it was closed: then
    it would have waited just as long.
    """
    if not run.in_rounds or not run.rounds:
        return {}
    kind = {client.client: client.device for client in run.clients}
    invited: dict[tuple[int, str], list[TaskRow]] = {}
    for task in run.tasks:
        invited.setdefault((task.round, task.stage), []).append(task)
    found = {}
    for device in dict.fromkeys(kind.values()):
        durations = []
        for one in run.rounds:
            others = [task for task in invited.get((one.round, one.stage), []) if kind[task.client] != device]
            if any(task.merged_version == one.version for task in others):
                durations.append(_duration_of(one, others))
        if len(durations) == len(run.rounds):
            found[device] = sum(durations) / len(durations)
    return found


def _duration_of(one: RoundRow, tasks: Sequence[TaskRow]) -> float:
    """Return the duration that a round would have had with these tasks alone."""
    closed_s = one.device_end_s - one.server_s
    missing = any(task.merged_version != one.version and task.end_s >= closed_s - 1e-6 for task in tasks)
    end_s = closed_s if missing else min(closed_s, max(task.end_s for task in tasks))
    return one.device_end_s - one.device_start_s - (closed_s - end_s)


def staleness(run: Run) -> dict[int, int]:
    """Return the number of merged results by staleness."""
    found = Counter(task.staleness for task in run.tasks if task.staleness is not None)
    return dict(sorted(found.items()))
