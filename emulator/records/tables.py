"""The tables of run.sqlite. Each is defined once, as the type of its rows.

CREATE TABLE, what `Records` writes and what `read_rows` checks follow from these types. The descriptions of the
columns are comments in the database, so `sqlite3 run.sqlite .schema` explains it.

The bounds are far beyond anything that a run records. They keep damaged values out of sums, axes and JSON.
"""

from __future__ import annotations

from functools import cache
from math import isfinite
from typing import Annotated, ClassVar, get_type_hints

from msgspec import Meta, Struct

from fleetbed.emulator.method.series import MetricName, TargetSeries, target_series

#: Raise this whenever a table changes, and say here what the version before had instead:
#: 1: `evaluations.loss` and `metrics.value` could not be NULL, and `tasks` lacked some or all of ADDED
#: 2: columns had the names in RENAMED
#: 3: `evaluations.accuracy` could not be NULL, and `evaluations` lacked f1 and mae
SCHEMA_VERSION = 4
ADDED = ("ended_s", "waited_s", "plan_flops", "time_scale")  # columns of `tasks`, read as NULL where they are missing
ADDED_SCORES = ("f1", "mae")  # columns of `evaluations`, likewise
RENAMED = {"time_scale": "dilation"}  # columns of `tasks` and their earlier names

Count = Annotated[int, Meta(ge=0, le=2**50)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]
Fraction = Annotated[float, Meta(ge=0, le=1)]

SQL_TYPES = {
    int: "INTEGER NOT NULL",
    float: "REAL NOT NULL",
    str: "TEXT NOT NULL",
    int | None: "INTEGER",
    float | None: "REAL",
    str | None: "TEXT",
}


class Row(Struct, frozen=True, array_like=True):
    """A row of one of the tables: its fields are the columns."""

    table: ClassVar[str]
    primary_key: ClassVar[tuple[str, ...]] = ()  # without one, rows keep the order in which they were written


class MetaRow(Row, frozen=True):
    """Facts about the run as a whole: configuration, host, versions, calibration, status"""

    table = "meta"
    primary_key = ("key",)

    key: Annotated[str, "name of the fact"]
    value: Annotated[str, "JSON"]


class ClientRow(Row, frozen=True):
    """The clients of the fleet and the variants they train"""

    table = "clients"
    primary_key = ("client",)

    client: Annotated[Count, "number in the fleet, from 0"]
    name: Annotated[str, "the number as it is shown, such as 007"]
    device: Annotated[str, "name of the device profile"]
    device_title: Annotated[str, "title of the device profile"]
    link: Annotated[str, "name of the link profile"]
    variant: Annotated[str | None, "variant at the start of the run; NULL: none fits"]
    reason: Annotated[str, "why not the next larger variant, or why none fits"]
    memory_predicted_bytes: Annotated[Count | None, "predicted peak memory of training the variant"]
    memory_cap_bytes: Annotated[Count, "memory that the device has for training"]
    rate_gflops: Annotated[Figure, "compute rate of the device"]
    slowdown: Annotated[Figure | None, "device seconds per host second of its largest task; NULL: not measured"]
    load_w: Annotated[Figure | None, "power while computing; NULL: unknown, and so are joules"]
    idle_w: Annotated[Figure | None, "power while not computing; NULL: unknown, and so are joules"]
    samples: Annotated[Count, "training samples"]
    test_samples: Annotated[Count, "samples in its own part of the test set"]
    label_counts: Annotated[str, "JSON list: training samples of each class"]


class CapRow(Row, frozen=True):
    """The limits of each client: what was asked for and what was read back"""

    table = "caps"
    primary_key = ("client", "knob")

    client: Annotated[Count, "client"]
    knob: Annotated[str, "cpu, memory, gpu-compute, gpu-memory or link"]
    status: Annotated[str, "enforced, modelled or unavailable"]
    backend: Annotated[str, "what enforces or models it"]
    asked: Annotated[Figure | None, "limit that was asked for"]
    got: Annotated[Figure | None, "limit that was read back; NULL: nothing can be read back"]
    unit: Annotated[str, "unit of asked and got"]
    note: Annotated[str, "remark for the reader"]


