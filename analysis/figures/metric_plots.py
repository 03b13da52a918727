"""Figures of the metrics that methods and apps report: of merges and of clients, and those of InCo."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import mean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fleetbed.analysis.figures.curve_plots import axis_label, draw_band, new_figure
from fleetbed.analysis.figures.style import COLOURS, DASHES, GREY, RC, legend_label, looks
from fleetbed.analysis.tables.curves import MergeMetric, band
from fleetbed.analysis.tables.metrics import merge_metrics, values_of_tasks
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series, runs_of
from fleetbed.analysis.tables.units import scale
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain

MOST_PANELS = 12
COLUMNS = 3


def metrics_figure(series: Sequence[Series]) -> Figure:
    """Draw a panel for each metric of merges, one line per series; of a single run, its clients as thin lines too."""
    runs = runs_of(series)
    names = list(dict.fromkeys(name for run in runs for name in (*merge_metrics(run), *values_of_tasks(run))))
    if not names:
        raise BadInput(
            "plot metrics: there is nothing to draw, because no run recorded metrics of its tasks or merges."
        )
    look = looks(series)
    end_s = max(run.device_s for run in runs)
    size, unit = scale(end_s, "time")
    shown = names[:MOST_PANELS]
    columns = min(COLUMNS, len(shown))
    rows = ceil(len(shown) / columns)
    with mpl.rc_context(RC):
        figure, grid = new_figure(3.4 * columns, 2.5 * rows, nrows=rows, ncols=columns, squeeze=False)
        panels = list(grid.flat)
        for axes, name in zip(panels, shown, strict=False):
            if len(runs) == 1:
                _client_lines(axes, runs[0], name, size)
            for one in series:
                if (found := band(one, "time", MergeMetric(name))) is not None:
                    draw_band(axes, found, size, one.label, look[one.label], DASHES[one.policy], stairs=False)
            axes.set_title(plain(name))
            axes.set_xlabel(axis_label("time", unit))
            axes.set_xlim(0, 1.02 * end_s / size or 1)
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        if len(names) > len(shown):
            figure.supxlabel(f"{len(names) - len(shown)} more metrics are in the tables of `fleetbed export`", size=7.5)
        panels[0].legend(loc="best")
    return figure


def _client_lines(axes: Axes, run: Run, name: str, size: float) -> None:
    """Draw a thin line for each client, a point for each of its tasks."""
    values = values_of_tasks(run).get(name, {})
    lines: dict[int, list[tuple[float, float]]] = {}
    for task in sorted(run.tasks, key=lambda task: task.end_s):
        if task.task in values:
            lines.setdefault(task.client, []).append((task.end_s / size, values[task.task]))
    for place, line in enumerate(lines.values()):
        label = "one client" if place == 0 else None
        axes.plot(*zip(*line, strict=True), color=GREY, linewidth=0.5, alpha=0.5, zorder=1, label=label)


def inco_figure(series: Sequence[Series]) -> Figure:
    """Draw InCo's theta and beta over the merges: one panel each, one line per layer, mean over seeds."""
    titles = {"theta": "θ, weight of the base layer", "beta": "β = ⟨g₀, gₖ⟩"}
    lines: dict[str, dict[tuple[str, str], dict[int, list[float]]]] = {name: {} for name in titles}
    for one in series:
        for metric in (metric for run in one.runs for metric in run.metrics if metric.task is None):
            name, _, layer = metric.name.partition("/")
            if name in titles and metric.value is not None:
                by_version = lines[name].setdefault((one.label, layer), {})
                by_version.setdefault(metric.version, []).append(metric.value)
    methods = {label for found in lines.values() for label, _ in found}
    if not methods:
        raise BadInput("plot inco: no run recorded theta or beta; choose runs of a method with InCo.")
    with mpl.rc_context(RC):
        figure, (left, right) = new_figure(6.8, 3.0, ncols=2)
        for axes, (name, title) in zip((left, right), titles.items(), strict=True):
            for number, ((label, layer), by_version) in enumerate(sorted(lines[name].items())):
                axes.plot(
                    sorted(by_version),
                    [mean(by_version[version]) for version in sorted(by_version)],
                    color=COLOURS[number % len(COLOURS)],
                    linestyle=("-", "--", ":")[number // len(COLOURS) % 3],
                    label=legend_label(layer if len(methods) == 1 else f"{label} {layer}"),
                )
            axes.axhline(0, color=GREY, linewidth=0.8)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel("Merge")
            axes.set_ylabel(title)
        right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
