"""Checks the statistics of the study against values from tables of statistics and calculated by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def test_the_t_test_has_the_value_of_the_tables(study: ModuleType) -> None:
    # five values with mean 2.776 and standard error 1: t = 2.776, the two-sided 5 % point of 4 degrees of freedom
    spread = 5**0.5 / 2.5**0.5
    values = [2.776 + spread * step for step in (-2, -1, 0, 1, 2)]
    assert study.p_greater(values) == pytest.approx(0.025, abs=1e-4)
    assert study.p_greater([-value for value in values]) == pytest.approx(0.975, abs=1e-4)


def test_equal_differences_decide_by_their_sign(study: ModuleType) -> None:
    assert study.p_greater([1.0, 1.0, 1.0]) == 0.0
    assert study.p_greater([0.0, 0.0, 0.0]) == 1.0


def test_holms_correction_is_that_of_the_textbook(study: ModuleType) -> None:
    # 0.01 * 4, 0.02 * 3, then 0.03 * 2, and 0.04 * 1 may not be smaller than the one before
    assert study.holm([0.01, 0.04, 0.03, 0.02], 4) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert study.holm([0.6, 0.9], 2) == [1.0, 1.0]
    assert study.holm([0.01, 0.02], 4) == pytest.approx([0.04, 0.06])  # two more tests have not been made


def runs(study: ModuleType, **by_method: list[float]) -> dict[Any, dict[int, Any]]:
    return {
        study.Key("x", method, "sync"): {seed: study.Ended(value, 0.0) for seed, value in enumerate(values)}
        for method, values in by_method.items()
    }


def rows(
    policy: str = "sync", seed: int = 1, points: Sequence[tuple[int, float]] = ((0, 0.1),)
) -> list[dict[str, str]]:
    run = {"study": "x", "method": "m", "policy": policy, "seed": str(seed)}
    return [{**run, "rounds": str(number), "accuracy": str(accuracy)} for number, accuracy in points]


@pytest.mark.parametrize(
    ("own", "paper", "verdict"),
    [
        ([0.53, 0.54, 0.55, 0.54, 0.53], 3.0, "shown"),
        ([0.53, 0.54, 0.55, 0.54, 0.53], 9.0, "shown, smaller"),
        ([0.50, 0.51, 0.49, 0.50, 0.50], 3.0, "refuted"),
        ([0.50, 0.56, 0.48, 0.55, 0.51], 3.0, "open"),
        ([0.47, 0.46, 0.45, 0.46, 0.47], -3.0, "shown"),
        ([0.53, 0.54, 0.55, 0.54, 0.53], -3.0, "refuted"),
    ],
)
def test_a_claim_is_shown_refuted_or_open(study: ModuleType, own: list[float], paper: float, verdict: str) -> None:
    accuracies = runs(study, new=own, old=[0.50, 0.50, 0.50, 0.50, 0.50])
    (found,) = study.findings([study.Claim("x", "new", "old", "sync", paper, "a paper")], accuracies)
    assert found.verdict == verdict


def test_a_claim_without_five_pairs_is_left_out_but_counts(study: ModuleType) -> None:
    few = study.Claim("x", "few", "old", "sync", 3.0, "a paper")
    enough = study.Claim("x", "new", "old", "sync", 3.0, "a paper")
    accuracies = runs(study, few=[0.5] * 4, new=[0.53, 0.54, 0.55, 0.54, 0.53], old=[0.5] * 5)
    (alone,), (found,) = study.findings([enough], accuracies), study.findings([few, enough], accuracies)
    assert found.claim == enough
    assert found.p_shown == pytest.approx(2 * alone.p_shown)


def test_a_claim_is_about_one_policy(study: ModuleType) -> None:
    claim = study.Claim("x", "new", "old", "async", 3.0, "a paper")
    assert study.findings([claim], runs(study, new=[0.5] * 5, old=[0.4] * 5)) == []


def test_the_end_of_a_run_is_the_last_quarter(study: ModuleType) -> None:
    points = [(0, 0.1), (4, 0.2), (8, 0.3), (12, 0.4), (13, 0.5), (16, 0.7)]
    ((key, seeds),) = study.ends_of(rows(points=points)).items()
    assert key == ("x", "m", "sync")
    assert seeds[1].accuracy == pytest.approx(0.6)  # the mean of rounds 13 and 16
    assert seeds[1].gain == pytest.approx(0.3)  # from round 12 to round 16


def test_the_table_of_accuracies_is_sorted(study: ModuleType) -> None:
    text = study.accuracies(runs(study, worse=[0.5, 0.6], better=[0.7]))
    assert text.splitlines()[2:] == [
        "| x | better | sync | 70.0 | +0.0 | 1 |",
        "| x | worse | sync | 55.0 ± 7.1 | +0.0 | 2 |",
    ]


def test_the_table_has_both_data_sets_of_a_claim_in_one_row(study: ModuleType) -> None:
    claims = [
        study.Claim("cifar10", "moon", "heteroavg", "sync", 3.0, "a paper"),
        study.Claim("fashion", "moon", "heteroavg", "sync", -1.0, "a paper"),
        study.Claim("fedhe", "fedhe", "private", "sync", 5.0, "a paper"),
    ]
    accuracies = {
        study.Key(claim.study, method, "sync"): {seed: study.Ended(value, 0.0) for seed, value in enumerate(values)}
        for claim in claims
        for method, values in ((claim.method, [0.53, 0.54, 0.55, 0.54, 0.53]), (claim.base, [0.50] * 5))
    }
    both, own = study.table(study.findings(claims, accuracies)).splitlines()[2:]
    assert both.startswith("| MOON − HeteroAvg | +3.0 | +3.8 [+2.8, +4.8] | 5/5 |")
    assert both.endswith("| −1.0 | +3.8 [+2.8, +4.8] | 0/5 | **refuted** |")
    assert own.startswith("| FedHe − training alone, divided evenly | +5.0 | +3.8 ")
    assert own.endswith("| – | – | – | – |")


def test_the_claims_can_be_read(study: ModuleType) -> None:
    claims = study.read_claims(study.HERE / "claims.csv")
    assert {claim.study for claim in claims} == study.SETTINGS.keys()
    assert {name for claim in claims for name in (claim.method, claim.base)} <= study.NAMES.keys()


def test_what_is_gathered_replaces_the_same_run_and_no_other(study: ModuleType, tmp_path: Path) -> None:
    path, columns = tmp_path / "curves.csv", (*study.RUN, "rounds", "accuracy")
    study.add_rows(path, columns, [*rows(seed=1), *rows(seed=2)])
    again = rows(seed=2, points=[(0, 0.1), (12, 0.5)])
    study.add_rows(path, columns, again)
    assert study.read_rows(path) == [*rows(seed=1), *again]


def test_without_runs_there_are_only_the_heads(study: ModuleType, tmp_path: Path) -> None:
    study.add_rows(tmp_path / "curves.csv", study.COLUMNS, [])
    heads = "study,method,policy,seed,tested,accuracy,time,rounds,bytes,joules,flops\n"
    assert (tmp_path / "curves.csv").read_text() == heads
