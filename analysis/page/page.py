"""Writes the HTML of the report page; the page itself draws the rest from the payload."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from math import isnan
from statistics import mean
from string import Template

import msgspec

from fleetbed.analysis.page.conditions import conditions
from fleetbed.analysis.page.payload import payload
from fleetbed.analysis.tables.compare import (
    COSTS,
    TITLES,
    Comparison,
    SeriesGroup,
    factor,
    mean_and_deviation,
    paired_text,
    series_title,
    to_target_text,
    unit_of,
)
from fleetbed.analysis.tables.curves import AXES
from fleetbed.analysis.tables.intervals import LEAST_PAIRS
from fleetbed.analysis.tables.notes import cautions
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import runs_of
from fleetbed.analysis.tables.task_metrics import metric_table
from fleetbed.analysis.tables.units import data_bytes, percent, seconds, target_text
from fleetbed.analysis.tables.writing import Table
from fleetbed.emulator.records.metric import ACCURACY
from fleetbed.profiles.files import title_of

SCRIPTS = ("draw.js", "timeline.js", "clients.js", "page.js")


def page(comparison: Comparison) -> str:
    """Return a self-contained page: style, script and data are in it."""
    runs = runs_of(comparison.series)
    data = msgspec.json.encode(payload(comparison)).decode()
    return Template(_asset("report.html")).substitute(
        title=escape(title(runs)),
        lead=escape(_lead(runs, comparison)),
        banners="".join(f'<p class="banner">{escape(text)}</p>' for text in cautions(comparison.series)),
        tiles="".join(_tile(*tile) for tile in _tiles(runs, comparison)),
        metric=escape(runs[0].metric.title.capitalize()),
        axis=escape(f"Test {runs[0].metric.label}"),
        accuracy_note=escape(_accuracy_note(comparison)),
        result_tables="".join(f"<h3>{escape(head)}</h3>{table.html()}" for head, table in results(comparison)),
        conditions=conditions(runs),
        footer=escape(f"Written by fleetbed from {len(runs)} run{_s(runs)}: {', '.join(r.name for r in runs)}."),
        css=_asset("report.css"),
        js="\n".join(_asset(name) for name in SCRIPTS),
        # "<" may end the script element or start a comment in it, even inside a JSON string
        payload=data.replace("<", "\\u003c"),
    )


def title(runs: Sequence[Run]) -> str:
    return " and ".join(dict.fromkeys(run.config.experiment.title for run in runs))


def results(comparison: Comparison) -> list[tuple[str, Table]]:
    """Return, for each series shown, a table of accuracy and one per target; then the metrics of tasks."""
    found = []
    for group in comparison.groups:
        of = f". {series_title(group)}" if len(comparison.groups) > 1 else ""
        found.append((f"{group.metric.title.capitalize()}{of}", _accuracy_table(group)))
        found += [
            (f"Cost to {target_text(target, group.metric)}, and speed-up over {group.base.series.label}{of}", table)
            for target, table in ((target, _target_table(group, target)) for target in group.targets)
        ]
    reported = metric_table(comparison.series)
    return [*found, ("Metrics of tasks", reported)] if reported else found


def _accuracy_table(group: SeriesGroup) -> Table:
    base, unit = group.base.series.label, " (points)" if group.metric is ACCURACY else ""
    return Table(
        ("Method", "Seeds", "Final", "Best", f"Final, difference to {base}{unit}", "Peak memory", "Dropped work"),
        tuple(
            (
                summary.series.label,
                str(len(summary.series.runs)),
                mean_and_deviation(summary.final, group.metric),
                mean_and_deviation(summary.best, group.metric),
                paired_text(summary),
                data_bytes(summary.peak_bytes),
                percent(summary.dropped),
            )
            for summary in group.summaries
        ),
    )


def _target_table(group: SeriesGroup, target: float) -> Table:
    rows = []
    for summary in group.summaries:
        costs = [to_target_text(summary.to_target[target, axis]) for axis in AXES]
        gains = [factor(summary.speed_up(group.base, target, axis)) for axis in COSTS[:3]]
        rows.append((summary.series.label, *costs, *gains))
    columns = [TITLES[axis] for axis in AXES] + [f"{TITLES[axis]}, ratio (×)" for axis in COSTS[:3]]
    return Table(("Method", *columns), tuple(rows))


def _lead(runs: Sequence[Run], comparison: Comparison) -> str:
    experiment = runs[0].config.experiment
    methods = ", ".join(one.label for one in comparison.series)
    seeds = sorted({run.config.seed for run in runs})
    kinds = len({client.device for client in runs[0].clients})
    partition = experiment.data.partition
    families = ", ".join(dict.fromkeys(title_of(run.config.model.family) for run in runs))
    skew = f" {partition.alpha:g}" if partition.kind == "dirichlet" else ""
    return (
        f"{methods} on {len(runs[0].clients)} clients with {kinds} kind{_s(range(kinds))} of device "
        f"(fleet {experiment.fleet}), {experiment.rounds} rounds, seed{_s(seeds)} {', '.join(map(str, seeds))}. "
        f"Data: {experiment.data.name}, partition {partition.kind}{skew}; models: {families}; "
        f"policy: {', '.join(dict.fromkeys(run.config.policy.kind for run in runs))}; "
        f"timing: {experiment.timing.source}."
    )


def _tiles(runs: Sequence[Run], comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the tiles: heading, figure, and an explanation of the figure."""
    tiles = [tile for group in comparison.groups for tile in _group_tiles(group, len(comparison.groups) > 1)]
    fit = sum(client.variant is not None for client in runs[0].clients)
    unfit = len(runs[0].clients) - fit
    tiles.append(("Clients training", str(fit), f"{unfit} unfit" if unfit else "none unfit"))
    host = sum(run.rounds[-1].host_end_s for run in runs if run.rounds)
    tiles.append(
        ("Emulated device time", seconds(sum(run.device_s for run in runs)), f"in {seconds(host)} of host time")
    )
    return tiles


