"""Checks the papers' claims against the study's runs, by a rule whose tests were written down before the runs.

    python docs/study/claims.py gather DIR ...   # add the finished runs of these folders of studies to curves.csv
    python docs/study/claims.py accuracies       # the table of accuracies, from curves.csv alone
    python docs/study/claims.py verdicts         # the table of claims, from curves.csv and claims.csv alone

A claim says that a method is better than its base by so many points. Its figure is the difference of the two methods
in one seed, where the accuracy of a run is the mean over the evaluations in the last quarter of its rounds. Over the
seeds there are two one-sided t tests, and each kind of test is corrected by Holm's method for the number of claims:

    shown    the difference is greater than 0: corrected p below 0.05
    refuted  it is not shown, and the difference is smaller than the paper's: corrected p below 0.05
    open     neither

So what is refuted is the size that the paper gives; the interval says whether something smaller is left. A difference
that is shown, and of which the second test says that it is smaller than the paper's, is "shown, smaller". A claim of a
negative difference is checked with both signs turned. The interval in the table is the plain 95 % t interval of this
claim alone, and "won" counts the seeds whose difference has the claimed sign (a sign test of five seeds cannot fall
below p = 0.03, so it decides nothing here). A claim with fewer than SEEDS pairs is not judged, but counts in the
correction.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from scipy.special import stdtr

from fleetbed.analysis.tables.curves import AXES, curve
from fleetbed.analysis.tables.intervals import Interval, paired_interval, points
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.analysis.tables.series import series_of

HERE = Path(__file__).parent
CURVES = HERE / "curves.csv"
RUN = ("study", "method", "policy", "seed")
COLUMNS = (*RUN, "tested", "accuracy", *AXES)
LEVEL = 0.05
SEEDS = 5
LAST_PART = 0.25  # of the rounds, over which accuracies are averaged
#: the data set of each study, and what sets its claims apart from those of the study that has the same one
SETTINGS = {
    "cifar10": ("CIFAR-10", ""),
    "fashion": ("Fashion-MNIST", ""),
    "fedhe": ("CIFAR-10", ", divided evenly"),
    "fedhenn": ("CIFAR-10", ", two classes a client"),
}
NAMES = {
    "heteroavg": "HeteroAvg",
    "heteroprox": "HeteroProx",
    "fedavg": "FedAvg, same architecture",
    "all-large": "AllLarge",
    "all-small": "AllSmall",
    "all-one-channel": "AllSmall of one channel",
    "inco-heteroavg": "InCo",
    "inco-heteroavg-paper": "InCo (`paper`)",
    "inco-heteroavg-theorem": "InCo (`theorem`)",
    "inco-heteroprox": "InCo on HeteroProx",
    "inco-heteroprox-paper": "InCo on HeteroProx (`paper`)",
    "inco-heteroprox-theorem": "InCo on HeteroProx (`theorem`)",
    "inco-scaffold": "InCo on SCAFFOLD",
    "inco-moon": "InCo on MOON",
    "inco-heterofl": "InCo on HeteroFL",
    "inco-inclusivefl": "InCo on InclusiveFL",
    "scaffold": "SCAFFOLD",
    "moon": "MOON",
    "heterofl": "HeteroFL",
    "inclusivefl": "InclusiveFL",
    "fedin": "FedIN",
    "fedin-noise": "FedIN with noise",
    "fedhe": "FedHe",
    "private": "training alone",
    "private-own-test": "training alone, on its own test data",
    "private-homo": "training alone, one architecture",
    "fedhenn": "FedHeNN",
    "fedhenn-homo": "FedHeNN of one architecture",
    "fedrep": "FedRep",
}


Row = Mapping[str, str]


class Key(NamedTuple):
    study: str
    method: str
    policy: str


class Claim(NamedTuple):
    study: str
    method: str
    base: str
    policy: str
    paper_points: float
    source: str


class Ended(NamedTuple):
    """How a run ended."""

    accuracy: float  # the mean over the last quarter of its rounds
    gain: float  # in the last quarter: from where it begins to the end


class Finding(NamedTuple):
    claim: Claim
    by_seed: dict[int, float]  # points
    p_shown: float  # corrected
    p_refuted: float

    @property
    def verdict(self) -> str:
        if self.p_shown < LEVEL:
            return "shown, smaller" if self.p_refuted < LEVEL else "shown"
        return "refuted" if self.p_refuted < LEVEL else "open"


def with_new(known: Iterable[Row], found: Sequence[Row]) -> list[Row]:
    """Return what was found, and what is known of all other runs, by run; the rows of a run stay in their order."""

    def run_of(row: Row) -> tuple[str, ...]:
        return tuple(row[column] for column in RUN)

    runs = set(map(run_of, found))
    return sorted([*(row for row in known if run_of(row) not in runs), *found], key=run_of)


def rows_of(folder: Path) -> list[Row]:
    """Return the curves of a study, whose folder has its name: one row for each evaluation."""
    rows: list[Row] = []
    for series in series_of(open_runs([folder])):
        for run in (run for run in series.runs if run.finished):
            found = {axis: curve(run, axis, series.shown) for axis in AXES}
            known = {axis: one for axis, one in found.items() if one is not None}
            for place, accuracy in enumerate(known["rounds"].y):
                spent: dict[str, str] = {axis: f"{known[axis].x[place]:.6g}" if axis in known else "" for axis in AXES}
                fixed = (folder.name, series.method, series.policy, str(run.config.seed), series.shown)
                rows.append({**dict(zip(COLUMNS, fixed, strict=False)), "accuracy": f"{accuracy:.5f}", **spent})
    return rows


def ends_of(rows: Iterable[Row]) -> dict[Key, dict[int, Ended]]:
    """Return how each run ended, by seed."""
    curves: dict[Key, dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        seeds = curves.setdefault(Key(row["study"], row["method"], row["policy"]), {})
        seeds.setdefault(int(row["seed"]), []).append((float(row["rounds"]), float(row["accuracy"])))
    return {key: {seed: _end_of(one) for seed, one in seeds.items()} for key, seeds in curves.items()}


def _end_of(one: list[tuple[float, float]]) -> Ended:
    start = (1 - LAST_PART) * max(one)[0]
    last = [accuracy for number, accuracy in sorted(one) if number >= start]
    return Ended(mean(accuracy for number, accuracy in one if number > start), last[-1] - last[0])


def findings(claims: Sequence[Claim], ends: Mapping[Key, Mapping[int, Ended]]) -> list[Finding]:
    """Test every claim whose runs are there, corrected for the number of all claims."""
    tested = []
    for claim in claims:
        own, base = (Key(claim.study, each, claim.policy) for each in (claim.method, claim.base))
        by_seed = {seed: 100 * value for seed, value in differences(ends, own, base).items()}
        if len(by_seed) >= SEEDS:
            sign = 1 if claim.paper_points >= 0 else -1
            turned = [sign * value for value in by_seed.values()]
            above_0 = p_greater(turned)
            below_paper = p_greater([abs(claim.paper_points) - value for value in turned])
            tested.append(Finding(claim, by_seed, above_0, below_paper))
    shown = holm([one.p_shown for one in tested], len(claims))
    refuted = holm([one.p_refuted for one in tested], len(claims))
    return [one._replace(p_shown=a, p_refuted=b) for one, a, b in zip(tested, shown, refuted, strict=True)]


def differences(ends: Mapping[Key, Mapping[int, Ended]], method: Key, base: Key) -> dict[int, float]:
    """Return by how much the method is more accurate than the base, for each seed that both have."""
    own, other = ends.get(method, {}), ends.get(base, {})
    return {seed: own[seed].accuracy - other[seed].accuracy for seed in sorted(own.keys() & other.keys())}


def p_greater(values: Sequence[float]) -> float:
    """Return the p value of the one-sided t test that the mean is greater than 0."""
    deviation = stdev(values)
    if deviation == 0:
        return 0.0 if values[0] > 0 else 1.0
    return float(stdtr(len(values) - 1, -mean(values) * sqrt(len(values)) / deviation))


def holm(p_values: Sequence[float], tests: int) -> list[float]:
    """Correct p values for the number of tests by Holm's method; those that are not here count as if they failed."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (tests - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def table(found: Iterable[Finding]) -> str:
    """Return a row for each difference, with what was found on each data set beside what the paper has."""
    rows: dict[str, dict[str, Finding]] = {}
    for one in found:
        data, setting = SETTINGS[one.claim.study]
        name = f"{NAMES[one.claim.method]} − {NAMES[one.claim.base]}{setting}"
        rows.setdefault(name, {})[data] = one
    sets = list(dict.fromkeys(data for data, _ in SETTINGS.values()))
    lines = [
        f"| difference | {' | '.join(f'{data}: paper | here, 95 % interval | won | verdict' for data in sets)} |",
        f"|---|{'---:|---:|---:|---|' * len(sets)}",
    ]
    for text, by_set in rows.items():
        cells = (cell for data in sets for cell in (_cells(by_set[data]) if data in by_set else ("–",) * 4))
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(one: Finding) -> tuple[str, str, str, str]:
    interval = paired_interval({seed: value / 100 for seed, value in one.by_seed.items()})
    won = sum((value > 0) == (one.claim.paper_points >= 0) for value in one.by_seed.values())
    return (
        points(one.claim.paper_points / 100),
        interval_text(interval),
        f"{won}/{len(one.by_seed)}",
        one.verdict if one.verdict == "open" else f"**{one.verdict}**",
    )


