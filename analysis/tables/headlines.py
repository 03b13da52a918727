"""Answers to a reader's first questions: which method ends best, which is fastest, what the slowest board costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import mean

from fleetbed.analysis.tables.compare import Comparison, SeriesGroup
from fleetbed.analysis.tables.series import Series
from fleetbed.analysis.tables.stragglers import round_costs, rounds_without
from fleetbed.analysis.tables.summary_table import cost_text, mean_and_deviation, speed_up_text
from fleetbed.analysis.tables.units import seconds, target_text

MOST_TARGETS = 2  # that have a headline of their own
WORTH_SAYING = 0.99  # a round that would take this part of its time without a kind of board, or more, waits for none


@dataclass(frozen=True)
class Headline:
    """A figure with its title, and the method or the board that it belongs to."""

    title: str
    figure: str
    of: str

    def __str__(self) -> str:
        return f"{self.title}: {self.figure} ({self.of})"


def headlines(comparison: Comparison) -> list[Headline]:
    several = len(comparison.groups) > 1
    found = [line for group in comparison.groups for line in _leaders(group, f", {group.shown}" if several else "")]
    slowest = slowest_board(comparison.groups[0].base.series)
    return found if slowest is None else [*found, slowest]


def _leaders(group: SeriesGroup, of: str) -> list[Headline]:
    """Return the best and the fastest of the methods that can be compared."""
    found = []
    # the mean is NaN for a method that diverged with any seed, which then cannot be the best
    ranked = [one for one in group.summaries if one.final and not isnan(mean(one.final.values()))]
    if ranked:
        choose = max if group.metric.higher_is_better else min
        best = choose(ranked, key=lambda summary: mean(summary.final.values()))
        figure = mean_and_deviation(best.final, group.metric)
        found.append(Headline(f"Best final {group.metric.title}{of}", figure, best.series.label))
    for target in group.targets[:MOST_TARGETS]:
        there = [summary for summary in group.summaries if summary.to_target[target, "time"].always]
        if there:
            first = min(there, key=lambda summary: mean(summary.to_target[target, "time"].reached))
            gain = first.speed_up(group.base, target, "time")
            by = speed_up_text(first, group.base, target, "time")
            over = f"; speed-up {by} over {group.base.series.label}" if gain and first is not group.base else ""
            time = cost_text(first, group, target, "time")
            title = f"Fastest to {target_text(target, group.metric)}{of}"
            found.append(Headline(title, time, first.series.label + over))
    return found


def slowest_board(series: Series) -> Headline | None:
    """Return the mean duration of a round, and that without the kind of device that it waits for the longest.

    None if no kind can be spared, or if the rounds wait for none.
    """
    costs = [cost.duration_s for run in series.runs for cost in round_costs(run)]
    without = _mean_by_kind([rounds_without(run) for run in series.runs])
    if not costs or not without:
        return None
    kind = min(without, key=without.__getitem__)
    if without[kind] >= WORTH_SAYING * mean(costs):
        return None
    return Headline(f"A round of {series.label}", seconds(mean(costs)), f"{seconds(without[kind])} without {kind}")


def _mean_by_kind(by_run: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean over runs, for the kinds of device that can be spared in all of them."""
    kinds = [kind for kind in by_run[0] if all(kind in found for found in by_run)] if by_run else []
    return {kind: mean(found[kind] for found in by_run) for kind in kinds}
