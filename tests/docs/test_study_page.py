"""Checks that the tables on the page of the study are those that its scripts make from the CSV files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

STUDY = Path(__file__).parents[2] / "docs" / "study"


@pytest.fixture(scope="module")
def page() -> str:
    return STUDY.with_suffix(".md").read_text()


def test_the_verdicts_are_those_of_the_rule(study: ModuleType, page: str) -> None:
    rows = study.read_rows(study.CURVES)
    found = study.findings(study.read_claims(STUDY / "claims.csv"), study.ends_of(rows))
    assert study.table(found) in page
    verdicts = Counter(one.verdict for one in found)
    shown = verdicts["shown"] + verdicts["shown, smaller"]
    counts = (
        f"{shown} of the {len(found)} claims are shown ({verdicts['shown, smaller']} of them smaller than in the paper)"
    )
    assert f"{counts}, {verdicts['refuted']} are refuted and {verdicts['open']} are open" in " ".join(page.split())


def test_what_was_tried_is_as_the_script_has_it(study: ModuleType, tried: ModuleType, page: str) -> None:
    assert tried.table(study.read_rows(tried.TRIED), study.ends_of(study.read_rows(study.CURVES))) in page


def test_the_table_of_the_policies_is_as_the_script_has_it(study: ModuleType, policies: ModuleType, page: str) -> None:
    assert policies.table(study.read_rows(study.CURVES)) in page


def test_the_curves_of_heteroavg_are_flat(study: ModuleType) -> None:
    """A missing gain refutes nothing where the runs end on the steep part of their curves."""
    ends = study.ends_of(study.read_rows(study.CURVES))
    for data in ("cifar10", "fashion"):
        gains = [100 * one.gain for one in ends[study.Key(data, "heteroavg", "sync")].values()]
        assert len(gains) == study.SEEDS
        assert sum(gains) / len(gains) < 1
