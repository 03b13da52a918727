"""Is the order of the methods another one when they have spent the same, instead of made as many rounds?

    python docs/study/orders.py    # the tables, from curves.csv alone

The cost is what HeteroAvg spends in all its rounds. For a method that spends more or less in as many, fitted.py has
made runs of their own with the number of rounds that comes closest. Without those a method that spends less is taken at
its end. Accuracies are means over the last quarter of the rounds, as for the claims, and over the seeds that all
methods of the column have. Kendall's tau compares the order by the means with that at equal rounds. A pair is
*reversed* if one method is better at equal rounds and the other at equal cost, and both 95 % intervals of the paired
differences exclude 0; they are not corrected for the number of pairs. FedHe and training alone have personal models,
which is another task, so that they are in no pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import NamedTuple

from claims import CURVES, NAMES, Key, Row, ends_of, interval_text, read_rows
from scipy.stats import kendalltau

from fleetbed.analysis.tables.intervals import Interval, paired_interval

BASE = "heteroavg"
BUDGETS = {"rounds": "rounds", "time": "device time", "bytes": "bytes", "joules": "energy"}
TITLES = {"cifar10": "CIFAR-10", "fashion": "Fashion-MNIST"}
#: The methods that are compared, all tested on the whole test set.
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
PERSONAL = ("fedhe", "private")
SAME = 1.02  # who spends at most so many times as much as the other spends the same

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


def spent(curves: Curves, method: str, axis: str) -> float:
    """Return what the method spends in all its rounds, relative to the base, as a mean over the seeds."""
    return ratio(curves[method], curves[BASE], axis)


def ratio(own: Mapping[int, Sequence[Row]], base: Mapping[int, Sequence[Row]], axis: str) -> float:
    """Return what one method has spent at the end of its runs relative to the other, as a mean over their seeds."""
    return mean(float(own[seed][-1][axis]) / float(base[seed][-1][axis]) for seed in own.keys() & base.keys())


def same(share: float) -> bool:
    return 1 / SAME <= share <= SAME


def by_cost(rows: Sequence[Row], study: str) -> dict[str, Reached]:
    """Return what each method has reached at each kind of equal cost for which all runs are there."""
    curves = {method: by_seed for method, by_seed in curves_of(rows, study).items() if method in METHODS}
    if BASE not in curves:
        return {}
    ends = ends_of(rows)

    def end(method: str, axis: str) -> dict[int, float]:
        whole, fitted = (ends.get(Key(name, method, "sync"), {}) for name in (study, f"{study}-{axis}"))
        share = 1.0 if axis == "rounds" else spent(curves, method, axis)
        found = whole if same(share) or (share < 1 and not fitted) else fitted
        return {seed: one.accuracy for seed, one in found.items()}

    reached = {axis: {method: end(method, axis) for method in curves} for axis in BUDGETS}
    common = {axis: of_common_seeds(accuracies) for axis, accuracies in reached.items()}
    return {axis: accuracies for axis, accuracies in common.items() if all(accuracies.values())}


def of_common_seeds(accuracies: Reached) -> Reached:
    """Return the accuracies of those seeds alone that every method has, so that means can be compared."""
    common = set.intersection(*map(set, accuracies.values()))
    return {method: {seed: by_seed[seed] for seed in sorted(common)} for method, by_seed in accuracies.items()}


def means(accuracies: Reached) -> dict[str, float]:
    return {method: mean(by_seed.values()) for method, by_seed in accuracies.items()}


def difference(accuracies: Reached, first: str, second: str) -> Interval:
    one, other = accuracies[first], accuracies[second]
    return paired_interval({seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())})


def compared(by_rounds: Reached) -> list[str]:
    """Return the methods whose order is compared, the best first."""
    shared = (method for method in by_rounds if method not in PERSONAL)
    return sorted(shared, key=lambda method: -mean(by_rounds[method].values()))


def reversals(by_rounds: Reached, at_cost: Reached) -> list[Reversal]:
    """Return the pairs whose order is reversed."""
    found = []
    for first, second in combinations(compared(by_rounds), 2):
        lead, lag = (difference(accuracies, first, second) for accuracies in (by_rounds, at_cost))
        if lead.low is not None and lead.low > 0 and lag.high is not None and lag.high < 0:
            found.append(Reversal(first, second, lead, lag))
    return found


def tau(by_rounds: Reached, at_cost: Reached) -> float:
    one, other = means(by_rounds), means(at_cost)
    methods = compared(by_rounds)
    return float(kendalltau([one[method] for method in methods], [other[method] for method in methods]).statistic)


def order_table(title: str, by_axis: Mapping[str, Reached]) -> str:
    """Return the accuracy of each method by what is equal, and tau below them."""
    by_rounds, averages = by_axis["rounds"], {axis: means(accuracies) for axis, accuracies in by_axis.items()}
    lines = [
        f"| {title} | {' | '.join(f'equal {BUDGETS[axis]}' for axis in by_axis)} |",
        f"|---|{'---:|' * len(by_axis)}",
    ]
    for method in sorted(by_rounds, key=lambda name: -averages["rounds"][name]):
        cells = (f"{100 * one[method]:.1f} %" for one in averages.values())
        lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    taus = (f"{tau(by_rounds, accuracies):.2f}" for accuracies in by_axis.values())
    lines.append(f"| Kendall's tau | {' | '.join(taus)} |")
    seeds = (str(len(accuracies[BASE])) for accuracies in by_axis.values())
    lines.append(f"| Seeds | {' | '.join(seeds)} |")
    return "\n".join(lines)


def reversal_table(title: str, by_axis: Mapping[str, Reached]) -> str:
    lines = [
        f"| {title}, reversed at | better at equal rounds | better there | lead at equal rounds | there |",
        "|---|---|---|---:|---:|",
    ]
    for axis, accuracies in by_axis.items():
        for one in reversals(by_axis["rounds"], accuracies):
            names, found = (NAMES[one.first], NAMES[one.second]), (interval_text(one.lead), interval_text(one.lag))
            lines.append(f"| {' | '.join((f'equal {BUDGETS[axis]}', *names, *found))} |")
    return "\n".join(lines)


def main() -> None:
    rows = read_rows(CURVES)
    for study, title in TITLES.items():
        if by_axis := by_cost(rows, study):
            print(order_table(title, by_axis), reversal_table(title, by_axis), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
