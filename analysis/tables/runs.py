"""Opens run folders.

A run is read in one read-only transaction, so a live run can be opened at any moment; what comes back is
frozen data whose types and ranges were checked. A run that did not end is read as far as it went, and says so in
`Run.state`. A damaged one is refused in one sentence: its figures could be anything.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from fleetbed.analysis.tables.about import About
from fleetbed.emulator.records.metric import ACCURACY, METRICS, Metric
from fleetbed.emulator.records.reading import read_rows, unknown_version
from fleetbed.emulator.records.tables import (
    CapRow,
    ClientRow,
    Count,
    EvaluationRow,
    MetricRow,
    NoticeRow,
    RoundRow,
    TaskRow,
)
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig
from fleetbed.profiles.older import up_to_date
from fleetbed.profiles.yaml_text import plain

DATABASE = "run.sqlite"
WHAT_TO_GIVE = f"give the folder of a run (it holds {DATABASE}) or of a study (it holds run folders)"
ROUND_POLICIES = ("sync", "deadline", "over-select")  # of fleetbed's own
WHAT_TO_DO = "copy the folder again or leave it out"


class RunNotStarted(BadInput):
    """The folder holds a run that has recorded nothing yet, or was killed before it could."""


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that one run recorded. Compared by identity, so that figures of it can be cached."""

    folder: Path
    config: RunConfig
    meta: dict[str, Any]
    clients: tuple[ClientRow, ...]
    caps: tuple[CapRow, ...]
    rounds: tuple[RoundRow, ...]
    tasks: tuple[TaskRow, ...]
    evaluations: tuple[EvaluationRow, ...]
    metrics: tuple[MetricRow, ...]
    notices: tuple[NoticeRow, ...]

    @property
    def name(self) -> str:
        return plain(self.folder.name)

    @property
    def study(self) -> Path:
        """The folder of its study."""
        return self.folder.parent

    @cached_property
    def about(self) -> About:
        return msgspec.convert(self.meta, About)

    @property
    def metric(self) -> Metric:
        """What its models are judged by."""
        return METRICS[self.evaluations[0].metric] if self.evaluations else ACCURACY

    @property
    def in_rounds(self) -> bool:
        """Whether clients wait for the end of a round."""
        known = self.about.in_rounds
        return self.config.policy.kind in ROUND_POLICIES if known is None else known

    @property
    def finished(self) -> bool:
        return self.about.status == "done"

    @property
    def state(self) -> str:
        """How far this run went, for the reader."""
        reached = self.rounds[-1].round if self.rounds else 0
        so_far = f"after round {reached} of {self.config.experiment.rounds}"
        if self.finished:
            return "done"
        if self.about.status == "running":
            return f"not finished: still running or killed {so_far}"
        return f"{self.about.status} {so_far}" + (f": {self.about.error}" if self.about.error else "")

    @property
    def device_s(self) -> float:
        """Device time of the last merge or evaluation."""
        ends = [self.rounds[-1].device_end_s] if self.rounds else []
        return max(ends + [e.device_s for e in self.evaluations[-1:]], default=0.0)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """List the run folders at the paths, each of which is a run or a study with its runs directly below."""
    found: dict[Path, None] = {}
    for path in paths:
        try:
            below = _runs_at(path)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror}); {WHAT_TO_GIVE}.") from error
        found.update(dict.fromkeys(below))
    return list(found)


def _runs_at(path: Path) -> list[Path]:
    if not path.exists():
        raise BadInput(f"{path}: no such folder; {WHAT_TO_GIVE}.")
    folder = path.parent if path.name == DATABASE else path
    if os.path.lexists(folder / DATABASE):
        return [folder]
    below = sorted(database.parent for database in folder.glob(f"*/{DATABASE}"))
    if not below:
        raise BadInput(f"{path}: no run, there is no {DATABASE} in it or just below it; {WHAT_TO_GIVE}.")
    return below


def open_runs(paths: Iterable[Path]) -> list[Run]:
    return [open_run(folder) for folder in find_runs(paths)]


