"""What a replay reads from the records of another run, and which records it refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import TaskRow, columns
from fleetbed.emulator.run.replay import read_recording
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig, TimingChoice, runs
from fleetbed.profiles.resolve import load_experiment

ENFORCED = runs(load_experiment("demo", sets=("timing.source=enforced", "rounds=3")))[0]


def replayed(config: RunConfig = ENFORCED, **changes: Any) -> RunConfig:
    """The same experiment, to be replayed."""
    timing = TimingChoice(source="replay", replay="somewhere")
    return replace(config, experiment=replace(config.experiment, timing=timing, **changes))


def task(number: int, **changes: Any) -> TaskRow:
    row: dict[str, Any] = dict.fromkeys(columns(TaskRow)) | {
        "task": number,
        "client": 0,
        "variant": "resnet10",
        "round": 1,
        "stage": "train",
        "base_version": 0,
        "cap_bytes": 1,
        "dispatched_s": 0.0,
        "host_queued_s": 0.0,
        "plan_s": 2.0,
        "plan_flops": 100.0 + number,
        "flops": 50.0,
        "bytes_down": 1,
        "outcome": "ok",
        "detail": "",
    }
    return TaskRow(**{**row, **changes})


def write(folder: Path, *tasks: TaskRow) -> Path:
    records = Records(folder / "run.sqlite")
    records.set_meta(config=msgspec.to_builtins(ENFORCED))
    records.write(tasks)
    records.close()
    return folder


def test_a_duration_is_the_plan_or_what_was_measured_where_that_was_longer(tmp_path: Path) -> None:
    found = read_recording(write(tmp_path, task(0), task(1, measured_s=3.5), task(2, measured_s=1.5)), replayed())
    assert found.compute_s == {0: 2.0, 1: 3.5, 2: 2.0}
    assert found.flops == {0: 100.0, 1: 101.0, 2: 102.0}, "the work that was declared, not what was done of it"


def test_the_tasks_whose_process_failed_fail_again(tmp_path: Path) -> None:
    ends = [
        task(0),
        task(1, outcome="oom", detail="killed"),
        task(2, outcome="crash", detail="ended by signal 9"),
        task(3, outcome="hang", detail="no answer"),
        task(4, outcome="refused", detail="sent an invalid message"),
        task(5, outcome="refused", detail="a tensor is missing", bytes_up=10),
        task(6, outcome="late"),
        task(7, outcome="diverged", bytes_up=10),
    ]
    assert read_recording(write(tmp_path, *ends), replayed()).failed == {
        1: ("oom", "killed"),
        2: ("crash", "ended by signal 9"),
        3: ("hang", "no answer"),
        4: ("refused", "sent an invalid message"),
    }


def test_records_that_have_one_figure_of_work_are_read_too(tmp_path: Path) -> None:
    write(tmp_path, task(0))
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        db.execute("ALTER TABLE tasks DROP COLUMN plan_flops")
    assert read_recording(tmp_path, replayed()).flops == {0: 50.0}


def test_how_processes_are_run_and_what_else_the_study_has_may_differ(tmp_path: Path) -> None:
    read_recording(write(tmp_path), replayed(processes="inline", seeds=(1, 2, 3)))


def drop_config(folder: Path) -> None:
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("DELETE FROM meta WHERE key = 'config'")


def spoil_config(folder: Path) -> None:
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("UPDATE meta SET value = '{}' WHERE key = 'config'")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "run.sqlite").unlink(), "is not the folder of a run: there is no run.sqlite in it"),
        (lambda folder: (folder / "run.sqlite").write_bytes(b"text" * 999), "cannot be read as the records of a run"),
        (drop_config, "cannot be read as the records of a run"),
        (spoil_config, "comes from another version or is damaged"),
    ],
    ids=["no file", "no database", "no configuration", "another configuration"],
)
def test_what_is_not_the_folder_of_a_run_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    write(tmp_path)
    spoil(tmp_path)
    with pytest.raises(BadInput, match=f"timing.replay: .*{problem}"):
        read_recording(tmp_path, replayed())


def test_another_experiment_is_refused_and_what_differs_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(BadInput, match=r"another configuration; these keys differ: experiment\.rounds$"):
        read_recording(tmp_path, replayed(rounds=9))
    with pytest.raises(BadInput, match=r"these keys differ: seed$"):
        read_recording(tmp_path, replayed(replace(ENFORCED, seed=77)))
