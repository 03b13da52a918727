"""The metrics that methods and apps report, as curves calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade import make_task
from synthetic_runs import write_run

from fleetbed.analysis.figures.metric_plots import metrics_figure
from fleetbed.analysis.page.payload import payload
from fleetbed.analysis.tables.compare import side_by_side
from fleetbed.analysis.tables.curves import MergeMetric, band, curve
from fleetbed.analysis.tables.metrics import values_of_tasks
from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.analysis.tables.series import series_of
from fleetbed.emulator.records.tables import MetricRow, RoundRow


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two clients, two rounds of a stage for training and one for evaluation, as of a Flower app."""
    empty = open_run(write_run(tmp_path, rounds=2, targets=()))
    stages = (("train", 1, 8.0), ("evaluate", 1, 9.0), ("train", 2, 19.0), ("evaluate", 2, 20.0))
    tasks, metrics = [], [MetricRow(0, None, "server accuracy", 0.1)]
    for place, (stage, round_, end_s) in enumerate(stages):
        version = place + 1
        for client in (0, 1):
            number = 2 * place + client
            moments = (end_s - 5, end_s - 4, end_s - 4, end_s - 2 + client, end_s - 1 + client)
            tasks.append(make_task(number, client, round_, moments, stage=stage, merged_version=version))
            metrics.append(MetricRow(version, number, "num-examples", 10.0 * version + client))
        metrics.append(MetricRow(version, None, "num-examples", 20.0 * version + 1))
        metrics.append(MetricRow(version, None, f"{stage}_loss", None if version == 4 else 1 / version))
        if stage == "train":
            metrics.append(MetricRow(version, None, "server accuracy", 0.1 + 0.2 * round_))
    rounds = [
        RoundRow(place + 1, round_, stage, end_s - 5, end_s, 0.0, 0.0, 1.0, 2)
        for place, (stage, round_, end_s) in enumerate(stages)
    ]
    return replace(empty, tasks=tuple(tasks), metrics=tuple(metrics), rounds=tuple(rounds), evaluations=())


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("train_loss", [8, 19], [1, 1 / 3]),
        ("evaluate_loss", [9], [1 / 2]),  # that of round 2 is not finite
        ("server accuracy", [0, 8, 19], [0.1, 0.3, 0.5]),
        ("num-examples (train)", [8, 19], [21, 61]),
        ("num-examples (evaluate)", [9, 20], [41, 81]),
    ],
)
def test_a_metric_of_merges_is_a_curve_and_each_stage_has_its_own(
    run: Run, name: str, x: list[float], y: list[float]
) -> None:
    found = curve(run, "time", "global", MergeMetric(name))
    assert found is not None
    np.testing.assert_allclose(found.x, x)
    np.testing.assert_allclose(found.y, y)


def test_other_axes_and_seeds(run: Run) -> None:
    by_round = curve(run, "rounds", "global", MergeMetric("server accuracy"))
    assert by_round is not None
    assert by_round.x.tolist() == [0, 1, 2]
    other = replace(run, metrics=tuple(replace_value(row, 0.2) for row in run.metrics))
    (series,) = series_of([run])
    both = band(replace(series, runs=(run, other)), "time", MergeMetric("server accuracy"))
    assert both is not None
    np.testing.assert_allclose(both.mean, [0.2, 0.4, 0.6])
    np.testing.assert_allclose(both.deviation, [0.2 / 2**0.5] * 3)
    assert curve(run, "time", "global", MergeMetric("missing")) is None


def replace_value(row: MetricRow, more: float) -> MetricRow:
    return MetricRow(row.version, row.task, row.name, None if row.value is None else row.value + more)


def test_the_metrics_of_tasks_by_stage(run: Run) -> None:
    assert values_of_tasks(run) == {
        "num-examples (train)": {0: 10, 1: 11, 4: 30, 5: 31},
        "num-examples (evaluate)": {2: 20, 3: 21, 6: 40, 7: 41},
    }


def test_page_and_plot_have_a_curve_for_each_metric(run: Run) -> None:
    data = payload(side_by_side([run], None, []))
    names = ["server accuracy", "num-examples (train)", "train_loss", "num-examples (evaluate)", "evaluate_loss"]
    assert [one["name"] for one in data["metrics"]] == names
    assert data["metrics"][2]["curves"][0] == {"x": [8.0, 19.0], "mean": [1.0, 0.33333], "sd": None, "seeds": 1}
    tasks = data["runs"][0]["tasks"]
    examples = tasks["metrics"]["num-examples (train)"]
    assert list(zip(tasks["client"], examples, strict=True))[:4] == [(0, 10.0), (1, 11.0), (0, None), (1, None)]
    panels = [axes for axes in metrics_figure(series_of([run])).axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == names
    first, second, merged = panels[1].get_lines()  # two clients and the merges
    assert [line.get_ydata().tolist() for line in (first, second, merged)] == [[10, 30], [11, 31], [21, 61]]
    assert merged.get_xdata().tolist() == [8, 19]
