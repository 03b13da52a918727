"""run.sqlite, the truth about a run: what is written, and when it is safe.

One row per task and per evaluation. Write-ahead logging and one transaction per call make it readable while the
run is live and whole after a kill at any moment. `analysis` reads it through SQL alone.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.profiles.errors import FleetbedError

#: 1: losses and metrics could not be NULL, and tasks lacked the columns of `ADDED`; 2: they are NULL where not finite
SCHEMA_VERSION = 2
BUSY_S = 60.0  # how long another program may hold the file locked

EVALUATIONS = """
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
    loss REAL,                          -- NULL: not finite, the model has diverged
    PRIMARY KEY (version, target)
);
"""
METRICS = """
CREATE TABLE metrics (       -- what a method reports of a merge (InCo's theta and beta) or of a task beside its loss
    version INTEGER NOT NULL,
    task INTEGER,                       -- NULL: of the merge
    name TEXT NOT NULL,
    value REAL                          -- NULL: not finite
);
"""
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
    ended_s REAL,                       -- when it ended, however it did; a late task is cut off within a phase
    waited_s REAL,                      -- since the client's last task ended, or since it came
    host_queued_s REAL NOT NULL, host_start_s REAL, host_end_s REAL,   -- host time since the run's start
    plan_s REAL NOT NULL,               -- planned compute, device seconds
    dilation REAL,                      -- host seconds per device second, under enforced
    measured_s REAL,                    -- measured compute / dilation, device seconds
    overrun REAL,                       -- measured / plan under enforced
    cpu_s REAL, throttled_s REAL,
    peak_bytes INTEGER, anon_bytes INTEGER, cap_bytes INTEGER NOT NULL,
    gpu_peak_bytes INTEGER, gpu_w REAL,
    plan_flops REAL,                    -- training FLOPs of the work declared
    flops REAL NOT NULL,                -- of these, what was done by the end; work that failed counts whole
    bytes_down INTEGER NOT NULL, bytes_up INTEGER,   -- what had passed by the end
    joules REAL,                        -- from the profile's watts over device time: modelled
    steps INTEGER, samples INTEGER, loss REAL
);
CREATE TABLE notices (       -- what a person should know, in order
    host_s REAL NOT NULL,
    device_s REAL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL
);
"""
SCHEMA += EVALUATIONS + METRICS


def finite(value: float | None) -> float | None:
    """The value as it is recorded: NULL where it is NaN or infinite."""
    return None if value is None or not math.isfinite(value) else value


#: columns of `tasks` that runs of earlier versions lack
ADDED = ("dilation", "ended_s", "waited_s", "plan_flops")


class Records:
    """The writer. Rows are mappings from column to value; a wrong column is an error at once."""

    def __init__(self, path: Path) -> None:
        fresh = not path.exists()
        self._path = path
        self._inodes: dict[Path, int] = {}  # of the files that hold the records
        self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
        self._db.execute("PRAGMA journal_mode=WAL")
        # NORMAL: a killed process loses nothing; only a power cut may lose the last commits, never the file
        self._db.execute("PRAGMA synchronous=NORMAL")
        if fresh:
            self._db.executescript("BEGIN;" + SCHEMA + "COMMIT;")
            self.set_meta(schema_version=SCHEMA_VERSION)
        else:
            self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        """A run that an earlier version began goes on: its tables become those of this version."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            there = {name for _, name, *_ in self._db.execute("PRAGMA table_info(tasks)")}
            for name in ADDED:
                if name not in there:
                    self._db.execute(f"ALTER TABLE tasks ADD COLUMN {name} REAL")
            if self.meta("schema_version") == 1:
                for table, made in (("evaluations", EVALUATIONS), ("metrics", METRICS)):
                    self._db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
                    self._db.execute(made)
                    self._db.execute(f"INSERT INTO {table} SELECT * FROM old_{table}")
                    self._db.execute(f"DROP TABLE old_{table}")
                self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))

    def set_meta(self, **values: Any) -> None:
        rows = [{"key": key, "value": msgspec.json.encode(value).decode()} for key, value in values.items()]
        self.write({"meta": rows})

    def meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def write(self, tables: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Write rows of several tables in one transaction: all or nothing."""
        with self._transaction():
            for table, rows in tables.items():
                for row in rows:
                    columns = ", ".join(row)
                    marks = ", ".join("?" * len(row))
                    self._db.execute(
                        f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", tuple(row.values())
                    )

    def notice(self, kind: str, text: str, host_s: float, device_s: float) -> None:
        """Write down what a person should know."""
        self.write({"notices": [{"host_s": host_s, "device_s": device_s, "kind": kind, "text": text}]})

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._db.execute(query).fetchall()

    def rewind(self, version: int, next_task: int, under_way: Iterable[int], device_s: float) -> None:
        """Take back what was written after a checkpoint: it will happen again, its own evaluation too."""
        again = [(task,) for task in under_way]
        with self._transaction():
            self._db.execute("DELETE FROM rounds WHERE version > ?", (version,))
            self._db.execute("DELETE FROM metrics WHERE version > ?", (version,))
            self._db.execute("DELETE FROM evaluations WHERE version >= ?", (version,))
            self._db.execute("DELETE FROM notices WHERE device_s > ?", (device_s,))
            self._db.execute("DELETE FROM tasks WHERE task >= ?", (next_task,))
            self._db.executemany("DELETE FROM tasks WHERE task = ?", again)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what is done within, or roll back whatever interrupts it: Ctrl-C may come after the first word."""
        self._check_there()
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise FleetbedError(
                f"{self._path}: another program has kept the records locked for {BUSY_S:.0f} s; close it and continue "
                "with --resume"
            ) from error

    def _check_there(self) -> None:
        """SQLite goes on writing to a file that was removed, and nobody will ever read that."""
        for path in (self._path, self._path.with_name(f"{self._path.name}-wal")):
            found = path.stat().st_ino if path.exists() else None
            known = self._inodes.get(path)
            if known is None and found is not None:
                self._inodes[path] = found
            elif found != known:
                raise FleetbedError(
                    f"{path}: the records were removed or replaced while the run was writing them, so it cannot be "
                    f"finished; remove {path.parent} and carry the run out again with --resume"
                )
