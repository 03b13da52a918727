"""Differences paired by seed: their mean and its confidence interval, or the differences if there are few."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

CONFIDENCE = 0.95
LEAST_PAIRS = 3  # with fewer an interval means next to nothing, so that the differences are listed


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float | None  # None with fewer than LEAST_PAIRS pairs
    high: float | None
    by_seed: dict[int, float]

    @property
    def pairs(self) -> int:
        return len(self.by_seed)


def paired_interval(by_seed: Mapping[int, float]) -> Interval:
    """Return the mean of one or more differences, and its 95 % interval by Student's t.

    A bootstrap of so few pairs is far too narrow: three pairs have only 27 resamples, whose interval covers the true
    mean in three quarters of all cases.
    """
    values = list(by_seed.values())
    middle = mean(values)
    if len(values) < LEAST_PAIRS:
        return Interval(middle, None, None, dict(by_seed))
    from scipy.special import stdtrit  # slow to import, and few commands need it

    reach = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / sqrt(len(values))
    return Interval(middle, middle - reach, middle + reach, dict(by_seed))


def points(value: float) -> str:
    """Format a difference of accuracies in percentage points."""
    return f"{100 * value:+.1f}".replace("-", "−")


def signed(value: float) -> str:
    """Format a difference of errors in the unit of the labels."""
    return f"{value:+.3g}".replace("-", "−")


def difference_text(interval: Interval, points: Callable[[float], str] = points) -> str:
    """Format an interval, always with the number of pairs."""
    pairs = f"({interval.pairs} pair{'' if interval.pairs == 1 else 's'})"
    if interval.low is None or interval.high is None:
        return f"{', '.join(map(points, interval.by_seed.values()))} {pairs}"
    return f"{points(interval.mean)} [{points(interval.low)}, {points(interval.high)}] {pairs}"
