"""Examines a run's folder for `--resume`. Nothing in it is trusted, and nothing that a person may want is removed."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from fleetbed.emulator.records.kept_merges import CHANGES, CLIENTS
from fleetbed.emulator.records.reading import unknown_version
from fleetbed.emulator.records.tables import TABLES
from fleetbed.emulator.resume.checkpoint import Checkpoints
from fleetbed.emulator.wire.storage import Damaged, check_run_file, part_of
from fleetbed.profiles.errors import FleetbedError

DATABASE = "run.sqlite"
FILES = (
    DATABASE,
    "run.sqlite-wal",
    "run.sqlite-shm",
    "partition.json",
    "setup.json",
    "clients.json",
    "workers.log",
    "now.json",
    "now.json.part",
    "error.log",
)
FOLDERS = ("state", "models", CHANGES, CLIENTS)

Standing = Literal["absent", "unstarted", "unfinished", "empty", "done"]


def standing(folder: Path) -> Standing:
    """How far this run has got. Raises Damaged if its folder is not what a run leaves behind."""
    if not _exists(folder):
        return "absent"
    _check_folder(folder)
    for name in FILES:
        if _exists(folder / name):
            check_run_file(folder / name)
    for name in FOLDERS:
        if _exists(folder / name):
            _check_folder(folder / name)
    for path in (folder / "state").glob("client-*"):
        _check_folder(path)
    started = Checkpoints(folder).found() or _exists(folder / "models")
    meta = _read_meta(folder)
    if meta is None:
        if started:
            raise Damaged(f"{folder / DATABASE}: the records of the run are missing; {_anew(folder)}")
        return "unstarted"
    status = meta.get("status")
    if status == "done":
        return "done"
    if status == "empty":
        return "empty"
    if started:
        return "unfinished"
    if meta["merges"]:
        raise Damaged(f"{folder / 'state'}: no checkpoint is left, so the run cannot continue; {_anew(folder)}")
    return "unstarted"


def rounds_of(folder: Path) -> int | None:
    """The number of rounds that this run was started with, if its records say so."""
    meta = _read_meta(folder) or {}
    try:
        return msgspec.convert(meta["config"]["experiment"]["rounds"], int)
    except (KeyError, TypeError, msgspec.ValidationError):
        return None


def processor_of(folder: Path) -> str | None:
    """The CPU type of the host that began this run, if its records say so."""
    host = (_read_meta(folder) or {}).get("host")
    return host.get("cpu") if isinstance(host, dict) else None


def error_of(folder: Path) -> str | None:
    """Why this run has no result, if its records say so."""
    error = (_read_meta(folder) or {}).get("error")
    return None if error is None else str(error)


def clear(folder: Path) -> None:
    """Remove what is left of a run that was ended before its first checkpoint, and nothing else."""
    state = folder / "state"
    ours = [path for path in folder.iterdir() if path.name in FILES or part_of(path) in FILES]
    ours += Checkpoints(folder).parts()
    there = [*folder.iterdir(), *(state.iterdir() if state.exists() else ())]
    foreign = [path for path in there if path not in (*ours, state)]
    if foreign:
        name = foreign[0].relative_to(folder)
        raise Damaged(f"{folder}: the run has no checkpoint, but its folder holds {name}; {_anew(folder)}")
    for path in ours:
        path.unlink()
    if state.exists():
        state.rmdir()
    folder.rmdir()


def _anew(folder: Path) -> str:
    return f"move {folder} away, and --resume starts this run again"


def _shortened(found: object) -> str:
    """A message of SQLite, which may be as long as the schema, shortened to a part of one line."""
    return " ".join(str(found).split())[:100]


def _exists(path: Path) -> bool:
    """Whether anything is there, even a dangling link."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
    return True


def _check_folder(path: Path) -> None:
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise Damaged(f"{path}: not a folder, but a file or a link; a run keeps all of its files in its own folder")


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """The metadata in the run's records, after an integrity check; None if nothing was ever written."""
    path = folder / DATABASE
    if not _exists(path):
        return None
    uri = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables:
                return None
            if missing := {row.table for row in TABLES} - tables:
                raise Damaged(f"{path}: not the records of a run, the table {min(missing)} is missing; {_anew(folder)}")
            (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise Damaged(f"{path}: the records are damaged ({_shortened(found)}); {_anew(folder)}")
            meta = {key: msgspec.json.decode(value) for key, value in db.execute("SELECT key, value FROM meta")}
            if not meta:  # the disk was full when the run had just begun
                return None
            (merges,) = db.execute("SELECT count(*) FROM rounds").fetchone()
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise Damaged(f"{path}: the records cannot be read ({_shortened(error)}); {_anew(folder)}") from error
        raise FleetbedError(f"{path}: locked by another program; close that, then --resume again") from error
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise Damaged(f"{path}: the records cannot be read ({_shortened(error)}); {_anew(folder)}") from error
    if (problem := unknown_version(meta)) is not None:
        raise Damaged(f"{path}: {problem}")
    return {**meta, "merges": merges}