class RoundRow(Row, frozen=True):
    """The merges"""

    table = "rounds"
    primary_key = ("version",)

    version: Annotated[Count, "number of the merge, from 1"]
    round: Annotated[Count, "round in which it happened"]
    stage: Annotated[str, "stage of the round, as the method names it"]
    device_start_s: Annotated[Seconds, "device time at which collecting results began"]
    device_end_s: Annotated[Seconds, "device time at which the server had merged them"]
    server_s: Annotated[Seconds, "device seconds of it that the server computed"]
    host_start_s: Annotated[Seconds, "the start in host seconds since the run began"]
    host_end_s: Annotated[Seconds, "the end in host seconds since the run began"]
    merged: Annotated[Count, "number of results merged"]


class TaskRow(Row, frozen=True):
    """The tasks that have ended. A moment that was not reached is NULL"""

    table = "tasks"
    primary_key = ("task",)

    task: Annotated[Count, "number of the task, from 0"]
    client: Annotated[Count, "client"]
    round: Annotated[Count, "round in which it was dispatched"]
    stage: Annotated[str, "stage of the round, as the method names it"]
    variant: Annotated[str, "variant that was trained"]
    outcome: Annotated[str, "ok, late, oom, crash, hang, offline, refused or diverged"]
    detail: Annotated[str, "what went wrong; empty if nothing did"]
    base_version: Annotated[Count, "merge whose state was sent; 0: the initial state"]
    merged_version: Annotated[Count | None, "merge that the result was part of; NULL: none"]
    staleness: Annotated[Count | None, "merges between base_version and merged_version; NULL: not merged"]
    dispatched_s: Annotated[Seconds, "device time at which the download began"]
    downloaded_s: Annotated[Seconds | None, "device time at which it ended"]
    compute_start_s: Annotated[Seconds | None, "device time at which computing began"]
    compute_end_s: Annotated[Seconds | None, "device time at which it ended and the upload began"]
    uploaded_s: Annotated[Seconds | None, "device time at which the upload ended"]
    ended_s: Annotated[Seconds | None, "device time at which the task ended, in whatever way"]
    waited_s: Annotated[Seconds | None, "device seconds for which the client had been available and idle before"]
    host_queued_s: Annotated[Seconds, "host seconds since the run began when the task was queued"]
    host_start_s: Annotated[Seconds | None, "host seconds since the run began when its process started on it"]
    host_end_s: Annotated[Seconds | None, "host seconds since the run began when its process was done"]
    plan_s: Annotated[Seconds, "planned compute time, device seconds"]
    time_scale: Annotated[Figure | None, "host seconds per device second; NULL: not paced"]
    measured_s: Annotated[Seconds | None, "measured compute time over time_scale, device seconds; NULL: not paced"]
    overrun: Annotated[Figure | None, "measured_s / plan_s; NULL: not paced"]
    cpu_s: Annotated[Seconds | None, "CPU seconds of the host"]
    throttled_s: Annotated[Seconds | None, "host seconds for which the kernel held it back; NULL: no CPU limit"]
    peak_bytes: Annotated[Count | None, "peak memory; NULL: not metered"]
    anon_bytes: Annotated[Count | None, "anonymous memory at the end; NULL: not metered"]
    cap_bytes: Annotated[Count, "memory that the device has for training"]
    gpu_peak_bytes: Annotated[Count | None, "peak memory on the GPU; NULL: trained on the CPU"]
    gpu_w: Annotated[Figure | None, "power of the whole GPU; NULL: trained on the CPU, or unknown"]
    plan_flops: Annotated[Figure | None, "planned training FLOPs"]
    flops: Annotated[Figure, "FLOPs done by the end; all of the plan where computing failed"]
    bytes_down: Annotated[Count, "bytes downloaded by the end"]
    bytes_up: Annotated[Count | None, "bytes uploaded by the end; NULL: the upload never began"]
    joules: Annotated[Figure | None, "modelled from the watts of the device and device time; NULL: watts unknown"]
    steps: Annotated[Count | None, "training steps done"]
    samples: Annotated[Count | None, "samples trained on"]
    loss: Annotated[float | None, "mean training loss; NULL: not reported, or not finite"]

    @property
    def end_s(self) -> float:
        """Device time at which the task ended: that of the last moment reached, where `ended_s` is not recorded."""
        reached = (self.ended_s, self.uploaded_s, self.compute_end_s, self.compute_start_s, self.downloaded_s)
        return next((moment for moment in reached if moment is not None), self.dispatched_s)

    @property
    def bytes_both(self) -> int:
        return self.bytes_down + (self.bytes_up or 0)

    def phases(self) -> dict[str, float]:
        """Device seconds of each phase that was begun; the last one may have been cut off."""
        steps = (
            ("download", self.dispatched_s, self.downloaded_s),
            ("compute", self.compute_start_s, self.compute_end_s),
            ("upload", self.compute_end_s, self.uploaded_s),
        )
        ends = {name: (start, self.ended_s if end is None else end) for name, start, end in steps}
        return {name: end - start for name, (start, end) in ends.items() if start is not None and end is not None}


