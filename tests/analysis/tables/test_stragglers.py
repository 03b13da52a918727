"""Straggler figures against a timeline that can be followed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from handmade import make_task
from synthetic_runs import write_run

from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.analysis.tables.stragglers import participation, round_costs, rounds_without, staleness, waste
from fleetbed.emulator.records.tables import RoundRow
from fleetbed.profiles.experiment import Policy


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three clients; the first round waits for client 2, the second ends at its deadline."""
    empty = open_run(write_run(tmp_path, clients=5, rounds=2, policy=Policy(kind="deadline", deadline_s=30)))
    never = {"merged_version": None, "staleness": None}
    tasks = (
        make_task(1, 0, 1, (0, 1, 1, 5, 6)),
        make_task(2, 1, 1, (0, 2, 3, 9, 10)),
        make_task(3, 2, 1, (0, 4, 4, 20, 24)),
        make_task(4, 0, 2, (25, 26, 26, 30, 31)),
        make_task(5, 1, 2, (25, 27, 27, 40, None), outcome="oom", joules=5.0, bytes_up=None, **never),
        make_task(6, 2, 2, (25, 30, 30, 50, 60), outcome="late", joules=7.0, **never),
    )
    rounds = (
        RoundRow(1, 1, "train", 0.0, 25.0, 1.0, 0.0, 0.0, 3),
        RoundRow(2, 2, "train", 25.0, 56.0, 1.0, 0.0, 0.0, 1),
    )
    return replace(empty, tasks=tasks, rounds=rounds)


def test_a_round_follows_its_last_client(run: Run) -> None:
    first, second = round_costs(run)
    assert (first.last, first.duration_s) == (2, 25.0)
    assert first.path == {"download": 4, "compute": 16, "upload": 4, "server": 1.0, "rest": 0.0}
    assert first.without_last_s == 25 - (24 - 10)  # the second to last was there at 10 s
    assert first.idle_s == (24 - 6) + (24 - 10) + 0
    assert first.busy_s == 6 + 10 + 24
    assert second.path["rest"] == 31 - 6 - 1  # the deadline: nobody's path accounts for it
    assert second.without_last_s is None
    assert second.idle_s == (55 - 31) + (55 - 40)  # the late one never waits


def test_a_round_that_went_on_after_its_last_result_gains_nothing_without_it(run: Run) -> None:
    waiting = replace(run, rounds=(msgspec.structs.replace(run.rounds[0], device_end_s=30.0),))
    (only,) = round_costs(waiting)
    assert only.without_last_s == only.duration_s == 30.0


def test_without_rounds_no_client_waits(run: Run) -> None:
    loose = replace(run, config=msgspec.structs.replace(run.config, policy=Policy(kind="async")))
    assert [(c.without_last_s, c.idle_s) for c in round_costs(loose)] == [(None, 0), (None, 0)]


def test_waste_is_work_that_was_never_merged(run: Run) -> None:
    found = waste(run)
    assert set(found) == {"oom", "late"}
    assert (found["oom"].tasks, found["oom"].bytes, found["oom"].joules) == (1, 10, 5.0)
    assert (found["late"].bytes, found["late"].flops, found["late"].device_s) == (20, 1e9, 35.0)


def test_work_that_never_began_wastes_no_flops(run: Run) -> None:
    offline = make_task(9, 0, 3, (60, None, None, None, None), outcome="offline", merged_version=None)
    assert waste(replace(run, tasks=(offline,)))["offline"].flops == 0


def test_participation_is_counted_per_kind(run: Run) -> None:
    by_kind = {row.device: row for row in participation(run)}
    assert list(by_kind) == ["pi-zero-2w", "pi-3b", "phone-2018", "pi-4b", "jetson-nano"]
    counts = {kind: (row.tasks, row.merged, row.last) for kind, row in by_kind.items()}
    assert counts["pi-zero-2w"] == (2, 2, 0)
    assert counts["phone-2018"] == (2, 1, 1)
    assert counts["jetson-nano"] == (0, 0, 0)


def test_how_long_rounds_would_take_without_a_kind_of_device(run: Run) -> None:
    found = rounds_without(run)
    # first round: 10 s instead of 24; second: the deadline is not waited for, but the failure at 40 s is
    assert found["phone-2018"] == (25 - (24 - 10) + 31 - (55 - 40)) / 2
    assert found["pi-3b"] == (25 + 31) / 2  # the phone comes last or late all the same
    assert "pi-zero-2w" not in found  # nothing would have been merged in the second round
    assert {row.device: row.without_s for row in participation(run)}["phone-2018"] == found["phone-2018"]
    loose = replace(run, config=msgspec.structs.replace(run.config, policy=Policy(kind="async")))
    assert rounds_without(loose) == {}


def test_staleness_counts_merged_results(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, clients=10, rounds=3, policy=Policy(kind="async")))
    counts = staleness(run)
    assert sum(counts.values()) == sum(task.merged_version is not None for task in run.tasks)
    assert max(counts) > 0
