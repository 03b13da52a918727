"""Runs in the formats of other tools: CSV and Chrome's trace always, Parquet where installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.analysis.tables.curves import curve
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import evaluated_in, shown_of
from fleetbed.analysis.tables.writing import csv_text, missing_extra, writable
from fleetbed.emulator.method.series import TargetSeries
from fleetbed.emulator.records import tables
from fleetbed.profiles.errors import BadInput, nearest

TABLES = {row.table: row for row in tables.TABLES if row is not tables.MetaRow}


def export(runs: Sequence[Run], form: str, out: Path, asked_series: str | None = None) -> list[Path]:
    """Write each run below `out`, in a folder or file of its own name.

    The tables hold all evaluations, each with its series; where a run has one curve, it is of the series asked for.
    """
    if form not in FORMATS:
        raise nearest(form, FORMATS, "format", "--format")
    shown = {run: shown_of([run], asked_series) for run in runs}
    for run in runs:
        if asked_series is not None and run.evaluations and shown[run] not in evaluated_in([run]):
            there = ", ".join(evaluated_in([run])) or "none"
            raise BadInput(f"--series {asked_series}: {run.folder} was not evaluated so; it has {there}.")
    with writable(out):
        return [path for run in runs for path in FORMATS[form](run, out, shown[run])]


def columns_of(name: str) -> tuple[str, ...]:
    """The columns of the table; those of evaluations with their series."""
    fields = tables.columns(TABLES[name])
    return (*fields, "series") if name == "evaluations" else fields


def _csv(run: Run, out: Path, shown: TargetSeries) -> list[Path]:
    """The tables as they are in run.sqlite, and the meta values as JSON."""
    del shown
    folder = out / run.name
    folder.mkdir(exist_ok=True)
    written = []
    for name in TABLES:
        path = folder / f"{name}.csv"
        rows = [[getattr(one, column) for column in columns_of(name)] for one in getattr(run, name)]
        path.write_text(csv_text(columns_of(name), rows), encoding="utf-8")
        written.append(path)
    meta = folder / "meta.json"
    meta.write_bytes(msgspec.json.format(msgspec.json.encode(run.meta), indent=2))
    return [*written, meta]


def _chrome_trace(run: Run, out: Path, shown: TargetSeries) -> list[Path]:
    """The timeline in device time for chrome://tracing and ui.perfetto.dev: a thread per client."""
    path = out / f"{run.name}.trace.json"
    path.write_text(
        json.dumps({"traceEvents": list(trace_events(run, shown)), "displayTimeUnit": "ms"}), encoding="utf-8"
    )
    return [path]


def trace_events(run: Run, shown: TargetSeries) -> Iterator[dict[str, Any]]:
    """Complete events ("X") of every phase, in microseconds of device time; the server is thread 0."""
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{run.name}, device time"}}
    threads = {0: "server"} | {c.client + 1: f"{c.name} {c.device} {c.variant or 'unfit'}" for c in run.clients}
    for thread, name in threads.items():
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for task in run.tasks:
        about = {"task": task.task, "round": task.round, "outcome": task.outcome, "staleness": task.staleness}
        start = task.dispatched_s
        for phase, length in task.phases().items():
            yield _span(task.client + 1, phase, start, length, about)
            start += length
        if task.outcome != "ok":
            instant = {"ph": "i", "pid": 1, "tid": task.client + 1, "s": "t", "name": task.outcome}
            yield {**instant, "ts": task.end_s * 1e6, "args": {"detail": task.detail}}
    for one in run.rounds:
        start = one.device_end_s - one.server_s
        about = {"round": one.round, "stage": one.stage, "merged": one.merged}
        yield _span(0, f"merge {one.version}", start, one.server_s, about)
    for _, moment, accuracy in _points(run, shown):
        counter = {
            "ph": "C",
            "pid": 1,
            "tid": 0,
            "name": f"{run.metric.name}, {shown}",
            "args": {run.metric.name: accuracy},
        }
        yield {**counter, "ts": moment * 1e6}


def _points(run: Run, shown: TargetSeries) -> Iterator[tuple[int, float, float]]:
    """Round, device seconds and accuracy of each evaluation in which not all models had diverged."""
    rounds, times = curve(run, "rounds", shown), curve(run, "time", shown)
    if rounds is not None and times is not None:
        for number, moment, accuracy in zip(rounds.x, times.x, times.y, strict=True):
            if not isnan(accuracy):
                yield int(number), float(moment), float(accuracy)


def _span(thread: int, name: str, start_s: float, length_s: float, about: dict[str, Any]) -> dict[str, Any]:
    place = {"ph": "X", "pid": 1, "tid": thread, "name": name}
    return {**place, "ts": start_s * 1e6, "dur": length_s * 1e6, "args": about}


def _parquet(run: Run, out: Path, shown: TargetSeries) -> list[Path]:
    del shown
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("--format parquet", "pyarrow", "parquet") from error
    folder = out / run.name
    folder.mkdir(exist_ok=True)
    written = []
    for name in TABLES:
        columns = {field: [getattr(one, field) for one in getattr(run, name)] for field in columns_of(name)}
        path = folder / f"{name}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        written.append(path)
    return written


FORMATS: dict[str, Callable[[Run, Path, TargetSeries], list[Path]]] = {
    "csv": _csv,
    "chrome-trace": _chrome_trace,
    "parquet": _parquet,
}
