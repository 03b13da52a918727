"""What it costs not to wait for the slowest board:  python docs/study/policies.py    # the table, from curves.csv alone

Differences to `sync` in the same seed, over the last quarter of the rounds, with the plain 95 % t interval, and the
device time of the whole run as a part of that under `sync`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from claims import CURVES, NAMES, Ended, Key, Row, differences, ends_of, interval_text, read_rows

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


def ends_at(rows: Iterable[Row]) -> dict[Key, dict[int, float]]:
    """Return the device time at which each run ended, by seed."""
    found: dict[Key, dict[int, float]] = {}
    for row in rows:
        seeds = found.setdefault(Key(row["study"], row["method"], row["policy"]), {})
        seed = int(row["seed"])
        seeds[seed] = max(seeds.get(seed, 0.0), float(row["time"]))
    return found


def table(ends: Mapping[Key, Mapping[int, Ended]], times: Mapping[Key, Mapping[int, float]]) -> str:
    lines = [f"| method | sync | {' | '.join(POLICIES)} |", f"|---|{'---:|' * (1 + len(POLICIES))}"]
    for method, study in STUDIES.items():
        base = Key(SYNC, method, "sync")
        whole = f"{100 * mean(one.accuracy for one in ends[base].values()):.1f} % in {mean(times[base].values()):.0f} s"
        cells = (_cell(Key(study, method, policy), base, ends, times) for policy in POLICIES)
        lines.append(f"| {NAMES[method]} | {whole} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(
    key: Key, base: Key, ends: Mapping[Key, Mapping[int, Ended]], times: Mapping[Key, Mapping[int, float]]
) -> str:
    if key not in ends:
        return "–"
    by_seed = differences(ends, key, base)
    share = mean(times[key][seed] / times[base][seed] for seed in by_seed)
    return f"{interval_text(paired_interval(by_seed))} in {share:.0%}"


def main() -> None:
    rows = read_rows(CURVES)
    print(table(ends_of(rows), ends_at(rows)))


if __name__ == "__main__":
    main()
