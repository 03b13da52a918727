"""Checks what is said of the order of methods at equal cost against values calculated by hand."""

from __future__ import annotations

from types import ModuleType

import pytest


def run(method: str, seed: int, *points: tuple[float, float, float]) -> list[dict[str, str]]:
    """The evaluations of a run: rounds, device time and accuracy."""
    one = {"study": "x", "method": method, "policy": "sync", "seed": str(seed)}
    return [{**one, "rounds": str(r), "time": str(t), "accuracy": str(a)} for r, t, a in points]


def test_a_method_that_costs_more_is_taken_where_the_budget_ends(orders: ModuleType) -> None:
    rows = [
        *run("heteroavg", 1, (0, 0, 0.1), (10, 100, 0.5)),
        *run("slow", 1, (10, 400, 0.9), (0, 0, 0.1), (5, 200, 0.7)),
        *run("quick", 1, (0, 0, 0.1), (10, 50, 0.3)),
        *run("slow", 2, (0, 0, 0.1), (10, 400, 0.9)),  # the base has no such seed
    ]
    curves = orders.curves_of(rows, "x")
    assert orders.at_equal_cost(curves, "time") == {
        "heteroavg": {1: 0.5},
        "slow": {1: pytest.approx(0.4)},
        "quick": {1: 0.3},
    }
    assert orders.at_equal_cost(curves, "rounds")["slow"] == {1: 0.9}


def test_only_pairs_that_are_sure_on_both_sides_are_reversed(orders: ModuleType) -> None:
    by_rounds = {"a": {1: 0.70, 2: 0.71, 3: 0.70}, "b": {1: 0.50, 2: 0.51, 3: 0.51}, "c": {1: 0.4, 2: 0.7, 3: 0.5}}
    by_time = {"a": {1: 0.40, 2: 0.41, 3: 0.40}, "b": {1: 0.50, 2: 0.51, 3: 0.51}, "c": {1: 0.5, 2: 0.8, 3: 0.6}}
    (found,) = orders.reversals(by_rounds, by_time)
    assert (found.first, found.second) == ("a", "b")
    assert found.lead.mean == pytest.approx(0.59 / 3)
    assert found.lag.mean == pytest.approx(-0.31 / 3)
    assert orders.reversals(by_rounds, by_rounds) == []


def test_tau_counts_the_pairs_that_agree(orders: ModuleType) -> None:
    by_rounds = {"a": {1: 0.3}, "b": {1: 0.2}, "c": {1: 0.1}}
    assert orders.tau(by_rounds, by_rounds) == pytest.approx(1)
    assert orders.tau(by_rounds, {"c": {1: 0.1}, "b": {1: 0.3}, "a": {1: 0.2}}) == pytest.approx(1 / 3)  # 2 of 3 agree


def test_the_tables_name_methods_and_budgets(orders: ModuleType) -> None:
    by_axis = {
        "rounds": {"fedin": {1: 0.70, 2: 0.71, 3: 0.70}, "heteroavg": {1: 0.50, 2: 0.50, 3: 0.50}},
        "time": {"fedin": {1: 0.40, 2: 0.41, 3: 0.40}, "heteroavg": {1: 0.50, 2: 0.50, 3: 0.50}},
    }
    assert orders.order_table("X", by_axis).splitlines() == [
        "| X | equal rounds | equal device time |",
        "|---|---:|---:|",
        "| FedIN | 70.3 % (1) | 40.3 % (2) |",
        "| HeteroAvg | 50.0 % (2) | 50.0 % (1) |",
        "| Kendall's tau | 1.00 | -1.00 |",
    ]
    assert orders.reversal_table("X", by_axis).splitlines()[2:] == [
        "| equal device time | FedIN | HeteroAvg | +20.3 [+18.9, +21.8] | −9.7 [−11.1, −8.2] |"
    ]
