"""Tables by round against numbers calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from handmade import make_evaluation, make_task
from synthetic_runs import write_run

from fleetbed.analysis.tables.by_round import accuracy_records, accuracy_tables, cost_table, costs
from fleetbed.analysis.tables.compare import side_by_side
from fleetbed.analysis.tables.runs import Run, open_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """One method, two seeds of two rounds; the second task of each run never came to its upload."""
    found = []
    for seed, last in ((1, 0.5), (2, 0.7)):
        run = open_run(write_run(tmp_path, "fedavg", seed, methods=("fedavg",), seeds=(1, 2), rounds=2))
        tasks = (
            make_task(1, 0, 1, (0, 1, 1, 3, 4), flops=3e9, cpu_s=2.0, bytes_down=100, bytes_up=40),
            make_task(2, 1, 1, (0, 1, 1, 3, None), flops=1e9, cpu_s=None, bytes_down=100, bytes_up=None),
            make_task(3, 0, 2, (4, 5, 5, 7, 8), flops=4e9, cpu_s=4.0, bytes_down=100, bytes_up=60),
        )
        evaluations = (make_evaluation(0, 0, 0.1), make_evaluation(2, 8, last))
        found.append(replace(run, tasks=tasks, evaluations=evaluations))
    return found


def test_accuracy_by_round(runs: list[Run]) -> None:
    found = side_by_side(runs, None, [])
    (table,) = accuracy_tables(found)
    assert table.columns == ("Method", "Round 0", "Round 2")
    assert table.rows == (("fedavg", "10.0 ± 0.0 %", "60.0 ± 14.1 %"),)
    assert [(row["round"], row["seed"], row["accuracy"]) for row in accuracy_records(found)] == [
        (0, 1, 0.1),
        (0, 2, 0.1),
        (2, 1, 0.5),
        (2, 2, 0.7),
    ]


def test_a_method_that_was_not_evaluated_has_a_row_without_figures(runs: list[Run]) -> None:
    without = [replace(run, evaluations=()) for run in runs]
    assert accuracy_tables(side_by_side(without, None, []))[0].rows == (("fedavg",),)


def test_cost_of_a_round(runs: list[Run]) -> None:
    found = side_by_side(runs, None, [])
    (one,) = costs(found)
    assert (one.tasks, one.device_s, one.cpu_s, one.flops) == (1.5, 4.0, 3.0, 4e9)
    assert (one.bytes_down_per_task, one.bytes_up_per_task) == (100, 50)
    assert cost_table(found).rows == (("fedavg", "1.50", "4 s", "3 s", "4 GFLOP", "100 B", "50 B"),)


def test_a_run_without_tasks_has_no_costs(runs: list[Run]) -> None:
    assert costs(side_by_side([replace(run, tasks=()) for run in runs], None, [])) == []