class EvaluationRow(Row, frozen=True):
    """The tests of models after merges"""

    table = "evaluations"
    primary_key = ("version", "target")

    version: Annotated[Count, "merge after which the model was tested; 0: before the first"]
    round: Annotated[Count, "round that had ended"]
    device_s: Annotated[Seconds, "device time of that merge"]
    target: Annotated[str, "name of the model, as the method names it"]
    variant: Annotated[str, "its variant"]
    client: Annotated[Count | None, "client whose own model it is; NULL: a global model"]
    local: Annotated[Count, "1: tested on the test samples of that client; 0: on the whole test set"]
    samples: Annotated[Count, "test samples"]
    accuracy: Annotated[Fraction | None, "part of them that was classified correctly; NULL: their labels are numbers"]
    loss: Annotated[float | None, "mean loss; NULL: not finite, the model has diverged"]
    f1: Annotated[Fraction | None, "F1 of each class, as the mean over classes; NULL: their labels are numbers"] = None
    mae: Annotated[Figure | None, "mean absolute error; NULL: their labels are classes, or it is not finite"] = None

    def __post_init__(self) -> None:
        if self.samples and self.accuracy is None and self.mae is None and self.loss is not None:
            raise ValueError("neither accuracy nor mae, although the loss is finite")

    @property
    def series(self) -> TargetSeries:
        return target_series(self.client, bool(self.local))

    @property
    def metric(self) -> MetricName:
        return "accuracy" if self.accuracy is not None else "mae"

    @property
    def score(self) -> float:
        """The accuracy of classes, the mean absolute error of numbers; NaN if that is not finite."""
        found = self.accuracy if self.accuracy is not None else self.mae
        return float("nan") if found is None else found

    @property
    def diverged(self) -> bool:
        return self.loss is None or not isfinite(self.loss)


class MetricRow(Row, frozen=True):
    """Figures that the method reports about a merge or, beside the loss, about a task"""

    table = "metrics"

    version: Annotated[Count, "merge"]
    task: Annotated[Count | None, "task that was merged; NULL: the figure is about the merge"]
    name: Annotated[str, "name of the figure, as the method names it"]
    value: Annotated[float | None, "NULL: not finite"]


class NoticeRow(Row, frozen=True):
    """Sentences for the reader of the results"""

    table = "notices"

    host_s: Annotated[Seconds, "host seconds since the run began"]
    device_s: Annotated[Seconds | None, "device time; NULL: about the run as a whole"]
    kind: Annotated[str, "what it is about, such as oom or deadline"]
    text: Annotated[str, "the sentence"]


TABLES: tuple[type[Row], ...] = (
    MetaRow,
    ClientRow,
    CapRow,
    RoundRow,
    TaskRow,
    EvaluationRow,
    MetricRow,
    NoticeRow,
)


def create_table(row: type[Row]) -> str:
    """CREATE TABLE for rows of this type, with its descriptions as comments."""
    types, annotated = get_type_hints(row), get_type_hints(row, include_extras=True)
    lines = [f"{name} {SQL_TYPES[types[name]]} /* {annotated[name].__metadata__[-1]} */" for name in columns(row)]
    if row.primary_key:
        lines.append(f"PRIMARY KEY ({', '.join(row.primary_key)})")
    inner = ",\n    ".join(lines)
    return f"CREATE TABLE {row.table} ( /* {row.__doc__} */\n    {inner}\n)"


@cache
def insert_or_replace(row: type[Row]) -> str:
    marks = ", ".join("?" * len(columns(row)))
    return f"INSERT OR REPLACE INTO {row.table} ({', '.join(columns(row))}) VALUES ({marks})"


def columns(row: type[Row]) -> tuple[str, ...]:
    return row.__struct_fields__
