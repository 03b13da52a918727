"""The writer of run.sqlite, the record of a run.

Write-ahead logging and one transaction per call make it readable while the run is live, and whole after a kill at any
moment.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.emulator.records.reading import R, read_rows, stored_columns
from fleetbed.emulator.records.tables import (
    SCHEMA_VERSION,
    TABLES,
    MetaRow,
    NoticeRow,
    Row,
    create_table,
    insert_or_replace,
)
from fleetbed.profiles.errors import FleetbedError

BUSY_S = 60.0  # how long another program may hold the file locked


def finite(value: float | None) -> float | None:
    """Return the value as it is recorded: None, which is NULL, where it is NaN or infinite."""
    return None if value is None or not math.isfinite(value) else value


class Records:
    """The open records of a run. Those of an earlier version are given the tables of this one."""

    def __init__(self, path: Path) -> None:
        fresh = not path.exists()
        self._path = path
        self._inodes: dict[Path, int] = {}  # of the files that hold the records
        self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
        self._db.execute("PRAGMA journal_mode=WAL")
        # NORMAL: a killed process loses nothing; only a power cut may lose the last commits, never the file
        self._db.execute("PRAGMA synchronous=NORMAL")
        if fresh:
            self._create()
        elif (self.meta("schema_version") or SCHEMA_VERSION) < SCHEMA_VERSION:
            self._upgrade()

    def _create(self) -> None:
        with self._transaction():
            for row in TABLES:
                self._db.execute(create_table(row))
        self.set_meta(schema_version=SCHEMA_VERSION)

    def _upgrade(self) -> None:
        with self._transaction():
            for row in TABLES:
                columns = stored_columns(self._db, row)
                self._db.execute(f"ALTER TABLE {row.table} RENAME TO earlier")
                self._db.execute(create_table(row))
                self._db.execute(f"INSERT INTO {row.table} SELECT {columns} FROM earlier")
                self._db.execute("DROP TABLE earlier")
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))

    def set_meta(self, **values: Any) -> None:
        self.write(MetaRow(key, msgspec.json.encode(value).decode()) for key, value in values.items())

    def meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows of any tables in one transaction: all or nothing. A row replaces one with the same key."""
        with self._transaction():
            for row in rows:
                self._db.execute(insert_or_replace(type(row)), msgspec.structs.astuple(row))

    def notice(self, kind: str, text: str, host_s: float, device_s: float | None) -> None:
        """Record a sentence for the reader of the results."""
        self.write([NoticeRow(host_s=host_s, device_s=device_s, kind=kind, text=text)])

    def read(self, row: type[R]) -> list[R]:
        return read_rows(self._db, row)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._db.execute(query).fetchall()

    def rewind(self, version: int, next_task: int, under_way: Iterable[int], device_s: float) -> None:
        """Delete what was written after a checkpoint, and its own evaluation: all of it will happen again."""
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
        """Commit what is done within, or roll it back if anything interrupts it, even Ctrl-C right after BEGIN."""
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
        """Refuse to continue if the file was removed: SQLite would go on writing to a file that cannot be read."""
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
