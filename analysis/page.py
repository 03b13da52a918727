"""The report's page: what is written into the HTML, beside what the page draws by itself from the payload."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

import msgspec

from fleetbed.analysis.compare import (
    COSTS,
    TITLES,
    Comparison,
    difference_text,
    factor,
    spread,
    to_target_text,
)
from fleetbed.analysis.conditions import conditions
from fleetbed.analysis.curves import AXES
from fleetbed.analysis.payload import payload
from fleetbed.analysis.runs import Run
from fleetbed.analysis.study import differences
from fleetbed.analysis.tables import Table
from fleetbed.analysis.units import data_bytes, percent, seconds, target_text

SCRIPTS = ("draw.js", "timeline.js", "clients.js", "page.js")


def page(comparison: Comparison) -> str:
    """One file that needs no other: style, script and data are inside."""
    series = [summary.series for summary in comparison.summaries]
    runs = [run for one in series for run in one.runs]
    data = msgspec.json.encode(payload(series, comparison.targets)).decode()
    return Template(_asset("report.html")).substitute(
        title=escape(title(runs)),
        lead=escape(_lead(runs, comparison)),
        banners="".join(f'<p class="banner">{escape(text)}</p>' for text in warnings(runs)),
        tiles="".join(_tile(*tile) for tile in _tiles(runs, comparison)),
        accuracy_note=escape(_accuracy_note(comparison)),
        result_tables="".join(f"<h3>{escape(head)}</h3>{table.html()}" for head, table in results(comparison)),
        conditions=conditions(runs),
        footer=escape(f"Written by fleetbed from {len(runs)} run{_s(runs)}: {', '.join(r.name for r in runs)}."),
        css=_asset("report.css"),
        js="\n".join(_asset(name) for name in SCRIPTS),
        # "</" would end the script element, whatever JSON says
        payload=data.replace("</", "<\\/"),
    )


def title(runs: Sequence[Run]) -> str:
    return " and ".join(dict.fromkeys(run.config.experiment.title for run in runs))


def warnings(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before believing a figure."""
    found = list(differences(runs).values())
    found += [f"{run.name} is {run.state}. It is shown as far as it went." for run in runs if not run.finished]
    degraded = [run.name for run in runs if run.meta.get("degraded")]
    if degraded:
        found.append(
            f"Device times of {', '.join(degraded)} are degraded: the host could not keep the pace of the plan "
            "(the 95th percentile of measured over planned compute is above 1.05)."
        )
    return found


def results(comparison: Comparison) -> list[tuple[str, Table]]:
    """Accuracy, then a table per target."""
    base = comparison.base
    accuracy = Table(
        ("Method", "Seeds", "Final", "Best", f"Final, to {base.series.label}", "Peak memory", "Dropped work"),
        tuple(
            (
                summary.series.label,
                str(len(summary.series.runs)),
                spread(summary.final),
                spread(summary.best),
                difference_text(summary.difference),
                data_bytes(summary.peak_bytes),
                percent(summary.dropped),
            )
            for summary in comparison.summaries
        ),
    )
    found = [("Accuracy reached", accuracy)]
    for target in comparison.targets:
        rows = []
        for summary in comparison.summaries:
            costs = [to_target_text(summary.to_target[target, axis]) for axis in AXES]
            gains = [factor(summary.speed_up(base, target, axis)) for axis in COSTS[:3]]
            rows.append((summary.series.label, *costs, *gains))
        columns = [TITLES[axis] for axis in AXES] + [f"{TITLES[axis]}, times less" for axis in COSTS[:3]]
        head = f"To reach {target_text(target)}, and how many times less than {base.series.label}"
        found.append((head, Table(("Method", *columns), tuple(rows))))
    return found


def _lead(runs: Sequence[Run], comparison: Comparison) -> str:
    experiment = runs[0].config.experiment
    methods = ", ".join(summary.series.label for summary in comparison.summaries)
    seeds = sorted({run.config.seed for run in runs})
    kinds = len({client.device for client in runs[0].clients})
    partition = experiment.data.partition
    skew = f" {partition.alpha:g}" if partition.kind == "dirichlet" else ""
    return (
        f"{methods} on {len(runs[0].clients)} clients of {kinds} kind{_s(range(kinds))} "
        f"(fleet {experiment.fleet}), {experiment.rounds} rounds, seed{_s(seeds)} {', '.join(map(str, seeds))}. "
        f"Data: {experiment.data.name}, partition {partition.kind}{skew}; models: {experiment.model.family}; "
        f"policy: {', '.join(dict.fromkeys(run.config.policy.kind for run in runs))}; "
        f"timing: {experiment.timing.source}."
    )


def _tiles(runs: Sequence[Run], comparison: Comparison) -> list[tuple[str, str, str]]:
    """Heading, figure, and what the figure is of."""
    tiles = []
    ranked = [summary for summary in comparison.summaries if summary.final]
    if ranked:
        best = max(ranked, key=lambda summary: sum(summary.final.values()) / len(summary.final))
        tiles.append(("Best final accuracy", spread(best.final), best.series.label))
    for target in comparison.targets[:1]:
        there = [summary for summary in comparison.summaries if summary.to_target[target, "time"].always]
        if there:
            first = min(there, key=lambda summary: sum(summary.to_target[target, "time"].reached))
            gain = first.speed_up(comparison.base, target, "time")
            over = f", {factor(gain)} {comparison.base.series.label}" if gain and first is not comparison.base else ""
            time = to_target_text(first.to_target[target, "time"])
            tiles.append((f"Fastest to {target_text(target)}", time, first.series.label + over))
    fit = sum(client.variant is not None for client in runs[0].clients)
    unfit = len(runs[0].clients) - fit
    tiles.append(("Clients that train", str(fit), f"{unfit} unfit" if unfit else "none unfit"))
    host = sum(run.rounds[-1].host_end_s for run in runs if run.rounds)
    tiles.append(("Device time emulated", seconds(sum(run.device_s for run in runs)), f"in {seconds(host)} here"))
    return tiles


def _tile(head: str, figure: str, of: str) -> str:
    return f"<div><dt>{escape(head)}</dt><dd>{escape(figure)}</dd><dd>{escape(of)}</dd></div>"


def _accuracy_note(comparison: Comparison) -> str:
    several = any(len(summary.series.runs) > 1 for summary in comparison.summaries)
    spread_note = " Lines are means over seeds, bands one standard deviation." if several else ""
    return (
        "Mean over the evaluated models. Device time is the time as the devices would have lived it; "
        f"measuring accuracy takes none of it.{spread_note}"
    )


def _asset(name: str) -> str:
    return (files("fleetbed.analysis") / "assets" / name).read_text(encoding="utf-8")


def _s(many: Sequence[object] | range) -> str:
    return "" if len(many) == 1 else "s"
