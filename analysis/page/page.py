"""Writes the HTML of the report page; the page itself draws the rest from the payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

from fleetbed.analysis.page.conditions import conditions
from fleetbed.analysis.page.payload import payload
from fleetbed.analysis.tables.compare import Comparison, SeriesGroup
from fleetbed.analysis.tables.headlines import headlines
from fleetbed.analysis.tables.intervals import LEAST_PAIRS
from fleetbed.analysis.tables.metrics import metric_table
from fleetbed.analysis.tables.notes import cautions
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import names_of_studies, runs_of
from fleetbed.analysis.tables.summary_table import series_title, summary_table
from fleetbed.analysis.tables.units import seconds, target_text
from fleetbed.analysis.tables.writing import Table
from fleetbed.emulator.records.metric import Metric
from fleetbed.profiles.files import title_of
from fleetbed.profiles.yaml_text import plain

SCRIPTS = ("draw.js", "timeline.js", "resources.js", "clients.js", "page.js")
PARTS = (
    "title",
    "lead",
    "banners",
    "tiles",
    "metric",
    "axis",
    "accuracy_note",
    "result_tables",
    "fleet_note",
    "conditions",
    "footer",
)
SCORES = ("seeds", "final", "best", "difference", "memory", "tightest", "dropped")
COSTS = ("time", "speed-up", "rounds", "bytes", "bytes-saved", "energy", "energy-saved", "flops")


def page(comparison: Comparison) -> str:
    """Return a self-contained page: style, script and data are in it."""
    return document(parts(comparison), payload(comparison))


def document(written: Mapping[str, str], data: Any, live: bool = False) -> str:
    """Put the parts and the data of a page together. A live page asks its own server for newer ones."""
    return Template(_asset("report.html")).substitute(
        dict.fromkeys(PARTS, "") | dict(written),
        connect="connect-src 'self'" if live else "connect-src 'none'",
        live=_asset("live.html") if live else "",
        css=_asset("report.css"),
        js="\n".join(_asset(name) for name in (*SCRIPTS, "live.js" if live else "start.js")),
        # "<" may end the script element or start a comment in it, even inside a JSON string
        payload=msgspec.json.encode(data).decode().replace("<", "\\u003c"),
    )


def parts(comparison: Comparison) -> dict[str, str]:
    """Return the parts of the page that are written here, as HTML by name."""
    runs = runs_of(comparison.series)
    return {
        "title": escape(title(runs)),
        "lead": escape(_lead(runs, comparison)),
        "banners": "".join(f'<p class="banner">{escape(text)}</p>' for text in cautions(comparison.series)),
        "tiles": "".join(_tile(*tile) for tile in _tiles(runs, comparison)),
        "metric": escape(runs[0].metric.title.capitalize()),
        "axis": escape(_axis(runs[0].metric)),
        "accuracy_note": escape(_accuracy_note(comparison)),
        "result_tables": "".join(f"<h3>{escape(head)}</h3>{table.html()}" for head, table in results(comparison)),
        "fleet_note": escape(_fleet_note(runs)),
        "conditions": conditions(runs),
        "footer": escape(f"Written by fleetbed from {len(runs)} run{_s(runs)}: {', '.join(r.name for r in runs)}."),
    }


def _axis(metric: Metric) -> str:
    return f"Test {metric.label} against device time{'' if metric.higher_is_better else '; lower is better'}"


def title(runs: Sequence[Run]) -> str:
    """Return the titles of the studies; studies with the same title are named by their folders."""
    names = names_of_studies(runs)
    titles = dict.fromkeys(run.config.experiment.title for run in runs)
    if len(titles) == len(names):
        return " and ".join(titles)
    return f"{' and '.join(titles)} ({', '.join(plain(study.name) for study in names)})"


def results(comparison: Comparison) -> list[tuple[str, Table]]:
    """Return, for each series shown, a table of accuracy and one per target; then the metrics of tasks."""
    found = []
    for group in comparison.groups:
        of = f". {series_title(group)}" if len(comparison.groups) > 1 else ""
        found.append((f"{group.metric.title.capitalize()}{of}", summary_table(group, SCORES)))
        found += [
            (f"Cost to {target_text(target, group.metric)}, and speed-up over {group.base.series.label}{of}", table)
            for target, table in ((target, _target_table(group, target)) for target in group.targets)
        ]
    reported = metric_table(comparison.series)
    return [*found, ("Metrics of tasks", reported)] if reported else found


def _target_table(group: SeriesGroup, target: float) -> Table:
    table = summary_table(replace(group, targets=(target,)), COSTS)
    goal = target_text(target, group.metric)
    return replace(table, columns=tuple(column.removesuffix(f" to {goal}") for column in table.columns))


def _lead(runs: Sequence[Run], comparison: Comparison) -> str:
    experiment = runs[0].config.experiment
    methods = ", ".join(dict.fromkeys(one.method for one in comparison.series))
    seeds = sorted({run.config.seed for run in runs})
    kinds = len({client.device for client in runs[0].clients})
    if experiment.flower is not None:
        return (
            f"The Flower app {methods} on {len(runs[0].clients)} clients with {kinds} kind{_s(range(kinds))} of device "
            f"(fleet {experiment.fleet}), {experiment.rounds} rounds, seed{_s(seeds)} {', '.join(map(str, seeds))}. "
            "Data, models and rounds are the app's own: no model was chosen by the memory of a device. The time on a "
            "device is that of the torch operators that the app ran, by class, and for all else the CPU time, "
            "multiplied by how much slower the device is than this host (metered). A task is one call of the "
            "ClientApp; accuracy is what the app itself reports."
        )
    partition = experiment.data.partition
    families = ", ".join(dict.fromkeys(title_of(run.config.model.family) for run in runs))
    skew = f" {partition.alpha:g}" if partition.kind == "dirichlet" else ""
    policies = dict.fromkeys(title_of(run.config.policy.kind) for run in runs)
    return (
        f"{methods} on {len(runs[0].clients)} clients with {kinds} kind{_s(range(kinds))} of device "
        f"(fleet {experiment.fleet}), {experiment.rounds} rounds, seed{_s(seeds)} {', '.join(map(str, seeds))}. "
        f"Data: {experiment.data.name}, partition {partition.kind}{skew}; models: {families}; "
        f"{'policy' if len(policies) == 1 else 'policies'}: {', '.join(policies)}; "
        f"timing: {experiment.timing.source}."
    )


def _tiles(runs: Sequence[Run], comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the tiles: heading, figure, and an explanation of the figure."""
    tiles = [(line.title, line.figure, line.of) for line in headlines(comparison)]
    fit = sum(client.variant is not None for client in runs[0].clients)
    unfit = len(runs[0].clients) - fit
    tiles.append(("Clients training", str(fit), f"{unfit} unfit" if unfit else "none unfit"))
    host = sum(run.rounds[-1].host_end_s for run in runs if run.rounds)
    tiles.append(
        ("Emulated device time", seconds(sum(run.device_s for run in runs)), f"in {seconds(host)} of host time")
    )
    return tiles


