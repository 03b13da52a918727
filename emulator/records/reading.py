"""Reads the rows of run.sqlite, whichever version wrote them, and checks every value."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from fleetbed.emulator.records.tables import ADDED, ADDED_SCORES, RENAMED, SCHEMA_VERSION, Row, columns

R = TypeVar("R", bound=Row)


def unknown_version(meta: Mapping[str, Any]) -> str | None:
    """Return what to do about records of a version that this fleetbed does not know, from their table `meta`."""
    version = meta.get("schema_version")
    if type(version) is int and 1 <= version <= SCHEMA_VERSION:
        return None
    wrote = meta.get("fleetbed_version", "of the version that wrote it")
    return f"schema_version is {version}, this fleetbed reads up to {SCHEMA_VERSION}; use fleetbed {wrote} or newer"


def stored_columns(db: sqlite3.Connection, row: type[Row]) -> str:
    """The columns of a table as SQL to select them by, whichever version wrote the records."""
    there = {name for _, name, *_ in db.execute(f"PRAGMA table_info({row.table})")}

    def stored(name: str) -> str:
        if name not in there and RENAMED.get(name) in there:
            return RENAMED[name]
        return "NULL" if name not in there and name in (*ADDED, *ADDED_SCORES) else name

    return ", ".join(map(stored, columns(row)))


def read_rows(db: sqlite3.Connection, row: type[R], where: str = "1") -> list[R]:
    """Rows in the order of their key. Raises ValidationError that names the first cell whose type or range is wrong."""
    order = ", ".join(row.primary_key) or "rowid"
    query = f"SELECT {stored_columns(db, row)} FROM {row.table} WHERE {where} ORDER BY {order}"
    values = db.execute(query).fetchall()
    try:
        return msgspec.convert(values, list[row])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        place = re.search(r"\[(\d+)\]\[(\d+)\]", path)
        cell = f" row {int(place[1]) + 1}, {columns(row)[int(place[2])]}" if place else ""
        raise msgspec.ValidationError(f"table {row.table}{cell}: {what.replace('`', '')}") from error