def _group_tiles(group: SeriesGroup, several: bool) -> list[tuple[str, str, str]]:
    """Return tiles for the best and the fastest of the methods that can be compared."""
    tiles = []
    of = f", {group.shown}" if several else ""
    # the mean is NaN for a method that diverged with any seed, which then cannot be the best
    ranked = [one for one in group.summaries if one.final and not isnan(mean(one.final.values()))]
    if ranked:
        choose = max if group.metric.higher_is_better else min
        best = choose(ranked, key=lambda summary: mean(summary.final.values()))
        figure = mean_and_deviation(best.final, group.metric)
        tiles.append((f"Best final {group.metric.title}{of}", figure, best.series.label))
    for target in group.targets[:1]:
        there = [summary for summary in group.summaries if summary.to_target[target, "time"].always]
        if there:
            first = min(there, key=lambda summary: mean(summary.to_target[target, "time"].reached))
            gain = first.speed_up(group.base, target, "time")
            over = f", {factor(gain)} as fast as {group.base.series.label}" if gain and first is not group.base else ""
            time = to_target_text(first.to_target[target, "time"])
            tiles.append((f"Fastest to {target_text(target, group.metric)}{of}", time, first.series.label + over))
    return tiles


def _tile(head: str, figure: str, of: str) -> str:
    return f"<div><dt>{escape(head)}</dt><dd>{escape(figure)}</dd><dd>{escape(of)}</dd></div>"


def _accuracy_note(comparison: Comparison) -> str:
    several, metric = any(len(one.runs) > 1 for one in comparison.series), comparison.series[0].metric
    spread_note = (
        f" Lines are means over seeds, bands one standard deviation. Differences are in {unit_of(metric)}, paired by "
        f"seed: mean and 95 % t interval with {LEAST_PAIRS} or more pairs, the difference of each pair with fewer."
    )
    return (
        "Mean over the evaluated models. Device time is the time on the devices' own clock; "
        f"evaluation takes none of it.{spread_note if several else ''}"
    )


def _asset(name: str) -> str:
    return (files("fleetbed.analysis.page") / "assets" / name).read_text(encoding="utf-8")


def _s(many: Sequence[object] | range) -> str:
    return "" if len(many) == 1 else "s"