def _tile(head: str, figure: str, of: str) -> str:
    return f"<div><dt>{escape(head)}</dt><dd>{escape(figure)}</dd><dd>{escape(of)}</dd></div>"


def _fleet_note(runs: Sequence[Run]) -> str:
    experiment = runs[0].config.experiment
    if experiment.flower is not None:
        chosen = (
            "All clients run the code of the app: no model is chosen by the memory of a device, and a call that needs "
            "more than its client has ends with the outcome oom."
        )
    elif experiment.model.assign:
        chosen = "The experiment assigns a variant to every client, whether it fits the device or not."
    elif experiment.model.choose == "common":
        chosen = "Every client trains the largest variant that fits its device under every method."
    else:
        chosen = "Every client trains the largest variant that fits its device."
    return f"{chosen} Memory is what the client's own process adds while it trains."


def _accuracy_note(comparison: Comparison) -> str:
    if comparison.series[0].runs[0].config.experiment.flower is not None:
        source = "What the app calls its accuracy and its loss: of its server where that evaluates, else of its clients"
    else:
        source = "Mean over the evaluated models"
    several, metric = any(len(one.runs) > 1 for one in comparison.series), comparison.series[0].metric
    spread_note = (
        f" Lines are means over seeds, bands ± 1 standard deviation. Differences are in {metric.difference}, paired by "
        f"seed: mean and 95 % t interval with {LEAST_PAIRS} or more pairs, the difference of each pair with fewer."
    )
    return (
        f"{source}. Device time is the time on the devices' own clock; "
        f"evaluation takes none of it.{spread_note if several else ''}"
    )


def _asset(name: str) -> str:
    return (files("fleetbed.analysis.page") / "assets" / name).read_text(encoding="utf-8")


def _s(many: Sequence[object] | range) -> str:
    return "" if len(many) == 1 else "s"
