"""The tables have one definition, and records of earlier versions are read and continued.

`schemas` holds the tables of every version. A change to a table raises SCHEMA_VERSION and adds a file; the files that
are there stay as they are.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbed.emulator.records.reading import read_rows
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import ADDED, SCHEMA_VERSION, TABLES, MetricRow, NoticeRow, RoundRow

SCHEMAS = Path(__file__).parent / "schemas"
ROUND = {
    "version": 1,
    "round": 1,
    "stage": "train",
    "device_start_s": 0.0,
    "device_end_s": 4.0,
    "server_s": 0.5,
    "host_start_s": 1.0,
    "host_end_s": 9.0,
    "merged": 2,
}
EVALUATION = {
    "version": 1,
    "round": 1,
    "device_s": 4.0,
    "target": "v",
    "variant": "v",
    "local": 0,
    "samples": 10,
    "accuracy": 0.5,
    "loss": 1.0,
}
TASK = {
    "task": 0,
    "client": 3,
    "round": 1,
    "stage": "train",
    "variant": "v",
    "outcome": "ok",
    "detail": "",
    "base_version": 0,
    "dispatched_s": 0.0,
    "host_queued_s": 0.0,
    "plan_s": 2.5,
    "dilation": 1.5,
    "cap_bytes": 100,
    "flops": 8.0,
    "bytes_down": 10,
}


def schema(version: int) -> str:
    return (SCHEMAS / f"version-{version}.sql").read_text()


def layout(db: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """The columns of every table: position, name, type, whether NULL is refused, default, place in the key."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return {name: db.execute(f"PRAGMA table_info({name})").fetchall() for name in names}


def insert(db: sqlite3.Connection, table: str, **row: Any) -> None:
    marks = ", ".join("?" * len(row))
    db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


def write_earlier(path: Path, version: int, lacking: tuple[str, ...] = ()) -> None:
    """Records as an earlier version wrote them, with one task and three metrics."""
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(schema(version))
        for name in lacking:
            db.execute(f"ALTER TABLE tasks DROP COLUMN {name}")
        insert(db, "meta", key="schema_version", value=str(version))
        names = {"dilation": "time_scale"} if version > 2 else {}
        task = {names.get(name, name): value for name, value in TASK.items()}
        insert(db, "tasks", **{name: value for name, value in task.items() if name not in lacking})
        insert(db, "evaluations", **EVALUATION)
        for name in ("c", "a", "b"):
            insert(db, "metrics", version=1, name=name, value=0.5)


def test_changing_a_table_takes_a_new_version(tmp_path: Path) -> None:
    Records(tmp_path / "run.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db, closing(sqlite3.connect(":memory:")) as stated:
        stated.executescript(schema(SCHEMA_VERSION))
        assert layout(db) == layout(stated), "raise SCHEMA_VERSION and add its file, or undo the change"
    versions = {int(path.stem.removeprefix("version-")) for path in SCHEMAS.iterdir()}
    assert versions == set(range(1, SCHEMA_VERSION + 1))


def test_the_database_explains_its_columns(tmp_path: Path) -> None:
    Records(tmp_path / "run.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db:
        ((tasks,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'tasks'")
    assert "time_scale REAL /* host seconds per device second; NULL: not paced */" in tasks


@pytest.mark.parametrize(
    ("version", "lacking"),
    [(1, ()), (1, ("dilation",)), (2, ()), (3, ())],
    ids=["version 1", "version 1 without time scale", "version 2", "version 3"],
)
def test_records_of_earlier_versions_are_read_and_continued(
    tmp_path: Path, version: int, lacking: tuple[str, ...]
) -> None:
    path = tmp_path / "run.sqlite"
    write_earlier(path, version, lacking)
    with closing(sqlite3.connect(path)) as db:
        before = {row.table: read_rows(db, row) for row in TABLES[1:]}
    Records(path).close()
    records = Records(path)  # the second time there is nothing to do
    after = {row.table: records.read(row) for row in TABLES[1:]}
    assert records.meta("schema_version") == SCHEMA_VERSION
    records.write([MetricRow(version=2, task=None, name="theta", value=None)])  # version 1 would refuse it
    records.close()
    assert after == before
    (task,) = after["tasks"]
    assert (task.task, task.client, task.plan_s, task.ended_s) == (0, 3, 2.5, None)
    assert task.time_scale == (None if lacking else 1.5)
    assert [metric.name for metric in after["metrics"]] == ["c", "a", "b"]
    (tested,) = after["evaluations"]
    assert (tested.accuracy, tested.f1, tested.mae, tested.score, tested.metric) == (0.5, None, None, 0.5, "accuracy")
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(":memory:")) as stated:
        stated.executescript(schema(SCHEMA_VERSION))
        assert layout(db) == layout(stated)


@pytest.mark.parametrize("lacking", [ADDED, *((name,) for name in ADDED)])
def test_a_run_that_an_earlier_version_began_is_given_the_columns_that_it_lacks(
    tmp_path: Path, lacking: tuple[str, ...]
) -> None:
    path = tmp_path / "run.sqlite"
    Records(path).close()
    with sqlite3.connect(path) as db:
        for name in lacking:
            db.execute(f"ALTER TABLE tasks DROP COLUMN {name}")
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    records = Records(path)
    assert records.rows(f"SELECT {', '.join(ADDED)} FROM tasks") == []
    assert records.meta("schema_version") == SCHEMA_VERSION
    records.close()
    Records(path).close()


def test_a_row_with_a_wrong_or_missing_column_cannot_be_made() -> None:
    RoundRow(**ROUND)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rounds"):
        RoundRow(**ROUND, rounds=1)  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match="merged"):
        RoundRow(**{name: value for name, value in ROUND.items() if name != "merged"})  # type: ignore[arg-type]


def test_what_is_written_is_read_and_a_row_replaces_the_one_with_its_key(tmp_path: Path) -> None:
    records = Records(tmp_path / "run.sqlite")
    merge = RoundRow(**ROUND)  # type: ignore[arg-type]
    notices = [NoticeRow(host_s=host_s, device_s=None, kind="k", text="t") for host_s in (2.0, 1.0)]
    later = msgspec.structs.replace(merge, version=2, round=2)
    records.write([later, merge, *notices])
    records.write([msgspec.structs.replace(merge, merged=3)])
    assert records.read(RoundRow) == [msgspec.structs.replace(merge, merged=3), later]
    assert records.read(NoticeRow) == notices
    records.close()


def test_a_value_out_of_range_is_refused_with_its_cell(tmp_path: Path) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(schema(SCHEMA_VERSION))
        insert(db, "rounds", **ROUND)
        insert(db, "rounds", **{**ROUND, "version": 2, "device_end_s": 1e300})
        with pytest.raises(msgspec.ValidationError, match=r"^table rounds row 2, device_end_s: Expected float <= "):
            read_rows(db, RoundRow)
