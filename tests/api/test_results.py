"""Results in Python: tables over all runs, whole or unfinished, and what can be made of them."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import msgspec
import pytest
from synthetic_runs import write_run, write_study

import fleetbed
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.study_file import Study
from fleetbed.profiles.resolve import load_experiment


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("results") / "study", seeds=(1, 2), rounds=3)


def test_tables_hold_all_rows_of_all_runs(study: Path) -> None:
    results = fleetbed.load(study)
    assert len(results.runs) == 4
    for name in ("clients", "tasks", "rounds", "evaluations", "metrics", "caps", "notices"):
        table = getattr(results, name)
        stored = 0
        for folder in study.iterdir():
            with sqlite3.connect(folder / "run.sqlite") as db:
                stored += db.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
        assert (len(table), len(list(table))) == (stored, stored)
    first = results.tasks[0]
    assert {key: first[key] for key in ("run", "method", "policy", "seed", "task")} == {
        "run": "fedavg-sync-1",
        "method": "fedavg",
        "policy": "sync",
        "seed": 1,
        "task": 1,
    }
    assert list(results.tasks[-2:]) == list(results.tasks)[-2:]
    assert {row["series"] for row in results.evaluations} >= {"global"}


def test_tables_become_frames_with_the_same_values(study: Path) -> None:
    tasks = fleetbed.load(study).tasks
    frame, arrow = tasks.to_pandas(), tasks.to_arrow()
    assert list(frame.columns) == list(tasks.columns) == arrow.column_names
    assert frame["bytes_down"].tolist() == [row["bytes_down"] for row in tasks] == arrow["bytes_down"].to_pylist()
    assert arrow["loss"].to_pylist() == [row["loss"] for row in tasks]


def test_an_empty_table_keeps_its_columns(study: Path) -> None:
    nothing = fleetbed.load(study).tasks[:0]
    assert list(nothing.to_pandas().columns) == nothing.to_arrow().column_names == list(nothing.columns)


@pytest.mark.parametrize(("library", "extra"), [("pandas", "pandas"), ("pyarrow", "parquet")])
def test_a_missing_extra_is_named(study: Path, monkeypatch: pytest.MonkeyPatch, library: str, extra: str) -> None:
    tasks = fleetbed.load(study).tasks
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(fleetbed.HostCannot, match=rf"{library} is not .*; pip install 'fleetbed\[{extra}\]'"):
        tasks.to_pandas() if library == "pandas" else tasks.to_arrow()


def test_one_run_is_loaded_by_its_own_folder(study: Path) -> None:
    results = fleetbed.load(study / "fedin-sync-2")
    assert ([run.name for run in results.runs], results.finished) == (["fedin-sync-2"], True)
    assert {row["run"] for row in results.tasks} == {"fedin-sync-2"}


def test_a_killed_run_is_read_as_far_as_it_went(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", rounds=8, stop_after=3, status="running")
    results = fleetbed.load(tmp_path)
    assert not results.finished
    assert results.states == {"fedavg-sync-1": "not finished: still running or killed after round 3 of 8"}
    assert max(row["round"] for row in results.rounds) == 3
    assert results.report().exists()


def test_runs_that_have_not_begun_are_named(tmp_path: Path) -> None:
    asked = load_experiment("demo", (), ["algorithms=[{name: fedavg}]", "seeds=[1, 2, 3]"])
    (tmp_path / "study.json").write_bytes(msgspec.json.encode(Study(asked, (), "test")))
    results = fleetbed.load(tmp_path)
    assert (len(results.tasks), results.finished) == (0, False)
    with pytest.raises(fleetbed.BadInput, match="no run has recorded anything yet"):
        results.report()
    write_run(tmp_path, "fedavg", seed=1)
    (tmp_path / "fedavg-sync-2").mkdir()
    Records(tmp_path / "fedavg-sync-2" / "run.sqlite").close()  # killed just after it had created its tables
    (tmp_path / "fedavg-sync-3").mkdir()
    (tmp_path / "fedavg-sync-3" / "run.sqlite").touch()  # killed before
    results = fleetbed.load(tmp_path)
    assert results.states == {"fedavg-sync-1": "done", "fedavg-sync-2": "not started", "fedavg-sync-3": "not started"}
    assert not results.finished


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fleetbed.BadInput, match="no such folder"):
        fleetbed.load(tmp_path / "nothing")
    with pytest.raises(fleetbed.BadInput, match="no run"):
        fleetbed.load(tmp_path)
    with pytest.raises(fleetbed.BadInput, match="needs the folder"):
        fleetbed.load()


def test_methods_are_compared_as_the_command_does(study: Path) -> None:
    table = fleetbed.compare(study, base="fedavg", targets=[0.5])
    assert [row["method"] for row in table] == ["fedavg", "fedin"]
    assert fleetbed.compare(fleetbed.load(study), study, base="fedavg", targets=[0.5])[0] == table[0]
    assert "final" in " ".join(table.columns)


def test_figures_are_shown_and_saved(study: Path, tmp_path: Path) -> None:
    figures = fleetbed.load(study).plot("time")
    assert list(figures) == ["time"]
    assert figures["time"].axes
    assert figures._repr_html_().startswith('<img style="max-width:100%" src="data:image/png;base64,')
    assert sorted(path.name for path in figures.save(tmp_path / "figures")) == ["time.pdf", "time.png"]
    with pytest.raises(fleetbed.BadInput, match="there is no kind of plot 'pie'"):
        fleetbed.load(study).plot("pie")
