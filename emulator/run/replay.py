"""Repeats an enforced run at full speed, with its recorded variants, durations and failures."""

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
    """Read the recording in a run's folder; refuse it unless experiment, method, policy and seed are the same."""
    path = folder / "run.sqlite"
    if not is_file(path, "timing.replay"):
        raise BadInput(f"timing.replay: {folder} is not the folder of a run: there is no run.sqlite in it")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (stored,) = db.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
            variants = dict(db.execute("SELECT client, variant FROM clients"))
            # as in the engine: the plan, or the measured time if that was longer
            compute_s = dict(db.execute("SELECT task, max(plan_s, coalesce(measured_s, 0)) FROM tasks"))
            columns = {name for _, name, *_ in db.execute("PRAGMA table_info(tasks)")}
            declared = "plan_flops" if "plan_flops" in columns else "flops"  # earlier versions had the one figure
            flops = dict(db.execute(f"SELECT task, {declared} FROM tasks"))
            failed = {
                task: (outcome, detail)
                for task, outcome, detail in db.execute(
                    "SELECT task, outcome, detail FROM tasks WHERE outcome IN ('oom', 'crash', 'hang') "
                    "OR (outcome = 'refused' AND bytes_up IS NULL)"  # results that are not finite will occur again
                )
            }
    except (sqlite3.DatabaseError, TypeError) as error:
        raise BadInput(f"timing.replay: {path} cannot be read as the records of a run: {error}") from error
    try:
        recorded = msgspec.convert(up_to_date(msgspec.json.decode(stored)), RunConfig)
    except (msgspec.DecodeError, TypeError) as error:
        raise BadInput(f"timing.replay: {path} comes from another version or is damaged: {error}") from error
    differing = _differences(recorded, config)
    if differing:
        raise BadInput(f"timing.replay: {folder} has another configuration; these keys differ: {', '.join(differing)}")
    return Recording(variants, compute_s, flops, failed)


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
