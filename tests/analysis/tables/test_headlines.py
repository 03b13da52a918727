"""The answers to a reader's first questions, calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from handmade import make_evaluation, make_task
from synthetic_runs import write_run

from fleetbed.analysis.tables.compare import Comparison, compare_runs
from fleetbed.analysis.tables.headlines import headlines
from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.analysis.tables.summary_table import summary_tables
from fleetbed.emulator.records.tables import RoundRow
from fleetbed.profiles.experiment import Policy


def study(folder: Path, slow_s: float) -> list[Run]:
    """Two methods of one round, in which client 2, the only pi-4b, ends after `slow_s` and the others after 10 s."""
    curves = {"fedavg": [(0, 0.1), (180, 0.5), (360, 0.6)], "fedin": [(0, 0.1), (90, 0.4), (100, 0.5), (360, 0.55)]}
    found = []
    for method, points in curves.items():
        run = open_run(write_run(folder, method, methods=tuple(curves), clients=3, rounds=1))
        ends = (8.0, 10.0, slow_s)
        tasks = tuple(make_task(i + 1, i, 1, (0, 1, 1, end - 1, end)) for i, end in enumerate(ends))
        rounds = (RoundRow(1, 1, "train", 0.0, max(ends) + 1.0, 1.0, 0.0, 0.0, 3),)
        evaluations = tuple(make_evaluation(version, at_s, score) for version, (at_s, score) in enumerate(points))
        found.append(replace(run, tasks=tasks, rounds=rounds, evaluations=evaluations))
    return found


def texts(comparison: Comparison) -> list[str]:
    return [str(line) for line in headlines(comparison)]


def test_who_is_best_who_is_fastest_and_what_the_slowest_board_costs(tmp_path: Path) -> None:
    assert texts(compare_runs(study(tmp_path, slow_s=24.0), None, [0.4, 0.5, 0.6])) == [
        "Best final accuracy: 60.0 % (fedavg)",
        "Fastest to 40 %: 1.50 min (fedin; speed-up 2.00× over fedavg)",  # 90 s instead of 180 s
        "Fastest to 50 %: 1.67 min (fedin; speed-up 1.80× over fedavg)",  # 100 s instead of 180 s
        "A round of fedavg: 25 s (11 s without pi-4b)",  # 24 or 10 s, and 1 s on the server
    ]


def test_no_board_is_named_that_no_round_waits_for(tmp_path: Path) -> None:
    even = compare_runs(study(tmp_path, slow_s=10.0), None, [0.5])
    assert not any(line.startswith("A round") for line in texts(even))
    runs = study(tmp_path / "b", slow_s=24.0)
    loose = [replace(run, config=msgspec.structs.replace(run.config, policy=Policy(kind="async"))) for run in runs]
    assert len(headlines(compare_runs(loose, None, [0.5]))) == 2


def test_a_base_that_is_fastest_itself_has_no_speed_up(tmp_path: Path) -> None:
    found = texts(compare_runs(study(tmp_path, slow_s=24.0), "fedin", [0.5]))
    assert found[1] == "Fastest to 50 %: 1.67 min (fedin)"
    assert found[2].startswith("A round of fedin: 25 s")


@pytest.mark.parametrize(("target", "cells"), [(0.5, ("3 min", "1.67 min")), (0.58, ("6 min", "not reached"))])
def test_the_cells_of_a_column_have_one_unit(tmp_path: Path, target: float, cells: tuple[str, str]) -> None:
    (table,) = summary_tables(compare_runs(study(tmp_path, slow_s=24.0), None, [target]), ["time"])
    assert tuple(row[1] for row in table.rows) == cells
