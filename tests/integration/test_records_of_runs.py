"""The records of real runs: what they hold, what the report makes of them, and resuming those of an earlier version."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs
from small_runs import TINIER, query, tiny

from fleetbed.analysis.page.report import write_report
from fleetbed.analysis.tables.runs import open_run
from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.results import read_result
from fleetbed.emulator.records.tables import ADDED_SCORES, SCHEMA_VERSION, TABLES, MetricRow, NoticeRow, columns
from fleetbed.emulator.resume.run_folder import standing
from fleetbed.emulator.run import run
from fleetbed.profiles.errors import FleetbedError

SETS = (*TINIER, "processes=inline", "rounds=3")
VERSION_2 = Path(__file__).parents[1] / "emulator" / "records" / "schemas" / "version-2.sql"
OUTCOMES = "SELECT task, client, outcome, uploaded_s, time_scale, loss, merged_version FROM tasks ORDER BY task"
#: in a run that neither paces nor meters its clients and has global models alone
EMPTY = {
    "caps.got",
    "clients.slowdown",
    "evaluations.client",
    "evaluations.mae",
    *(f"tasks.{name}" for name in ("time_scale", "measured_s", "overrun", "throttled_s", "peak_bytes", "anon_bytes")),
    *(f"tasks.{name}" for name in ("gpu_peak_bytes", "gpu_w")),
}
Start = Callable[..., Path]


def test_a_run_is_read_and_reported_with_no_column_left_empty(start: Start, tmp_path: Path) -> None:
    folder = start(*SETS)
    found = open_run(folder)
    assert (found.state, len(found.clients), len(found.rounds)) == ("done", 8, 3)
    assert len(found.tasks) == sum(merge.merged for merge in found.rounds) == 24
    assert {task.merged_version for task in found.tasks} == {1, 2, 3}
    assert all(task.ended_s == task.uploaded_s == task.end_s for task in found.tasks)
    empty = {
        f"{row.table}.{name}"
        for row in TABLES
        if row not in (MetricRow, NoticeRow)  # this method reports no metrics, and nothing called for a notice
        for name in columns(row)
        if query(folder, f"SELECT count({name}) FROM {row.table}") == [(0,)]
    }
    assert empty == EMPTY
    page, *_ = write_report([found], tmp_path / "report.html", None, [])
    text = page.read_text()
    assert "heteroavg" in text
    assert all(client.device_title in text for client in found.clients)


class Interrupting(Observer):
    """Ctrl-C in the last round."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self._engine = engine

    def tick(self) -> None:
        if self._engine is not None and self._engine.progress.policy.round == 3:
            raise KeyboardInterrupt


def to_version_2(folder: Path) -> None:
    """Give the records the tables of version 2."""
    with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        for row in TABLES:
            db.execute(f"ALTER TABLE {row.table} RENAME TO later_{row.table}")
        db.executescript(VERSION_2.read_text())
        for row in TABLES:
            then = [name for name in columns(row) if name not in ADDED_SCORES]
            db.execute(f"INSERT INTO {row.table} SELECT {', '.join(then)} FROM later_{row.table}")
            db.execute(f"DROP TABLE later_{row.table}")
        db.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")


@pytest.mark.slow
def test_a_run_of_version_2_is_read_reported_and_resumed(start: Start, tmp_path: Path) -> None:
    whole = start(*SETS, name="whole")
    with pytest.raises(KeyboardInterrupt):
        start(*SETS, name="cut", observer=Interrupting())
    cut = tmp_path / "cut"
    before = open_run(cut)
    to_version_2(cut)
    with pytest.raises(sqlite3.OperationalError, match="time_scale"):
        query(cut, OUTCOMES)
    read = open_run(cut)
    scored = [structs.replace(row, f1=None) for row in before.evaluations]  # which it did not have
    assert (read.tasks, read.rounds, read.evaluations) == (before.tasks, before.rounds, tuple(scored))
    write_report([read], tmp_path / "report.html", None, [])
    run.resume(tiny(*SETS), cut, search=(), observer=Observer())
    assert query(cut, OUTCOMES) == query(whole, OUTCOMES)
    assert open_run(cut).meta["schema_version"] == SCHEMA_VERSION


def test_a_run_of_a_newer_version_is_refused_with_the_version_that_wrote_it(start: Start) -> None:
    folder = start(*SETS, "rounds=1")
    records = Records(folder / "run.sqlite")
    records.set_meta(schema_version=99, fleetbed_version="9.9", status="running")
    records.close()
    with pytest.raises(FleetbedError, match=r"schema_version is 99, this fleetbed reads up to \d+; use fleetbed 9\.9"):
        standing(folder)
    assert query(folder, "SELECT value FROM meta WHERE key = 'schema_version'") == [("99",)]


def test_a_result_out_of_range_is_refused(start: Start) -> None:
    folder = start(*SETS, "rounds=1")
    assert read_result(folder) is not None
    with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        db.execute("UPDATE evaluations SET accuracy = 7")
    with pytest.raises(FleetbedError, match=r"records are damaged \(table evaluations row 1, accuracy: "):
        read_result(folder)
