"""Repeats an enforced run at full speed, with its recorded variants, durations and failures."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
from msgspec.structs import replace

from fleetbed.emulator.engine.timing import FailureKind, Recording
from fleetbed.emulator.records.reading import read_rows
from fleetbed.emulator.records.tables import ClientRow, TaskRow
from fleetbed.emulator.resume.identity import differences
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig, TimingChoice
from fleetbed.profiles.files import is_file
from fleetbed.profiles.older import up_to_date


def read_recording(folder: Path, config: RunConfig) -> Recording:
    """Read the recording in a run's folder; refuse it unless experiment, method, policy and seed are the same."""
    path = folder / "run.sqlite"
    if not is_file(path, "timing.replay"):
        raise BadInput(f"timing.replay: {folder} is not the folder of a run: there is no run.sqlite in it")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (stored,) = db.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
            clients, tasks = read_rows(db, ClientRow), read_rows(db, TaskRow)
    except (sqlite3.DatabaseError, TypeError, msgspec.ValidationError) as error:
        raise BadInput(f"timing.replay: {path} cannot be read as the records of a run: {error}") from error
    try:
        recorded = msgspec.convert(up_to_date(msgspec.json.decode(stored)), RunConfig)
    except (msgspec.DecodeError, TypeError) as error:
        raise BadInput(f"timing.replay: {path} comes from another version or is damaged: {error}") from error
    differing = _differences(recorded, config)
    if differing:
        raise BadInput(f"timing.replay: {folder} has another configuration; these keys differ: {', '.join(differing)}")
    return Recording(
        variants={client.client: client.variant for client in clients},
        # as the engine made it: the plan, or what was measured where that was longer
        compute_s={task.task: max(task.plan_s, task.measured_s or 0.0) for task in tasks},
        # records of version 1 have the planned FLOPs in the other column
        flops={task.task: task.flops if task.plan_flops is None else task.plan_flops for task in tasks},
        failed={
            task.task: (kind, task.detail)
            for task in tasks
            for kind in get_args(FailureKind)
            # a result that was refused after it had been sent will be refused again
            if task.outcome == kind and (kind != "refused" or task.bytes_up is None)
        },
    )


def _differences(recorded: RunConfig, asked: RunConfig) -> list[str]:
    """Return the keys in which two configurations differ, ignoring timing and processes."""
    trees = []
    for config in (recorded, asked):
        # the lists describe the whole study; the run's own method, policy and seed are separate fields
        experiment = replace(
            config.experiment, timing=TimingChoice(), processes="resident", algorithms=(), policies=(), seeds=()
        )
        trees.append(replace(config, experiment=experiment))
    return list(differences(*trees))
