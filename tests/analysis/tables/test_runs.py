"""Run folders are read as they are: whole, unfinished, live, foreign or broken."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from handmade import make_task
from synthetic_runs import write_run, write_study

from fleetbed.analysis.tables.runs import find_runs, open_run, open_runs
from fleetbed.emulator.records.tables import ADDED
from fleetbed.profiles.errors import BadInput


def test_every_row_that_was_written_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "inco", clients=10, rounds=4)
    run = open_run(folder)
    db = sqlite3.connect(folder / "run.sqlite")
    for table in ("clients", "caps", "rounds", "tasks", "evaluations", "metrics", "notices"):
        (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        assert len(getattr(run, table)) == count, table
    db.close()
    assert (run.config.algorithm.name, run.config.seed, run.about.status, run.state) == ("inco", 1, "done", "done")
    assert run.clients[7].name == "007"
    assert run.clients[9].variant is None
    assert run.rounds[-1].version == 4


def test_a_run_of_an_earlier_version_is_read_and_one_that_lacks_more_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=1)
    before = [task.phases() for task in open_run(folder).tasks]
    with sqlite3.connect(folder / "run.sqlite") as db:
        for name in ADDED:
            db.execute(f"ALTER TABLE tasks DROP COLUMN {name}")
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    tasks = open_run(folder).tasks
    assert {getattr(task, name) for task in tasks for name in ADDED} == {None}
    assert [task.phases() for task in tasks] == before
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("ALTER TABLE tasks DROP COLUMN plan_s")
    with pytest.raises(BadInput, match="damaged, or not written by fleetbed"):
        open_run(folder)


def test_phases_of_a_task_add_up_to_its_length(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, rounds=2, with_failures=False))
    for task in run.tasks:
        assert task.uploaded_s is not None
        assert sum(task.phases().values()) == pytest.approx(task.uploaded_s - task.dispatched_s)
        assert task.end_s == task.uploaded_s


def test_the_phase_in_which_a_task_was_cut_off_counts_as_far_as_it_went() -> None:
    moments = (1.0, 3.0, 3.0, 8.0, 9.0)
    whole = {"download": 2.0, "compute": 5.0, "upload": 1.0}
    for reached, end_s, last in ((1, 2.5, {"download": 1.5}), (3, 7.0, {"compute": 4.0}), (4, 8.25, {"upload": 0.25})):
        times = [moment if place < reached else None for place, moment in enumerate(moments)]
        task = make_task(1, 0, 1, times, outcome="late", ended_s=end_s)
        assert task.phases() == {name: s for name, s in whole.items() if name in task.phases()} | last
        assert task.end_s == end_s


def test_a_study_is_its_runs_and_a_run_named_twice_is_read_once(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", ("fedavg", "fedin"), (1, 2), rounds=1)
    folders = find_runs([study, study / "fedin-sync-2", study / "fedin-sync-2" / "run.sqlite"])
    assert [f.name for f in folders] == ["fedavg-sync-1", "fedavg-sync-2", "fedin-sync-1", "fedin-sync-2"]


def test_a_missing_folder_and_a_folder_that_is_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing-here: no such folder; give the folder of a run"):
        find_runs([tmp_path / "nothing-here"])
    with pytest.raises(BadInput, match=r"no run, there is no run\.sqlite in it or just below"):
        find_runs([tmp_path])
    with pytest.raises(BadInput, match="no run"):
        open_run(tmp_path)


def test_a_newer_schema_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=1)
    _set_meta(folder, "schema_version", "99")
    _set_meta(folder, "fleetbed_version", '"9.9"')
    with pytest.raises(BadInput, match=r"schema_version is 99, this fleetbed reads up to \d+; .*fleetbed 9\.9"):
        open_run(folder)


def test_a_file_that_is_no_database_and_one_without_tables_are_refused(tmp_path: Path) -> None:
    for name, content, sentence in (
        ("text", b"this is not a database" * 50, r"run\.sqlite: damaged, or not written by fleetbed"),
        ("empty", b"", r"run\.sqlite: the run has recorded nothing yet"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.sqlite").write_bytes(content)
        with pytest.raises(BadInput, match=sentence):
            open_run(folder)


def test_an_unknown_configuration_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=1)
    _set_meta(folder, "config", '{"seed": 1}')
    with pytest.raises(BadInput, match="stored config"):
        open_run(folder)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("running", "not finished: still running or killed after round 3 of 12"),
        ("failed", "failed after round 3 of 12: client 003 sent a message that is too large"),
        ("interrupted", "interrupted after round 3 of 12"),
    ],
)
def test_a_run_that_did_not_end_is_read_as_far_as_it_went(tmp_path: Path, status: str, says: str) -> None:
    run = open_run(write_run(tmp_path, status=status, stop_after=3))
    assert not run.finished
    assert run.state == says
    assert len(run.rounds) == 3


def test_a_run_that_has_only_started_can_be_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path, status="running")
    with sqlite3.connect(folder / "run.sqlite") as db:
        for table in ("tasks", "rounds", "evaluations", "metrics", "notices"):
            db.execute(f"DELETE FROM {table}")
    db.close()
    run = open_run(folder)
    assert run.device_s == 0
    assert run.state == "not finished: still running or killed after round 0 of 12"


def test_a_run_whose_writer_holds_the_lock_is_read_as_of_its_last_commit(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=3)
    writer = sqlite3.connect(folder / "run.sqlite", isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("DELETE FROM rounds WHERE version = 3")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM rounds WHERE version = 2")
    try:
        assert [r.version for r in open_run(folder).rounds] == [1, 2]
    finally:
        writer.execute("ROLLBACK")
        writer.close()


def test_reading_writes_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=1)
    before = (folder / "run.sqlite").read_bytes()
    open_runs([tmp_path])
    assert (folder / "run.sqlite").read_bytes() == before
    assert {p.name for p in folder.iterdir()} == {"run.sqlite", "partition.json"}


def test_the_same_call_writes_the_same_run(tmp_path: Path) -> None:
    first, second = (open_run(write_run(tmp_path / side, "fedin", 3, rounds=3)) for side in ("a", "b"))
    assert first.tasks == second.tasks
    assert first.evaluations == second.evaluations


def _set_meta(folder: Path, key: str, value: str) -> None:
    db = sqlite3.connect(folder / "run.sqlite")
    db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))
    db.commit()
    db.close()


def test_a_run_of_before_is_read_in_the_words_of_today(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=1)
    with sqlite3.connect(folder / "run.sqlite") as db:
        (text,) = db.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
        config = json.loads(text)
        config["experiment"]["timing"] = {"source": "calibrated", "dilation": "auto"}
        db.execute("UPDATE meta SET value = ? WHERE key = 'config'", (json.dumps(config),))
    timing = open_run(folder).config.experiment.timing
    assert (timing.source, timing.time_scale) == ("modelled", "auto")
