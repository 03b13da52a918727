"""run.sqlite, the truth about a run: what is written, and when it is safe.

One row per task and per evaluation. Write-ahead logging and one transaction per call make it readable while the
run is live and whole after a kill at any moment. `analysis` reads it through SQL alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE meta (          -- configuration, host, versions, calibration, status; values are JSON
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE clients (       -- who is in the fleet and what it trains
    client INTEGER PRIMARY KEY,
    name TEXT NOT NULL,                 -- "007"
    device TEXT NOT NULL,               -- profile name, the kind
    device_title TEXT NOT NULL,
    link TEXT NOT NULL,
    variant TEXT,                       -- NULL: unfit
    reason TEXT NOT NULL,               -- what stopped the next larger variant, or why unfit
    memory_predicted_bytes INTEGER,
    memory_cap_bytes INTEGER NOT NULL,
    rate_gflops REAL NOT NULL,
    slowdown REAL,                      -- host core rate / device rate; NULL under modelled
    load_w REAL, idle_w REAL,           -- NULL: no source, joules are then NULL too
    samples INTEGER NOT NULL,
    test_samples INTEGER NOT NULL,
    label_counts TEXT NOT NULL          -- JSON list, one count per class
);
CREATE TABLE caps (          -- one row per client and knob: what was asked, what was read back
    client INTEGER NOT NULL,
    knob TEXT NOT NULL,                 -- cpu, memory, gpu-compute, gpu-memory, link
    status TEXT NOT NULL,               -- enforced, modelled, unavailable
    backend TEXT NOT NULL,
    asked REAL, got REAL, unit TEXT NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (client, knob)
);
CREATE TABLE rounds (        -- one row per merge
    version INTEGER PRIMARY KEY,        -- counts merges from 1
    round INTEGER NOT NULL,
    stage TEXT NOT NULL,
    device_start_s REAL NOT NULL, device_end_s REAL NOT NULL,   -- end includes the server's own work
    server_s REAL NOT NULL,
    host_start_s REAL NOT NULL, host_end_s REAL NOT NULL,
    merged INTEGER NOT NULL             -- how many results counted
);
CREATE TABLE tasks (
    task INTEGER PRIMARY KEY,
    client INTEGER NOT NULL,
    round INTEGER NOT NULL,
    stage TEXT NOT NULL,
    variant TEXT NOT NULL,
    outcome TEXT NOT NULL,              -- ok, late, oom, crash, hang, offline, refused
    detail TEXT NOT NULL,
    base_version INTEGER NOT NULL,      -- the merge whose state was sent
    merged_version INTEGER,             -- the merge in which it counted; NULL: it did not
    staleness INTEGER,
    dispatched_s REAL NOT NULL,         -- device time from here on; NULL: the phase was not reached
    downloaded_s REAL, compute_start_s REAL, compute_end_s REAL, uploaded_s REAL,
    host_queued_s REAL NOT NULL, host_start_s REAL, host_end_s REAL,   -- host time since the run's start
    plan_s REAL NOT NULL,               -- planned compute, device seconds
    dilation REAL,                      -- host seconds per device second, under enforced
    measured_s REAL,                    -- measured compute / dilation, device seconds
    overrun REAL,                       -- measured / plan under enforced
    cpu_s REAL, throttled_s REAL,
    peak_bytes INTEGER, anon_bytes INTEGER, cap_bytes INTEGER NOT NULL,
    gpu_peak_bytes INTEGER, gpu_w REAL,
    flops REAL NOT NULL,                -- training FLOPs of the work declared
    bytes_down INTEGER NOT NULL, bytes_up INTEGER,
    joules REAL,                        -- from the profile's watts over device time: modelled
    steps INTEGER, samples INTEGER, loss REAL
);
CREATE TABLE evaluations (
    version INTEGER NOT NULL,           -- after which merge; 0 is before the first
    round INTEGER NOT NULL,
    device_s REAL NOT NULL,
    target TEXT NOT NULL,
    variant TEXT NOT NULL,
    client INTEGER,                     -- whose own model; NULL: a global sub-model
    local INTEGER NOT NULL,             -- 1: on the client's own test part
    samples INTEGER NOT NULL,
    accuracy REAL NOT NULL,
    loss REAL NOT NULL,
    PRIMARY KEY (version, target)
);
CREATE TABLE metrics (       -- what a method reports of a merge (InCo's theta and beta) or of a task
    version INTEGER NOT NULL,
    task INTEGER,
    name TEXT NOT NULL,
    value REAL NOT NULL
);
CREATE TABLE notices (       -- what a person should know, in order
    host_s REAL NOT NULL,
    device_s REAL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL
);
"""


class Records:
    """The writer. Rows are mappings from column to value; a wrong column is an error at once."""

    def __init__(self, path: Path) -> None:
        fresh = not path.exists()
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        # NORMAL: a killed process loses nothing; only a power cut may lose the last commits, never the file
        self._db.execute("PRAGMA synchronous=NORMAL")
        if fresh:
            self._db.executescript("BEGIN;" + SCHEMA + "COMMIT;")
            self.set_meta(schema_version=SCHEMA_VERSION)
        elif "dilation" not in {name for _, name, *_ in self._db.execute("PRAGMA table_info(tasks)")}:
            # a run from before tasks had one of their own goes on
            self._db.execute("ALTER TABLE tasks ADD COLUMN dilation REAL")

    def set_meta(self, **values: Any) -> None:
        rows = [{"key": key, "value": msgspec.json.encode(value).decode()} for key, value in values.items()]
        self.write({"meta": rows})

    def meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def write(self, tables: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Write rows of several tables in one transaction: all or nothing."""
        with self._db:  # commits, or rolls back whatever interrupts it: Ctrl-C may come right after the first word
            self._db.execute("BEGIN IMMEDIATE")
            for table, rows in tables.items():
                for row in rows:
                    columns = ", ".join(row)
                    marks = ", ".join("?" * len(row))
                    self._db.execute(
                        f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", tuple(row.values())
                    )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._db.execute(query).fetchall()

    def rewind(self, version: int, next_task: int, under_way: Iterable[int], device_s: float) -> None:
        """Take back what was written after a checkpoint: it will happen again, its own evaluation too."""
        again = [(task,) for task in under_way]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM rounds WHERE version > ?", (version,))
            self._db.execute("DELETE FROM metrics WHERE version > ?", (version,))
            self._db.execute("DELETE FROM evaluations WHERE version >= ?", (version,))
            self._db.execute("DELETE FROM notices WHERE device_s > ?", (device_s,))
            self._db.execute("DELETE FROM tasks WHERE task >= ?", (next_task,))
            self._db.executemany("DELETE FROM tasks WHERE task = ?", again)

    def close(self) -> None:
        self._db.close()
