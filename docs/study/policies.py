"""What it costs not to wait for the slowest board:  python docs/study/policies.py    # the table, from curves.csv alone

Differences to `sync` in the same seed, over the last quarter of the rounds, with the plain 95 % t interval, and the
device time of the whole run as a part of that under `sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from claims import CURVES, NAMES, Key, Row, differences, ends_of, interval_text, read_rows
from orders import Curves, curves_of, ratio

from fleetbed.analysis.tables.intervals import paired_interval

SYNC = "fashion"  # the study whose runs are those under `sync`
#: the study that has the methods of the four papers under the other policies
STUDIES = {
    "heteroavg": "policies",
    "fedin": "policies",
    "inco-heteroavg": "policies",
    "fedhe": "policies",
    "fedhenn": "policies-fedhenn",
}
POLICIES = ("deadline", "async", "buffered")


def curves_by_policy(rows: Sequence[Row]) -> dict[str, Curves]:
    """Return the curves of the methods that run under each policy, `sync` first."""
    found = {"sync": curves_of(rows, SYNC)}
    for policy in POLICIES:
        there = {study: curves_of(rows, study, policy) for study in set(STUDIES.values())}
        found[policy] = {method: there[study][method] for method, study in STUDIES.items() if method in there[study]}
    return found


def table(rows: Sequence[Row]) -> str:
    ends, by_policy = ends_of(rows), curves_by_policy(rows)
    sync = by_policy["sync"]

    def cell(method: str, policy: str) -> str:
        if method not in by_policy[policy]:
            return "–"
        by_seed = differences(ends, Key(STUDIES[method], method, policy), Key(SYNC, method, "sync"))
        share = ratio(by_policy[policy][method], sync[method], "time")
        return f"{interval_text(paired_interval(by_seed))} in {share:.0%}"

    lines = [f"| method | sync | {' | '.join(POLICIES)} |", f"|---|{'---:|' * (1 + len(POLICIES))}"]
    for method in STUDIES:
        accuracy = mean(one.accuracy for one in ends[Key(SYNC, method, "sync")].values())
        time_s = mean(float(curve[-1]["time"]) for curve in sync[method].values())
        cells = (f"{100 * accuracy:.1f} % in {time_s:.0f} s", *(cell(method, policy) for policy in POLICIES))
        lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    print(table(read_rows(CURVES)))


if __name__ == "__main__":
    main()