def open_run(folder: Path) -> Run:
    path = folder / DATABASE
    try:
        if not os.path.lexists(path):
            raise BadInput(f"{folder}: no run, there is no {DATABASE} in it; {WHAT_TO_GIVE}.")
        if not path.is_file():
            raise BadInput(f"{path}: not a file, so there is no run to read; {WHAT_TO_DO}.")
        db = _connect(path)
        try:
            db.execute("BEGIN")  # one snapshot for all tables, whatever a live run writes meanwhile
            return _read(folder, db)
        finally:
            db.close()
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise _damaged(path, error) from error
        raise BadInput(f"{path}: another program has locked it; wait for it or close it, then try again.") from error
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from names in the schema
        raise _damaged(path, error) from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); {WHAT_TO_GIVE}.") from error


def _damaged(path: Path, why: object) -> BadInput:
    return BadInput(f"{path}: damaged, or not written by fleetbed ({why}); {WHAT_TO_DO}.")


def _connect(path: Path) -> sqlite3.Connection:
    # Without a log beside it nothing is pending and nobody writes: reading it as immutable
    # then works on a read-only disk too and leaves no files behind, as mode=ro alone would.
    logs = (path.with_name(path.name + end) for end in ("-wal", "-journal"))
    mode = "mode=ro" if any(map(os.path.lexists, logs)) else "mode=ro&immutable=1"
    uri = f"file:{quote(os.fsencode(path.resolve()))}?{mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def _read(folder: Path, db: sqlite3.Connection) -> Run:
    path = folder / DATABASE
    (sound,) = db.execute("PRAGMA integrity_check(1)").fetchone()  # else rows could be missing without a word
    if sound != "ok":
        raise _damaged(path, sound)
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    meta = _meta(path, db) if tables else {}
    if not meta.keys() - {"schema_version"}:
        raise RunNotStarted(f"{path}: the run has recorded nothing yet; wait for it, or leave it out.")
    try:
        run = Run(
            folder=folder.resolve(),
            config=_config(path, meta),
            meta=meta,
            clients=tuple(read_rows(db, ClientRow)),
            caps=tuple(read_rows(db, CapRow)),
            rounds=tuple(read_rows(db, RoundRow)),
            tasks=tuple(read_rows(db, TaskRow)),
            evaluations=tuple(read_rows(db, EvaluationRow)),
            metrics=tuple(read_rows(db, MetricRow)),
            notices=tuple(read_rows(db, NoticeRow)),
        )
    except msgspec.ValidationError as error:
        raise _damaged(path, error) from error
    _check(path, run)
    return run


def _meta(path: Path, db: sqlite3.Connection) -> dict[str, Any]:
    """Read the table `meta`; records of a version that is not known are refused."""
    try:
        meta = {str(key): msgspec.json.decode(value) for key, value in db.execute("SELECT key, value FROM meta")}
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        raise _damaged(path, f"table meta: {error}") from error
    if (problem := unknown_version(meta)) is not None:
        raise BadInput(f"{path}: {problem}.")
    return meta


def _config(path: Path, meta: dict[str, Any]) -> RunConfig:
    try:
        return msgspec.convert(up_to_date(meta.get("config")), RunConfig)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: the stored config is not one that this fleetbed knows ({error}).") from error


def _check(path: Path, run: Run) -> None:
    """Check what the types of rows cannot: the values of `meta`, and rows that refer to each other."""
    try:
        run.about  # noqa: B018 - converted here, so that nobody after this meets a wrong value
        classes = {len(msgspec.json.decode(client.label_counts, type=list[Count])) for client in run.clients}
    except msgspec.MsgspecError as error:
        raise _damaged(path, error) from error
    if len(classes) > 1:
        raise _damaged(path, "table clients: label_counts differ in their number of classes")
    known = {client.client for client in run.clients}
    if len(known) < len(run.clients):
        raise _damaged(path, "table clients: a client is there twice")
    if stray := next((task for task in run.tasks if task.client not in known), None):
        raise _damaged(path, f"table tasks: task {stray.task} is of client {stray.client}, which is not in the fleet")
