"""Curves, targets and deviations against values calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from handmade import make_evaluation, make_task
from synthetic_runs import write_run

from fleetbed.analysis.tables.curves import band, curve, targets_of, to_target
from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.analysis.tables.series import Series, series_of
from fleetbed.profiles.experiment import Evaluation


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two clients, two rounds; device times, bytes and joules are small whole numbers."""
    empty = open_run(write_run(tmp_path, rounds=2, targets=()))
    tasks = (
        make_task(1, 0, 1, (0, 1, 1, 5, 6), bytes_down=100, bytes_up=50, joules=2.0, flops=10.0),
        make_task(2, 1, 1, (0, 2, 2, 7, 8), bytes_down=100, bytes_up=50, joules=3.0, flops=20.0),
        make_task(3, 0, 2, (8, 9, 9, 13, 14), bytes_down=100, bytes_up=50, joules=2.0, flops=10.0),
        make_task(4, 1, 2, (8, 10, 10, 30, None), outcome="oom", bytes_down=100, bytes_up=None, flops=20.0),
    )
    evaluations = (
        make_evaluation(0, 0.0, 0.10),
        make_evaluation(1, 8.0, 0.30),
        make_evaluation(1, 8.0, 0.50, target="resnet14"),
        make_evaluation(2, 14.0, 0.50),
        make_evaluation(2, 14.0, 0.60, target="resnet14"),
    )
    return replace(empty, tasks=tasks, evaluations=evaluations)


def test_accuracy_is_the_mean_over_models_at_the_time_of_the_merge(run: Run) -> None:
    by_time = curve(run, "time", "global")
    assert by_time is not None
    np.testing.assert_allclose(by_time.x, [0, 8, 14])
    np.testing.assert_allclose(by_time.y, [0.10, 0.40, 0.55])


@pytest.mark.parametrize(
    ("axis", "x"),
    [
        ("rounds", [0, 1, 2]),
        ("bytes", [0, 300, 550]),  # round 2: both downloads, one upload by 14 s
        ("joules", [0, 5, 7]),
        ("flops", [0, 30, 40]),  # the task that dies at 30 s is not yet spent
    ],
)
def test_the_other_axes_count_the_cost_of_the_fleet_so_far(run: Run, axis: str, x: list[float]) -> None:
    found = curve(run, axis, "global")  # type: ignore[arg-type]
    assert found is not None
    np.testing.assert_allclose(found.x, x)


def test_own_test_parts_weigh_by_their_size(run: Run) -> None:
    own = tuple(
        make_evaluation(1, 8.0, accuracy, target=f"client/{k}", client=k, local=1, samples=samples)
        for k, (accuracy, samples) in enumerate([(0.9, 30), (0.5, 10)])
    )
    found = curve(replace(run, evaluations=own), "time", "personal-own")
    assert found is not None
    assert found.y[0] == pytest.approx((0.9 * 30 + 0.5 * 10) / 40)


def test_a_run_without_evaluations_or_watts_has_no_curve(run: Run) -> None:
    assert curve(replace(run, evaluations=()), "time", "global") is None
    no_watts = tuple(msgspec.structs.replace(task, joules=None) for task in run.tasks)
    assert curve(replace(run, tasks=no_watts), "joules", "global") is None


def test_the_target_is_reached_at_the_first_evaluation_at_or_above_it(run: Run) -> None:
    assert to_target(run, "time", 0.4, "global") == 8.0
    assert to_target(run, "bytes", 0.41, "global") == 550
    assert to_target(run, "joules", 0.56, "global") is None


def _with(run: Run, seed: int, points: list[tuple[float, float]], status: str = "done") -> Run:
    evaluations = tuple(make_evaluation(v, x, a) for v, (x, a) in enumerate(points))
    config = msgspec.structs.replace(run.config, seed=seed)
    return replace(run, config=config, evaluations=evaluations, meta={**run.meta, "status": status})


def test_mean_and_spread_are_those_after_the_same_round(run: Run) -> None:
    seeds = (_with(run, 1, [(0, 0.1), (10, 0.5)]), _with(run, 2, [(0, 0.1), (20, 0.7)]))
    found = band(Series("m", "m", "sync", seeds), "time")
    assert found is not None
    np.testing.assert_allclose(found.x, [0, 15])
    np.testing.assert_allclose(found.mean, [0.1, 0.6])
    np.testing.assert_allclose(found.deviation, [0.0, np.std([0.5, 0.7], ddof=1)])


def test_a_run_that_broke_off_counts_as_far_as_it_went(run: Run) -> None:
    whole = _with(run, 1, [(0, 0.1), (10, 0.5), (20, 0.6)])
    broken = _with(run, 2, [(0, 0.3), (9, 0.4)], "failed")
    found = band(Series("m", "m", "sync", (whole, broken)), "time")
    assert found is not None
    np.testing.assert_allclose(found.x, [0, 9.5, 20])
    np.testing.assert_allclose(found.mean, [0.2, 0.45, 0.6])
    np.testing.assert_allclose(found.deviation[2:], 0)


def test_a_run_that_was_done_early_keeps_its_accuracy(run: Run) -> None:
    long, short = _with(run, 1, [(0, 0.1), (10, 0.5), (20, 0.6)]), _with(run, 2, [(0, 0.3), (30, 0.4)])
    found = band(Series("m", "m", "sync", (long, short)), "time")
    assert found is not None
    np.testing.assert_allclose(found.x, [0, 20, 20])  # the mean of 10 and 30, then 20, which is not before it
    np.testing.assert_allclose(found.mean, [0.2, 0.45, 0.5])


def test_long_curves_are_thinned_but_keep_their_end(run: Run) -> None:
    long = _with(run, 1, [(float(x), x / 1000) for x in range(1001)])
    found = band(Series("m", "m", "sync", (long,)), "time", points=50)
    assert found is not None
    assert len(found.x) <= 52
    assert (found.x[-1], found.mean[-1]) == (1000, 1.0)


def test_targets_come_from_the_user_the_experiment_or_the_base(run: Run) -> None:
    (base,) = series_of([run])
    assert targets_of([run], base, [0.3]) == (0.3,)
    assert targets_of([run], base, []) == (0.55,)  # the base's best accuracy is 0.55
    experiment = msgspec.structs.replace(run.config.experiment, evaluation=Evaluation(targets=(0.4,)))
    named = replace(run, config=msgspec.structs.replace(run.config, experiment=experiment))
    assert targets_of([named], base, []) == (0.4,)


def test_the_accuracy_of_an_untrained_model_is_no_target(run: Run) -> None:
    lucky = _with(run, 1, [(0, 0.5), (10, 0.54)])
    (base,) = series_of([lucky])
    assert targets_of([lucky], base, []) == ()
