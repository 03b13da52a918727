"""The interval of paired differences covers the true mean as often as it says, however few the pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_study

from fleetbed.analysis.page.page import page
from fleetbed.analysis.tables.compare import records, side_by_side
from fleetbed.analysis.tables.intervals import difference_text, paired_interval
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.analysis.tables.summary_table import summary_tables

TRIALS = 3000


@pytest.mark.parametrize("pairs", range(3, 11))
@pytest.mark.parametrize("shape", ["normal", "binomial"])
def test_simulated_coverage_is_at_least_93_percent(pairs: int, shape: str) -> None:
    """For normal differences, and for those of accuracies on 200 test samples."""
    rng = np.random.default_rng([pairs, len(shape)])
    size = (TRIALS, pairs)
    draws, truth = {
        "normal": (rng.normal(0.02, 0.01, size), 0.02),
        "binomial": ((rng.binomial(200, 0.7, size) - rng.binomial(200, 0.6, size)) / 200, 0.1),
    }[shape]
    covered = 0
    for values in draws.tolist():
        found = paired_interval(dict(enumerate(values)))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert covered / TRIALS >= 0.93


def test_three_pairs_by_hand() -> None:
    found = paired_interval({1: 0.01, 2: 0.02, 3: 0.03})  # sd 0.01, t(2) = 4.303
    assert (found.mean, found.pairs) == (pytest.approx(0.02), 3)
    assert (found.low, found.high) == (pytest.approx(0.02 - 0.02484, abs=1e-5), pytest.approx(0.04484, abs=1e-5))
    assert difference_text(found) == "+2.0 [−0.5, +4.5] (3 pairs)"


def test_below_three_pairs_the_differences_are_listed() -> None:
    assert difference_text(paired_interval({1: 0.012, 4: -0.003})) == "+1.2, −0.3 (2 pairs)"
    assert difference_text(paired_interval({7: -0.012})) == "−1.2 (1 pair)"


@pytest.mark.parametrize("seeds", [(1,), (1, 2), (1, 2, 3, 4)])
def test_every_difference_has_its_number_of_pairs(seeds: tuple[int, ...], tmp_path: Path) -> None:
    found = side_by_side(open_runs([write_study(tmp_path, seeds=seeds, rounds=2)]), None, [])
    said = f"({len(seeds)} pair{'s' if len(seeds) > 1 else ''})"
    assert said in summary_tables(found)[0].markdown()
    assert said in summary_tables(found)[0].latex()
    assert said in page(found)
    assert [row["pairs"] for row in records(found)] == [0, len(seeds)]
    assert "bootstrap" not in page(found)
