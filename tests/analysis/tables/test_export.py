"""Exports hold what the run holds; a format whose library is missing says how to get it."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from pathlib import Path

import pytest
from synthetic_runs import write_run

from fleetbed.analysis.tables.export import export, trace_events
from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.profiles.errors import BadInput, HostCannot


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(write_run(tmp_path, "inco", rounds=12))


def test_csv_has_every_table_and_the_meta(run: Run, tmp_path: Path) -> None:
    written = {path.name: path for path in export([run], "csv", tmp_path / "out")}
    tables = ("clients", "caps", "rounds", "tasks", "evaluations", "metrics", "notices")
    assert set(written) == {*(f"{table}.csv" for table in tables), "meta.json"}
    with written["tasks.csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(run.tasks)
    assert float(rows[4]["plan_s"]) == run.tasks[4].plan_s
    assert json.loads(written["meta.json"].read_text())["config"]["seed"] == 1


def test_the_trace_is_the_timeline_in_microseconds(run: Run, tmp_path: Path) -> None:
    (path,) = export([run], "chrome-trace", tmp_path / "out")
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(task.phases()) for task in run.tasks) + len(run.rounds)
    task = next(task for task in run.tasks if task.outcome == "ok")
    own = {e["name"]: e for e in spans if e["args"].get("task") == task.task}
    assert list(own) == ["download", "compute", "upload"]
    assert own["compute"]["tid"] == task.client + 1
    assert task.compute_start_s is not None
    assert own["compute"]["ts"] == pytest.approx(task.compute_start_s * 1e6)
    assert own["upload"]["ts"] + own["upload"]["dur"] == pytest.approx(task.end_s * 1e6)
    failed = [event for event in events if event["ph"] == "i"]
    assert len(failed) == sum(task.outcome != "ok" for task in run.tasks) > 0


def test_events_never_overlap_on_a_thread(run: Run) -> None:
    spans = [e for e in trace_events(run, "global") if e["ph"] == "X" and e["tid"] == 1]
    spans.sort(key=lambda e: e["ts"])
    for before, after in itertools.pairwise(spans):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_a_missing_library_is_named_with_its_extra(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(HostCannot, match=r"--format parquet: .* pip install 'fleetbed\[parquet\]'"):
        export([run], "parquet", tmp_path / "out")


def test_parquet_can_be_read_back(run: Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="no pyarrow")
    export([run], "parquet", tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / run.name / "tasks.parquet")
    assert table.num_rows == len(run.tasks)
    assert table.column("plan_s")[4].as_py() == run.tasks[4].plan_s


def test_an_unknown_format_and_a_bad_place_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--format: there is no format 'xml'; allowed are chrome-trace, csv"):
        export([run], "xml", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--out .*file.*: cannot write there"):
        export([run], "csv", tmp_path / "file" / "x")
