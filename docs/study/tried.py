"""What was tried where a claim was not shown:  python docs/study/tried.py    # from curves.csv and tried.csv alone

Differences in one seed, with the plain 95 % t interval. They were made after the verdicts and decide none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from claims import CURVES, Ended, Key, Row, differences, ends_of, read_rows

from fleetbed.analysis.tables.intervals import Interval, difference_text, paired_interval

TRIED = Path(__file__).with_name("tried.csv")


def difference(row: Row, ends: Mapping[Key, Mapping[int, Ended]]) -> Interval | None:
    """Return the paired difference of the two methods; None if they have no seed in common."""
    by_seed = differences(ends, Key(row["study"], row["method"], "sync"), Key(row["base_study"], row["base"], "sync"))
    return paired_interval(by_seed) if by_seed else None


def table(tried: Iterable[Row], ends: Mapping[Key, Mapping[int, Ended]]) -> str:
    lines = ["| claim | tried | data | points |", "|---|---|---|---:|"]
    for row in tried:
        if (found := difference(row, ends)) is not None:
            lines.append(f"| {row['claim']} | {row['what']} | {row['data']} | {difference_text(found)} |")
    return "\n".join(lines)


def main() -> None:
    print(table(read_rows(TRIED), ends_of(read_rows(CURVES))))


if __name__ == "__main__":
    main()
