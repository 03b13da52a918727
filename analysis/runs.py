"""Opens run folders: the one place that knows the tables of run.sqlite.

A run is read in one read-only transaction, so a live run can be opened at any moment; what comes back is
frozen data. A run that did not end is read as far as it went, and says so in `Run.state`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig

DATABASE = "run.sqlite"
READS_SCHEMA = 1
#: columns that runs of earlier versions may lack
ADDED = {"dilation"}
WHAT_TO_GIVE = f"give the folder of a run (it holds {DATABASE}) or of a study (it holds run folders)"


class Client(Struct, frozen=True):
    client: int
    name: str
    device: str
    device_title: str
    link: str
    variant: str | None
    reason: str
    memory_predicted_bytes: int | None
    memory_cap_bytes: int
    rate_gflops: float
    slowdown: float | None
    load_w: float | None
    idle_w: float | None
    samples: int
    test_samples: int
    label_counts: str  # JSON list, one count per class


class Cap(Struct, frozen=True):
    client: int
    knob: str
    status: str
    backend: str
    asked: float | None
    got: float | None
    unit: str
    note: str


class Round(Struct, frozen=True):
    """One merge."""

    version: int
    round: int
    stage: str
    device_start_s: float
    device_end_s: float
    server_s: float
    host_start_s: float
    host_end_s: float
    merged: int


class Task(Struct, frozen=True):
    task: int
    client: int
    round: int
    stage: str
    variant: str
    outcome: str
    detail: str
    base_version: int
    merged_version: int | None
    staleness: int | None
    dispatched_s: float
    downloaded_s: float | None
    compute_start_s: float | None
    compute_end_s: float | None
    uploaded_s: float | None
    host_queued_s: float
    host_start_s: float | None
    host_end_s: float | None
    plan_s: float
    dilation: float | None
    measured_s: float | None
    overrun: float | None
    cpu_s: float | None
    throttled_s: float | None
    peak_bytes: int | None
    anon_bytes: int | None
    cap_bytes: int
    gpu_peak_bytes: int | None
    gpu_w: float | None
    flops: float
    bytes_down: int
    bytes_up: int | None
    joules: float | None
    steps: int | None
    samples: int | None
    loss: float | None

    @property
    def end_s(self) -> float:
        """The end of the last phase that was reached, device time."""
        reached = (self.uploaded_s, self.compute_end_s, self.compute_start_s, self.downloaded_s)
        return next((moment for moment in reached if moment is not None), self.dispatched_s)

    @property
    def bytes_both(self) -> int:
        return self.bytes_down + (self.bytes_up or 0)

    def phases(self) -> dict[str, float]:
        """Device seconds of each phase that was reached."""
        steps = (
            ("download", self.dispatched_s, self.downloaded_s),
            ("wait", self.downloaded_s, self.compute_start_s),
            ("compute", self.compute_start_s, self.compute_end_s),
            ("upload", self.compute_end_s, self.uploaded_s),
        )
        return {name: end - start for name, start, end in steps if start is not None and end is not None}


class Evaluation(Struct, frozen=True):
    version: int
    round: int
    device_s: float
    target: str
    variant: str
    client: int | None
    local: int
    samples: int
    accuracy: float
    loss: float


class Metric(Struct, frozen=True):
    version: int
    task: int | None
    name: str
    value: float


class Notice(Struct, frozen=True):
    host_s: float
    device_s: float | None
    kind: str
    text: str


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that one run recorded. Equal is what is the same object, so that figures of it can be kept."""

    folder: Path
    config: RunConfig
    meta: dict[str, Any]
    clients: tuple[Client, ...]
    caps: tuple[Cap, ...]
    rounds: tuple[Round, ...]
    tasks: tuple[Task, ...]
    evaluations: tuple[Evaluation, ...]
    metrics: tuple[Metric, ...]
    notices: tuple[Notice, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def status(self) -> str:
        return str(self.meta.get("status", "running"))

    @property
    def finished(self) -> bool:
        return self.status == "done"

    @property
    def state(self) -> str:
        """What to tell a reader about how far this run went."""
        reached = self.rounds[-1].round if self.rounds else 0
        so_far = f"after round {reached} of {self.config.experiment.rounds}"
        if self.finished:
            return "done"
        if self.status == "running":
            return f"not finished: still running or killed {so_far}"
        error = self.meta.get("error")
        return f"{self.status} {so_far}" + (f": {error}" if error else "")

    @property
    def device_s(self) -> float:
        """Device time at the last thing that is known of the run."""
        ends = [self.rounds[-1].device_end_s] if self.rounds else []
        return max(ends + [e.device_s for e in self.evaluations[-1:]], default=0.0)


Row = TypeVar("Row", bound=Struct)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run folders that the paths mean: each is a run itself, or a study with its runs directly below."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path}: no such folder; {WHAT_TO_GIVE}.")
        folder = path.parent if path.name == DATABASE else path
        below = [folder] if (folder / DATABASE).is_file() else sorted(p.parent for p in folder.glob(f"*/{DATABASE}"))
        if not below:
            raise BadInput(f"{path}: no run, there is no {DATABASE} in it or just below it; {WHAT_TO_GIVE}.")
        found.update(dict.fromkeys(below))
    return list(found)


