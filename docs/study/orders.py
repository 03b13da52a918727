"""Is the order of the methods another one when they have spent the same, instead of made as many rounds?

    python docs/study/orders.py    # the tables, from curves.csv alone

A method's accuracy at equal cost is what it has reached when it has spent what HeteroAvg spends in all its rounds with
the same seed, on the straight line between two evaluations. A method that needs less is taken at its end. "Rounds
fitted" are runs of their own (fitted.py), for as many rounds as fit into HeteroAvg's device time. Kendall's tau
compares the order by the means with that at equal rounds. A pair is *reversed* if one method is better at equal rounds
and the other at equal cost, and both 95 % intervals of the paired differences exclude 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import NamedTuple

import numpy as np
from claims import CURVES, NAMES, Row, read_rows
from scipy.stats import kendalltau

from fleetbed.analysis.tables.intervals import Interval, paired_interval, points

BASE = "heteroavg"
BUDGETS = {"rounds": "rounds", "time": "device time", "bytes": "bytes", "joules": "energy"}
FITTED = "fitted"  # equal device time, by runs of as many rounds as fit into it
COLUMNS = {**{axis: f"equal {name}" for axis, name in BUDGETS.items()}, FITTED: "equal device time, rounds fitted"}
TITLES = {"cifar10": "CIFAR-10", "fashion": "Fashion-MNIST"}
#: The methods that are compared, all tested on the whole test set. FedHe and training alone have personal models.
METHODS = (
    "heteroavg",
    "fedin",
    "inco-heteroavg",
    "heteroprox",
    "all-large",
    "inclusivefl",
    "moon",
    "scaffold",
    "heterofl",
    "fedavg",
    "all-small",
    "fedhe",
    "private",
)

Curves = dict[str, dict[int, list[Row]]]  # by method and seed, in the order of the rounds
Reached = dict[str, dict[int, float]]  # accuracies by method and seed


class Reversal(NamedTuple):
    first: str  # better at equal rounds
    second: str  # better at equal cost
    lead: Interval  # of the first at equal rounds
    lag: Interval  # of the first at equal cost: below 0


def curves_of(rows: Iterable[Row], study: str, policy: str = "sync") -> Curves:
    found: Curves = {}
    for row in rows:
        if (row["study"], row["policy"]) == (study, policy):
            found.setdefault(row["method"], {}).setdefault(int(row["seed"]), []).append(row)
    for by_seed in found.values():
        for curve in by_seed.values():
            curve.sort(key=lambda row: float(row["rounds"]))
    return found


def reached(curve: Sequence[Row], axis: str, budget: float) -> float:
    """Return the accuracy that the budget pays for."""
    spent, accuracies = ([float(row[column]) for row in curve] for column in (axis, "accuracy"))
    return float(np.interp(budget, spent, accuracies))


def at_equal_cost(curves: Curves, axis: str) -> Reached:
    """Return what each method has reached when it has spent what the base spends in all its rounds, in each seed."""
    budgets = {seed: float(curve[-1][axis]) for seed, curve in curves[BASE].items()}
    found = {
        method: {seed: reached(curve, axis, budgets[seed]) for seed, curve in by_seed.items() if seed in budgets}
        for method, by_seed in curves.items()
    }
    return {method: by_seed for method, by_seed in found.items() if by_seed}


def by_cost(rows: Sequence[Row], study: str) -> dict[str, Reached]:
    """Return what each method has reached at each kind of equal cost; nothing if the base has no runs."""
    curves = {method: by_seed for method, by_seed in curves_of(rows, study).items() if method in METHODS}
    if BASE not in curves:
        return {}
    found = {axis: at_equal_cost(curves, axis) for axis in BUDGETS}
    if fitted := curves_of(rows, f"{study}-{FITTED}"):
        ends = {m: {seed: float(curve[-1]["accuracy"]) for seed, curve in one.items()} for m, one in fitted.items()}
        # a method that takes as long as the base has no other number of rounds
        found[FITTED] = {method: {**by_seed, **ends.get(method, {})} for method, by_seed in found["time"].items()}
    return found


def means(accuracies: Reached) -> dict[str, float]:
    return {method: mean(by_seed.values()) for method, by_seed in accuracies.items()}


def difference(accuracies: Reached, first: str, second: str) -> Interval:
    one, other = accuracies[first], accuracies[second]
    return paired_interval({seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())})


def reversals(by_rounds: Reached, by_cost: Reached) -> list[Reversal]:
    """Return the pairs whose order is reversed."""
    order = sorted(by_rounds, key=lambda method: -mean(by_rounds[method].values()))
    found = []
    for first, second in combinations(order, 2):
        lead, lag = (difference(accuracies, first, second) for accuracies in (by_rounds, by_cost))
        if lead.low is not None and lead.low > 0 and lag.high is not None and lag.high < 0:
            found.append(Reversal(first, second, lead, lag))
    return found


def tau(by_rounds: Reached, by_cost: Reached) -> float:
    one, other = means(by_rounds), means(by_cost)
    return float(kendalltau([one[method] for method in one], [other[method] for method in one]).statistic)


def order_table(title: str, by_axis: Mapping[str, Reached]) -> str:
    """Return the accuracy and the rank of each method by what is equal, and tau below them."""
    by_rounds, averages = by_axis["rounds"], {axis: means(accuracies) for axis, accuracies in by_axis.items()}
    lines = [
        f"| {title} | {' | '.join(f'equal {BUDGETS[axis]}' for axis in by_axis)} |",
        f"|---|{'---:|' * len(by_axis)}",
    ]
    for method in sorted(by_rounds, key=lambda name: -averages["rounds"][name]):
        cells = (f"{100 * one[method]:.1f} % ({_rank(one, method)})" for one in averages.values())
        lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    taus = (f"{tau(by_rounds, accuracies):.2f}" for accuracies in by_axis.values())
    lines.append(f"| Kendall's tau | {' | '.join(taus)} |")
    return "\n".join(lines)


def reversal_table(title: str, by_axis: Mapping[str, Reached]) -> str:
    lines = [
        f"| {title}, reversed at | better at equal rounds | better there | lead at equal rounds | there |",
        "|---|---|---|---:|---:|",
    ]
    for axis, accuracies in by_axis.items():
        for one in reversals(by_axis["rounds"], accuracies):
            cells = (COLUMNS[axis], NAMES[one.first], NAMES[one.second], _text(one.lead), _text(one.lag))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rank(averages: Mapping[str, float], method: str) -> int:
    return 1 + sum(other > averages[method] for other in averages.values())


def _text(interval: Interval) -> str:
    assert interval.low is not None  # only such pairs are reversed
    assert interval.high is not None
    return f"{points(interval.mean)} [{points(interval.low)}, {points(interval.high)}]"


def main() -> None:
    rows = read_rows(CURVES)
    for study, title in TITLES.items():
        if by_axis := by_cost(rows, study):
            print(order_table(title, by_axis), reversal_table(title, by_axis), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
