"""Checks what is said of the order of methods at equal cost against values calculated by hand."""

from __future__ import annotations

from types import ModuleType

import pytest


def run(study: str, method: str, seed: int, *points: tuple[float, float, float]) -> list[dict[str, str]]:
    """The evaluations of a run: rounds, device time and accuracy."""
    one = {"study": study, "method": method, "policy": "sync", "seed": str(seed), "bytes": "1", "joules": "1"}
    return [{**one, "rounds": str(r), "time": str(t), "accuracy": str(a)} for r, t, a in points]


def test_a_method_that_spends_more_is_judged_by_the_runs_that_fit(orders: ModuleType) -> None:
    rows = [
        *run("x", "heteroavg", 1, (0, 0, 0.1), (8, 100, 0.5)),
        *run("x", "all-large", 1, (8, 400, 0.9), (0, 0, 0.1)),
        *run("x-time", "all-large", 1, (0, 0, 0.1), (2, 100, 0.4)),
        *run("x", "private", 1, (0, 0, 0.1), (8, 50, 0.3)),
    ]
    found = orders.by_cost(rows, "x")
    assert found["rounds"] == {"heteroavg": {1: 0.5}, "all-large": {1: 0.9}, "private": {1: 0.3}}
    assert found["time"] == {"heteroavg": {1: 0.5}, "all-large": {1: 0.4}, "private": {1: 0.3}}
    assert orders.spent(orders.curves_of(rows, "x"), "all-large", "time") == 4
    without_runs_that_fit = [*rows, *run("x", "fedin", 1, (0, 0, 0.1), (8, 200, 0.7))]
    assert list(orders.by_cost(without_runs_that_fit, "x")) == ["rounds", "bytes", "joules"]
    assert orders.by_cost(rows, "y") == {}


def test_a_method_that_spends_less_goes_on_if_there_are_runs_for_it(orders: ModuleType) -> None:
    rows = [
        *run("x", "heteroavg", 1, (0, 0, 0.1), (8, 100, 0.5)),
        *run("x", "moon", 1, (0, 0, 0.1), (8, 99, 0.6)),  # spends the same
        *run("x", "heterofl", 1, (0, 0, 0.1), (8, 10, 0.2)),
        *run("x-time", "heterofl", 1, (0, 0, 0.1), (64, 80, 0.4)),
    ]
    found = orders.by_cost(rows, "x")
    assert found["time"] == {"heteroavg": {1: 0.5}, "moon": {1: 0.6}, "heterofl": {1: 0.4}}


def test_means_are_over_the_seeds_that_all_methods_have(orders: ModuleType) -> None:
    accuracies = {"heteroavg": {1: 0.5, 2: 0.6, 3: 0.7}, "fedin": {3: 0.4, 2: 0.4}}
    assert orders.of_common_seeds(accuracies) == {"heteroavg": {2: 0.6, 3: 0.7}, "fedin": {2: 0.4, 3: 0.4}}


def test_only_pairs_that_are_sure_on_both_sides_are_reversed(orders: ModuleType) -> None:
    by_rounds = {
        "fedin": {1: 0.70, 2: 0.71, 3: 0.70},
        "moon": {1: 0.50, 2: 0.51, 3: 0.51},
        "fedavg": {1: 0.4, 2: 0.7, 3: 0.5},
    }
    by_time = {
        "fedin": {1: 0.40, 2: 0.41, 3: 0.40},
        "moon": {1: 0.50, 2: 0.51, 3: 0.51},
        "fedavg": {1: 0.5, 2: 0.8, 3: 0.6},
    }
    (found,) = orders.reversals(by_rounds, by_time)
    assert (found.first, found.second) == ("fedin", "moon")
    assert found.lead.mean == pytest.approx(0.59 / 3)
    assert found.lag.mean == pytest.approx(-0.31 / 3)
    assert orders.reversals(by_rounds, by_rounds) == []


def test_methods_with_personal_models_are_in_no_pair(orders: ModuleType) -> None:
    by_rounds = {"fedin": {1: 0.7, 2: 0.7, 3: 0.71}, "private": {1: 0.5, 2: 0.5, 3: 0.51}}
    by_time = {"fedin": {1: 0.4, 2: 0.4, 3: 0.41}, "private": {1: 0.5, 2: 0.5, 3: 0.51}}
    assert orders.compared(by_rounds) == ["fedin"]
    assert orders.reversals(by_rounds, by_time) == []


def test_tau_counts_the_pairs_that_agree(orders: ModuleType) -> None:
    by_rounds = {"fedin": {1: 0.3}, "moon": {1: 0.2}, "fedavg": {1: 0.1}}
    assert orders.tau(by_rounds, by_rounds) == pytest.approx(1)
    by_time = {"fedavg": {1: 0.1}, "moon": {1: 0.3}, "fedin": {1: 0.2}}
    assert orders.tau(by_rounds, by_time) == pytest.approx(1 / 3)  # 2 of 3 pairs agree


def test_the_tables_name_methods_and_budgets(orders: ModuleType) -> None:
    by_axis = {
        "rounds": {"fedin": {1: 0.70, 2: 0.71, 3: 0.70}, "heteroavg": {1: 0.50, 2: 0.50, 3: 0.50}},
        "time": {"fedin": {1: 0.40, 2: 0.41, 3: 0.40}, "heteroavg": {1: 0.50, 2: 0.50, 3: 0.50}},
    }
    assert orders.order_table("X", by_axis).splitlines() == [
        "| X | equal rounds | equal device time |",
        "|---|---:|---:|",
        "| FedIN | 70.3 % | 40.3 % |",
        "| HeteroAvg | 50.0 % | 50.0 % |",
        "| Kendall's tau | 1.00 | -1.00 |",
        "| Seeds | 3 | 3 |",
    ]
    assert orders.reversal_table("X", by_axis).splitlines()[2:] == [
        "| equal device time | FedIN | HeteroAvg | +20.3 [+18.9, +21.8] | −9.7 [−11.1, −8.2] |"
    ]
