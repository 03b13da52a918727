"""Checks the papers' claims against the study's runs, by a rule that was written down before the runs.

    python docs/study/claims.py gather DIR ... > docs/study/curves.csv   # from folders of studies
    python docs/study/claims.py verdicts                                 # from curves.csv and claims.csv alone

A claim says that a method is better than its base by so many points. Its figure is the difference of the two methods
in one seed, where the accuracy of a run is the mean over the evaluations in the last quarter of its rounds. Over the
seeds there are two one-sided t tests, and each kind of test is corrected by Holm's method for the number of claims:

    shown    the difference is greater than 0: corrected p below 0.05
    refuted  it is not shown, and the difference is smaller than the paper's: corrected p below 0.05
    open     neither

A claim of a negative difference is checked with both signs turned. The interval in the table is the plain 95 % t
interval of this claim alone, and "won" counts the seeds whose difference has the claimed sign (a sign test of five
seeds cannot fall below p = 0.03, so it decides nothing here).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple, TextIO

from scipy.special import stdtr

from fleetbed.analysis.tables.curves import AXES, curve
from fleetbed.analysis.tables.intervals import paired_interval, points
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.analysis.tables.series import series_of

HERE = Path(__file__).parent
COLUMNS = ("study", "method", "policy", "seed", "accuracy", *AXES)
LEVEL = 0.05
LAST_PART = 0.25  # of the rounds, over which accuracies are averaged


class Claim(NamedTuple):
    study: str
    method: str
    base: str
    paper_points: float
    source: str


class Finding(NamedTuple):
    claim: Claim
    by_seed: dict[int, float]  # points
    p_shown: float  # corrected
    p_refuted: float

    @property
    def verdict(self) -> str:
        if self.p_shown < LEVEL:
            return "shown"
        return "refuted" if self.p_refuted < LEVEL else "open"


def gather(folders: Iterable[Path], out: TextIO) -> None:
    """Write the curves of all runs, one row for each evaluation."""
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for folder in folders:
        for series in series_of(open_runs([folder])):
            for run in series.runs:
                found = {axis: curve(run, axis, series.shown) for axis in AXES}
                known = {axis: one for axis, one in found.items() if one is not None}
                for place, accuracy in enumerate(known["rounds"].y):
                    spent = [f"{known[axis].x[place]:.6g}" if axis in known else "" for axis in AXES]
                    rows.writerow(
                        [folder.name, series.method, series.policy, run.config.seed, f"{accuracy:.5f}", *spent]
                    )


def last_accuracies(rows: Iterable[Mapping[str, str]], policy: str = "sync") -> dict[tuple[str, str], dict[int, float]]:
    """Return, by study and method, the accuracy of each seed: the mean over the last quarter of its rounds."""
    curves: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["policy"] == policy:
            seeds = curves.setdefault((row["study"], row["method"]), {})
            seeds.setdefault(int(row["seed"]), []).append((float(row["rounds"]), float(row["accuracy"])))
    return {
        key: {
            seed: mean(accuracy for number, accuracy in one if number > (1 - LAST_PART) * max(one)[0])
            for seed, one in seeds.items()
        }
        for key, seeds in curves.items()
    }


def findings(claims: Sequence[Claim], accuracies: Mapping[tuple[str, str], Mapping[int, float]]) -> list[Finding]:
    """Test every claim whose runs are there."""
    tested = []
    for claim in claims:
        own, base = (accuracies.get((claim.study, each), {}) for each in (claim.method, claim.base))
        by_seed = {seed: 100 * (own[seed] - base[seed]) for seed in sorted(own.keys() & base.keys())}
        if len(by_seed) >= 3:
            sign = 1 if claim.paper_points >= 0 else -1
            turned = [sign * value for value in by_seed.values()]
            above_0 = p_greater(turned)
            below_paper = p_greater([abs(claim.paper_points) - value for value in turned])
            tested.append(Finding(claim, by_seed, above_0, below_paper))
    shown = holm([one.p_shown for one in tested])
    refuted = holm([one.p_refuted for one in tested])
    return [one._replace(p_shown=a, p_refuted=b) for one, a, b in zip(tested, shown, refuted, strict=True)]


def p_greater(values: Sequence[float]) -> float:
    """Return the p value of the one-sided t test that the mean is greater than 0."""
    deviation = stdev(values)
    if deviation == 0:
        return 0.0 if values[0] > 0 else 1.0
    return float(stdtr(len(values) - 1, -mean(values) * sqrt(len(values)) / deviation))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values for their number by Holm's method."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def table(found: Iterable[Finding]) -> str:
    lines = [
        "| data | claim | paper | here, 95 % interval | won | verdict | source |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for one in found:
        claim, interval = one.claim, paired_interval({seed: value / 100 for seed, value in one.by_seed.items()})
        assert interval.low is not None  # there are three pairs or more
        assert interval.high is not None
        relation = "above" if claim.paper_points >= 0 else "below"
        won = sum((value > 0) == (claim.paper_points >= 0) for value in one.by_seed.values())
        lines.append(
            f"| {claim.study} | {claim.method} {relation} {claim.base} | {points(claim.paper_points / 100)} "
            f"| {points(interval.mean)} [{points(interval.low)}, {points(interval.high)}] "
            f"| {won} of {len(one.by_seed)} | {one.verdict} | {claim.source} |"
        )
    return "\n".join(lines)


def read_claims(path: Path) -> list[Claim]:
    with path.open(newline="") as file:
        return [
            Claim(row["study"], row["method"], row["base"], float(row["paper_points"]), row["source"])
            for row in csv.DictReader(file)
        ]


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["gather", _, *_]:
            gather(map(Path, arguments[1:]), sys.stdout)
        case ["verdicts"]:
            with (HERE / "curves.csv").open(newline="") as file:
                accuracies = last_accuracies(csv.DictReader(file))
            print(table(findings(read_claims(HERE / "claims.csv"), accuracies)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
