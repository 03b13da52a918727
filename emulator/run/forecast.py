"""Forecast of a run: the engine's own loop with nearly all of the work left out.

Timeline, policy, plans and transfers are the run's own. Instead of training, clients answer with the result of two
steps of the same kind of task (`short_tasks.py`), and a merge goes as far as messages and work depend on it
(`Algorithm.foresee`). So device time follows the method from round to round.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.guarded import Guarded
from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.machine import host
from fleetbed.emulator.method.algorithm import Arrival, Merged
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import TaskRow
from fleetbed.emulator.resume.checkpoint import KEEP
from fleetbed.emulator.run.deadlines import deadline_advice
from fleetbed.emulator.run.fleet import FleetProcesses, setup_of
from fleetbed.emulator.run.preparation import Fresh, prepare_fresh
from fleetbed.emulator.run.short_tasks import KindsOfTasks, ShortTasks
from fleetbed.emulator.run.start import first_progress
from fleetbed.emulator.wire.messages import Enrolment
from fleetbed.models.cost.predict import forward_flops
from fleetbed.profiles.experiment import RunConfig

#: limit of a forecast; the cost of a longer run is extrapolated from its first rounds
MOST_TASKS = 2000
START_S = 3.0  # until the first order: imports, forks, the choice of variants
PATIENCE = 20.0  # times the deadline
ROW_BYTES = 700  # of a task in the records, with its share of the file's overhead


class Forecast(Struct, frozen=True, kw_only=True):
    run: str
    clients: int
    unfit: int
    tasks: int
    device_s: float
    host_s: float  # about
    disk_bytes: int
    warnings: list[str]


class Total(Struct, frozen=True, kw_only=True):
    """Sum over all runs of a study, one after the other."""

    runs: int
    tasks: int
    device_s: float
    host_s: float
    disk_bytes: int


def total(forecasts: Sequence[Forecast]) -> Total:
    return Total(
        runs=len(forecasts),
        tasks=sum(each.tasks for each in forecasts),
        device_s=sum(each.device_s for each in forecasts),
        host_s=sum(each.host_s for each in forecasts),
        disk_bytes=sum(each.disk_bytes for each in forecasts),
    )


def forecast(config: RunConfig, *, search: Sequence[Path], observer: Observer) -> Forecast:
    """Lay out, choose and plan as the run would, then simulate its timeline; over Ray, as if this host did it all."""
    if config.experiment.processes == "ray":
        here = msgspec.structs.replace(config.experiment, processes="inline")
        config = msgspec.structs.replace(config, experiment=here)
    layout = lay_out(config, search)
    with tempfile.TemporaryDirectory(prefix="fleetbed-forecast-") as name:
        folder = Path(name)
        (folder / "partition.json").write_bytes(layout.split.to_json())
        setup = setup_of(layout, folder)
        with closing(FleetProcesses(setup, observer.tick)) as fleet:
            prepared = prepare_fresh(layout, fleet, observer)
            layout, scale = _shortened(layout, prepared)
            clients = tuple(who.client for who in prepared.participants.values())
            kinds = KindsOfTasks(TaskRunner.open(setup).enrol(Enrolment(clients=clients, keep_heap=False)))
            rows, device_s, short = _loop(layout, prepared, kinds, observer)
            warnings = _warnings(layout, prepared, kinds, observer, rows)
    return Forecast(
        run=config.name,
        clients=len(prepared.participants),
        unfit=len(layout.specs) - len(prepared.participants),
        tasks=round(scale * len(rows)),
        device_s=scale * device_s,
        host_s=START_S + scale * _host_s(layout, prepared, short, rows),
        disk_bytes=_disk_bytes(prepared, round(scale * len(rows))),
        warnings=warnings,
    )


def _shortened(layout: Layout, prepared: Fresh) -> tuple[Layout, float]:
    """Return the layout with as many rounds as take a few seconds, and the factor to multiply the result by."""
    config = layout.config
    a_round = max(1.0, len(prepared.participants) * config.experiment.participation.ratio)
    rounds = min(config.experiment.rounds, max(1, int(MOST_TASKS / a_round / len(prepared.method.needs.stages))))
    experiment = msgspec.structs.replace(config.experiment, rounds=rounds)
    fewer = msgspec.structs.replace(config, experiment=experiment)
    return replace(layout, config=fewer), config.experiment.rounds / rounds


class Foreseeing(Guarded):
    """The method in a forecast: a merge goes as far as messages and work depend on it."""

    def merge(self, state: Bundle, arrivals: Sequence[Arrival]) -> Merged:
        return Merged(state=self.foresee(state, arrivals))


def _loop(
    layout: Layout, prepared: Fresh, kinds: KindsOfTasks, observer: Observer
) -> tuple[list[TaskRow], float, ShortTasks]:
    """Go through the timeline; returns the tasks, the device time at its end, and the executor.

    `prepared` stays as it is.
    """
    own = replace(
        prepared,
        participants={n: replace(who, progress=copy(who.progress)) for n, who in prepared.participants.items()},
        timing=prepared.timing.frozen(),  # nothing is measured here
        method=Foreseeing(layout.config.algorithm.name, prepared.method),
    )
    with closing(Records(Path(":memory:"))) as records:
        progress = first_progress(layout, own)
        short = ShortTasks(kinds, progress.tasks)
        engine = Engine(
            layout=layout,
            folder=short.folder,
            prepared=own,
            executor=short,
            records=records,
            progress=progress,
            checkpoint=lambda _: None,
            tick=observer.tick,
            started_s=time.monotonic(),
        )
        engine.run()
        rows = records.read(TaskRow)
    return rows, progress.timeline.now_s, short


def _warnings(
    layout: Layout, prepared: Fresh, kinds: KindsOfTasks, observer: Observer, rows: Sequence[TaskRow]
) -> list[str]:
    """A sentence for each kind of device that would lose tasks to the deadline."""
    config = layout.config
    deadline_s, replayed = config.policy.deadline_s, config.experiment.timing.source == "replay"
    if config.policy.kind != "deadline" or deadline_s is None or replayed or all(r.outcome != "late" for r in rows):
        return []
    # how long the tasks would take with a much longer deadline; not without one, because a link may stay down
    policy = msgspec.structs.replace(config.policy, deadline_s=PATIENCE * deadline_s)
    patient = replace(layout, config=msgspec.structs.replace(config, policy=policy))
    unhurried, _, _ = _loop(patient, prepared, kinds, observer)
    found = []
    devices = {number: who.spec.kind for number, who in prepared.participants.items()}
    for kind in dict.fromkeys(devices.values()):
        tasks = [row for row in rows if devices[row.client] == kind]
        lost = [row for row in tasks if row.outcome == "late"]
        if lost:
            theirs = [row for row in unhurried if devices[row.client] == kind]
            needed_s = max((row.end_s - row.dispatched_s for row in theirs), default=None)
            if any(row.outcome == "late" for row in theirs):
                needed_s = None
            found.append(
                f"{config.name}: {len(lost)} of {len(tasks)} tasks on {kind} ({len(lost) / len(tasks):.0%}) would miss "
                f"deadline_s {deadline_s:g}; {deadline_advice(layout, prepared, kind, needed_s)}"
            )
    return found


def _host_s(layout: Layout, prepared: Fresh, short: ShortTasks, rows: Sequence[TaskRow]) -> float:
    """Round by round, the work over what the host admits at once, or its longest task; then the evaluations."""
    cores = host.cores()
    capacity = prepared.timing.capacity(cores)
    loads: dict[int, float] = {}
    longest: dict[int, float] = {}
    for row in rows:
        seconds = prepared.timing.on_host_s(row.plan_s, short.host_s.get(row.task, 0.0))
        load = seconds * prepared.participants[row.client].share
        loads[row.round] = loads.get(row.round, 0.0) + load / capacity
        longest[row.round] = max(longest.get(row.round, 0.0), seconds)
    return sum(max(loads[number], longest[number]) for number in loads) + _evaluation_s(layout, short) / cores


def _evaluation_s(layout: Layout, short: ShortTasks) -> float:
    """Return the seconds of all evaluations on one core, at the FLOP rate of training steps."""
    if not short.rates:
        return 0.0
    slowest = min(short.rates.values())
    spec = layout.dataset.spec
    return sum(
        samples * forward_flops(layout.family, variant, spec) / short.rates.get(variant, slowest)
        for variant, samples in short.evaluated.items()
    )


def _disk_bytes(prepared: Fresh, tasks: int) -> int:
    """Sum of two checkpoints and space for the next, the final models, the clients' state, and the records."""
    state = prepared.state.nbytes()
    sizes: Mapping[str | None, int] = {c.variant: c.cost.state_bytes for c in prepared.choices.values()}
    # a model that no client holds is the server's own
    models = sum(sizes.get(target.variant, state) for target in prepared.method.targets(prepared.state))
    return (KEEP + 1) * state + 2 * models + ROW_BYTES * tasks