def interval_text(interval: Interval) -> str:
    assert interval.low is not None  # there are enough pairs
    assert interval.high is not None
    return f"{points(interval.mean)} [{points(interval.low)}, {points(interval.high)}]"


def accuracies(ends: Mapping[Key, Mapping[int, Ended]]) -> str:
    """Return the table of all methods, the best of each study first."""
    lines = [
        "| data | method | policy | accuracy, % | gain in the last quarter | seeds |",
        "|---|---|---|---:|---:|---:|",
    ]
    averages = {key: mean(one.accuracy for one in seeds.values()) for key, seeds in ends.items()}
    for key in sorted(ends, key=lambda key: (key.study, -averages[key])):
        values = [100 * one.accuracy for one in ends[key].values()]
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        gain = points(mean(one.gain for one in ends[key].values()))
        lines.append(
            f"| {key.study} | {key.method} | {key.policy} | {mean(values):.1f}{spread} | {gain} | {len(values)} |"
        )
    return "\n".join(lines)


def read_claims(path: Path) -> list[Claim]:
    with path.open(newline="") as file:
        return [
            Claim(row["study"], row["method"], row["base"], row["policy"], float(row["paper_points"]), row["source"])
            for row in csv.DictReader(file)
        ]


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add_rows(path: Path, columns: Sequence[str], found: Sequence[Row]) -> None:
    """Write these rows to a table, in place of those that it has of the same runs."""
    rows = with_new(read_rows(path), found)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["gather", _, *_]:
            add_rows(CURVES, COLUMNS, [row for folder in arguments[1:] for row in rows_of(Path(folder))])
        case ["accuracies"]:
            print(accuracies(ends_of(read_rows(CURVES))))
        case ["verdicts"]:
            print(table(findings(read_claims(HERE / "claims.csv"), ends_of(read_rows(CURVES)))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
