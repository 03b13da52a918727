"""Runs in the formats of other tools: CSV and Chrome's trace always, TensorBoard and Parquet where installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.analysis.curves import curve
from fleetbed.analysis.runs import Cap, Client, Evaluation, Metric, Notice, Round, Run, Task
from fleetbed.analysis.tables import csv_text, writable
from fleetbed.profiles.errors import HostCannot, nearest

TABLES: dict[str, type[msgspec.Struct]] = {
    "clients": Client,
    "caps": Cap,
    "rounds": Round,
    "tasks": Task,
    "evaluations": Evaluation,
    "metrics": Metric,
    "notices": Notice,
}


def export(runs: Sequence[Run], form: str, out: Path) -> list[Path]:
    """Write each run below `out`, in a folder or file of its own name."""
    if form not in FORMATS:
        raise nearest(form, FORMATS, "format", "--format")
    with writable(out):
        return [path for run in runs for path in FORMATS[form](run, out)]


def _csv(run: Run, out: Path) -> list[Path]:
    """The tables as they are in run.sqlite, and the meta values as JSON."""
    folder = out / run.name
    folder.mkdir(exist_ok=True)
    written = []
    for name, row in TABLES.items():
        path = folder / f"{name}.csv"
        rows = [msgspec.structs.astuple(one) for one in getattr(run, name)]
        path.write_text(csv_text(row.__struct_fields__, rows), encoding="utf-8")
        written.append(path)
    meta = folder / "meta.json"
    meta.write_bytes(msgspec.json.format(msgspec.json.encode(run.meta), indent=2))
    return [*written, meta]


def _chrome_trace(run: Run, out: Path) -> list[Path]:
    """The timeline in device time for chrome://tracing and ui.perfetto.dev: a thread per client."""
    path = out / f"{run.name}.trace.json"
    path.write_text(json.dumps({"traceEvents": list(trace_events(run)), "displayTimeUnit": "ms"}), encoding="utf-8")
    return [path]


def trace_events(run: Run) -> Iterator[dict[str, Any]]:
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
    found = curve(run, "time")
    if found is not None:
        for moment, accuracy in zip(found.x, found.accuracy, strict=True):
            counter = {"ph": "C", "pid": 1, "tid": 0, "name": "accuracy", "args": {"accuracy": float(accuracy)}}
            yield {**counter, "ts": float(moment) * 1e6}


def _span(thread: int, name: str, start_s: float, length_s: float, about: dict[str, Any]) -> dict[str, Any]:
    place = {"ph": "X", "pid": 1, "tid": thread, "name": name}
    return {**place, "ts": start_s * 1e6, "dur": length_s * 1e6, "args": about}


def _tensorboard(run: Run, out: Path) -> list[Path]:
    """Accuracy by round, for the run and per model, with device time as the time of the step."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _missing("tensorboard", "TensorBoard") from error
    folder = out / run.name
    writer = EventFileWriter(str(folder))
    try:
        for step, moment, tag, value in scalars(run):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=moment, step=step, summary=summary))
    finally:
        writer.close()
    return sorted(folder.glob("events.out.tfevents.*"))


def scalars(run: Run) -> Iterator[tuple[int, float, str, float]]:
    """(version, device seconds, name, value) of everything that is a curve."""
    moments = {one.version: one.device_end_s for one in run.rounds} | {e.version: e.device_s for e in run.evaluations}
    for evaluation in run.evaluations:
        for name, value in (("accuracy", evaluation.accuracy), ("loss", evaluation.loss)):
            yield evaluation.version, evaluation.device_s, f"{name}/{evaluation.target}", value
    for metric in run.metrics:
        if metric.task is None:
            yield metric.version, moments.get(metric.version, 0.0), metric.name, metric.value
    for one in run.rounds:
        yield one.version, one.device_end_s, "round/device_s", one.device_end_s - one.device_start_s


def _parquet(run: Run, out: Path) -> list[Path]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise _missing("parquet", "Parquet") from error
    folder = out / run.name
    folder.mkdir(exist_ok=True)
    written = []
    for name, row in TABLES.items():
        rows = getattr(run, name)
        columns = {field: [getattr(one, field) for one in rows] for field in row.__struct_fields__}
        path = folder / f"{name}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        written.append(path)
    return written


def _missing(extra: str, what: str) -> HostCannot:
    return HostCannot(f"--format {extra}: {what} is not installed here; pip install 'fleetbed[{extra}]' brings it.")


FORMATS: dict[str, Callable[[Run, Path], list[Path]]] = {
    "csv": _csv,
    "chrome-trace": _chrome_trace,
    "tensorboard": _tensorboard,
    "parquet": _parquet,
}