def open_runs(paths: Iterable[Path]) -> list[Run]:
    return [open_run(folder) for folder in find_runs(paths)]


def open_run(folder: Path) -> Run:
    path = folder / DATABASE
    if not path.is_file():
        raise BadInput(f"{folder}: no run, there is no {DATABASE} in it; {WHAT_TO_GIVE}.")
    try:
        db = _connect(path)
        try:
            db.execute("BEGIN")  # one snapshot for all tables, whatever a live run writes meanwhile
            return _read(folder, db)
        finally:
            db.close()
    except sqlite3.Error as error:
        raise BadInput(f"{path}: not a readable run ({error}); copy the folder again or leave it out.") from error


def _connect(path: Path) -> sqlite3.Connection:
    # Without a write-ahead log beside it nothing is pending and nobody writes: reading it as immutable
    # then works on a read-only disk too and leaves no files behind, as mode=ro alone would.
    log = path.with_name(path.name + "-wal")
    mode = "mode=ro" if log.exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?{mode}", uri=True, isolation_level=None)


def _read(folder: Path, db: sqlite3.Connection) -> Run:
    meta = {key: msgspec.json.decode(value) for key, value in db.execute("SELECT key, value FROM meta")}
    path = folder / DATABASE
    version = meta.get("schema_version")
    if not isinstance(version, int) or version > READS_SCHEMA:
        raise BadInput(
            f"{path}: schema_version is {version}, this fleetbed reads up to {READS_SCHEMA}; "
            f"open it with fleetbed {meta.get('fleetbed_version', 'of the version that wrote it')} or newer."
        )
    try:
        config = msgspec.convert(meta.get("config"), RunConfig)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: the stored config is not one that this fleetbed knows ({error}).") from error
    return Run(
        folder=folder.resolve(),
        config=config,
        meta=meta,
        clients=_table(db, "clients", Client, "client"),
        caps=_table(db, "caps", Cap, "client, knob"),
        rounds=_table(db, "rounds", Round, "version"),
        tasks=_table(db, "tasks", Task, "task"),
        evaluations=_table(db, "evaluations", Evaluation, "version, target"),
        metrics=_table(db, "metrics", Metric, "rowid"),
        notices=_table(db, "notices", Notice, "rowid"),
    )


def _table(db: sqlite3.Connection, table: str, row: type[Row], order: str) -> tuple[Row, ...]:
    absent = ADDED - {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")}
    columns = ", ".join("NULL" if name in absent else name for name in row.__struct_fields__)
    return tuple(row(*values) for values in db.execute(f"SELECT {columns} FROM {table} ORDER BY {order}"))
