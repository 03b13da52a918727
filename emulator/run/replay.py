"""Repeating an enforced run: its variants, durations and failures as they were recorded, at full speed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fleetbed.emulator.engine.timing import Recording
from fleetbed.emulator.resume.identity import differences
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig, TimingChoice
from fleetbed.profiles.files import is_file
from fleetbed.profiles.older import up_to_date


def read_recording(folder: Path, config: RunConfig) -> Recording:
    """The recording in a run's folder, refused unless it is of the same experiment, method, policy and seed."""
    path = folder / "run.sqlite"
    if not is_file(path, "timing.replay"):
        raise BadInput(f"timing.replay: {folder} is not a run's folder, there is no file run.sqlite in it")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (stored,) = db.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
            variants = dict(db.execute("SELECT client, variant FROM clients"))
            # as the engine made it: the plan, or what was measured where that was longer
            compute_s = dict(db.execute("SELECT task, max(plan_s, coalesce(measured_s, 0)) FROM tasks"))
            columns = {name for _, name, *_ in db.execute("PRAGMA table_info(tasks)")}
            declared = "plan_flops" if "plan_flops" in columns else "flops"  # earlier versions had the one figure
            flops = dict(db.execute(f"SELECT task, {declared} FROM tasks"))
            failed = {
                task: (outcome, detail)
                for task, outcome, detail in db.execute(
                    "SELECT task, outcome, detail FROM tasks WHERE outcome IN ('oom', 'crash', 'hang') "
                    "OR (outcome = 'refused' AND bytes_up IS NULL)"  # what is not finite comes about again
                )
            }
    except (sqlite3.DatabaseError, TypeError) as error:
        raise BadInput(f"timing.replay: {path} cannot be read as the records of a run: {error}") from error
    try:
        recorded = msgspec.convert(up_to_date(msgspec.json.decode(stored)), RunConfig)
    except (msgspec.DecodeError, TypeError) as error:
        raise BadInput(f"timing.replay: {path} is of another version or damaged: {error}") from error
    differing = _differences(recorded, config)
    if differing:
        raise BadInput(f"timing.replay: {folder} is of another configuration, different are: {', '.join(differing)}")
    return Recording(variants, compute_s, flops, failed)


def _differences(recorded: RunConfig, asked: RunConfig) -> list[str]:
    """The keys in which two configurations differ, beside how time and processes are handled."""
    trees = []
    for config in (recorded, asked):
        # the plural ones make the study that a run is of; its own method, policy and seed stand beside them
        experiment = replace(
            config.experiment, timing=TimingChoice(), processes="resident", algorithms=(), policies=(), seeds=()
        )
        trees.append(replace(config, experiment=experiment))
    return list(differences(*trees))
