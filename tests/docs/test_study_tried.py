"""Checks the differences that are shown for what was tried, and that the table names runs that are there."""

from __future__ import annotations

from types import ModuleType

import pytest


def test_a_method_is_compared_with_a_base_of_another_study(study: ModuleType, tried: ModuleType) -> None:
    ends = {
        study.Key("prox", "heteroprox-0.01", "sync"): {1: study.Ended(0.5, 0), 2: study.Ended(0.6, 0)},
        study.Key("cifar10", "heteroavg", "sync"): {
            1: study.Ended(0.4, 0),
            2: study.Ended(0.4, 0),
            3: study.Ended(1, 0),
        },
    }
    row = {"study": "prox", "method": "heteroprox-0.01", "base_study": "cifar10", "base": "heteroavg"}
    found = tried.difference(row, ends)
    assert found.by_seed == {1: pytest.approx(0.1), 2: pytest.approx(0.2)}
    assert tried.difference({**row, "study": "other"}, ends) is None
    text = tried.table([{**row, "claim": "A - B", "what": "less", "data": "CIFAR-10"}], ends)
    assert text.splitlines()[-1] == "| A - B | less | CIFAR-10 | +10.0, +20.0 (2 pairs) |"


def test_the_runs_of_everything_that_was_tried_are_there(study: ModuleType, tried: ModuleType) -> None:
    ends = study.ends_of(study.read_rows(study.CURVES))
    rows = study.read_rows(tried.TRIED)
    assert rows
    assert [row for row in rows if tried.difference(row, ends) is None] == []
