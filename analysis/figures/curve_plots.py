"""Figures of a study: accuracy against cost, final accuracy against final cost, accuracy by variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import mean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fleetbed.analysis.figures.style import DASHES, GREY, OWN_DASH, RC, Look, legend_label, looks, policy_looks
from fleetbed.analysis.tables.curves import Axis, Band, Measure, band, counted, curve, mean_accuracy, y_range
from fleetbed.analysis.tables.series import Series
from fleetbed.analysis.tables.units import digits, scale, target_text
from fleetbed.emulator.method.series import TITLES
from fleetbed.emulator.records.metric import ACCURACY, Metric
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain

MOST_INSIDE = 4  # entries of a legend that still leave space for the curves
MOST_TOGETHER = 7  # curves in one panel: as many as there are colours

MEANS = "large: mean over seeds; small: one run"
BANDS = "line: mean; band: ± 1 standard deviation"

X_LABELS: dict[Axis, str] = {
    "time": "Device time",
    "rounds": "Round",
    "bytes": "Bytes up and down, whole fleet",
    "joules": "Energy, whole fleet",
    "flops": "FLOPs, whole fleet",
}


def axis_label(axis: Axis, unit: str) -> str:
    return f"{X_LABELS[axis]} ({unit})" if unit else X_LABELS[axis]


def new_figure(width: float = 5.6, height: float = 3.6, **grid: Any) -> tuple[Figure, Any]:
    """Make a figure that pyplot does not manage: it needs no closing and no window system."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(**grid)


def accuracy_axes(axes: Axes, one: Series) -> None:
    """Label the axis of accuracy (or error), with the series unless it is the usual one."""
    title = f"Test {one.metric.label}"
    axes.set_ylabel(title if one.shown == "global" else f"{title}\n{TITLES[one.shown]}")
    if one.metric is ACCURACY:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def curves_figure(
    series: Sequence[Series], axis: Axis, targets: Sequence[float], measure: Measure = "accuracy"
) -> Figure:
    """Draw the mean over seeds with a band of one standard deviation: as steps, or as slopes against rounds.

    A line has a gap where all models of the method had diverged. Too many curves for one panel, of several methods
    under several policies, get one panel per method, in which colour and marker distinguish the policies.
    """
    bands = [(one, found) for one in series if (found := band(one, axis, measure)) is not None]
    if not bands:
        why = "no device of these runs states its power" if axis == "joules" else "the runs have no evaluation yet"
        raise BadInput(f"plot {axis}: there is nothing to draw, because {why}.")
    size, unit = scale(max(found.x[-1] for _, found in bands), axis)
    methods = list(dict.fromkeys(one.method for one, _ in bands))
    split = len(bands) > MOST_TOGETHER and 1 < len(methods) < len(bands)
    panels = [[pair for pair in bands if pair[0].method == method] for method in methods] if split else [bands]
    beside = max(map(len, panels)) > MOST_INSIDE
    by_label, by_policy = looks(series), policy_looks(series)
    several = any(found.seeds > 1 for _, found in bands)
    with mpl.rc_context(RC):
        width = 3.7 * len(panels) if split else 7.6 if beside else 5.6
        figure, grid = new_figure(width, ncols=len(panels), sharey=True, squeeze=False)
        for axes, members in zip(grid[0], panels, strict=True):
            if split:
                axes.set_title(plain(members[0][0].method))
            for target in targets:
                _target_line(axes, target, series[0].metric)
            for one, found in members:
                seeds = f" ({found.seeds} seeds)" if found.seeds > 1 else ""
                if split:
                    label, look = one.label.removeprefix(f"{one.method}, "), by_policy[one.policy]
                else:
                    label, look = one.label, by_label[one.label]
                draw_band(
                    axes, found, size, label + seeds, look, DASHES.get(one.policy, OWN_DASH), stairs=axis != "rounds"
                )
            axes.set_xlabel(axis_label(axis, unit))
            axes.set_xlim(left=0)
            if axis == "rounds":
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            # a target's label stands to the right of the axes, so a legend there starts further out
            place = (
                {"loc": "upper left", "bbox_to_anchor": (1.1 if targets else 1.0, 1.0)} if beside else {"loc": "best"}
            )
            axes.legend(**place, title=BANDS if several else None, title_fontsize=7.5, alignment="left")
        if measure == "accuracy":
            accuracy_axes(grid[0][0], series[0])
            grid[0][0].set_ylim(*y_range([found for _, found in bands], targets, series[0].metric))
        else:
            grid[0][0].set_ylabel("Test loss")
    return figure


def _target_line(axes: Axes, target: float, metric: Metric) -> None:
    """Draw a target, with its label outside the axes, where it covers no curve."""
    axes.axhline(target, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)))
    place: Any = {"xycoords": ("axes fraction", "data"), "xytext": (3, 0), "textcoords": "offset points"}
    text = target_text(target) if metric is ACCURACY else digits(target)  # the axis says what an error is
    axes.annotate(text, (1.0, target), ha="left", va="center", fontsize=7.5, color=GREY, **place)


def draw_band(axes: Axes, found: Band, size: float, label: str, look: Look, dashes: Any, *, stairs: bool) -> None:
    """Draw steps if it matters when a model was available; against rounds, slopes are easier to distinguish."""
    every = max(1, ceil(len(found.x) / 9))
    axes.plot(
        found.x / size,
        found.mean,
        drawstyle="steps-post" if stairs else "default",
        color=look.colour,
        linestyle=dashes,
        marker=look.marker,
        markevery=(every - 1, every),
        label=legend_label(label),
    )
    if found.seeds > 1:
        low, high = found.mean - found.deviation, found.mean + found.deviation
        axes.fill_between(
            found.x / size, low, high, step="post" if stairs else None, color=look.colour, alpha=0.18, linewidth=0
        )


def pareto_figure(series: Sequence[Series]) -> Figure:
    """Draw each run at its final accuracy and cost, on every axis that these runs have."""
    axes: tuple[Axis, ...] = ("time", "bytes", "joules")
    points = {axis: {one.label: _final_points(one, axis) for one in series} for axis in axes}
    shown = [axis for axis in axes if any(points[axis].values())]
    if not shown:
        raise BadInput("plot pareto: there is nothing to draw, because no run has a final accuracy.")
    with mpl.rc_context(RC):
        figure, grid = new_figure(2.9 * len(shown) + 2.4, 3.0, ncols=len(shown), sharey=True, squeeze=False)
        for panel, axis in zip(grid[0], shown, strict=True):
            _pareto_panel(panel, axis, series, points[axis])
        accuracy_axes(grid[0][0], series[0])
        grid[0][-1].legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), title=MEANS, title_fontsize=7.5, alignment="left"
        )
    return figure


def _pareto_panel(
    panel: Axes, axis: Axis, series: Sequence[Series], points: dict[str, list[tuple[float, float]]]
) -> None:
    """Draw runs small and means large; the line joins the means of the Pareto front."""
    look = looks(series)
    size, unit = scale(max(x for found in points.values() for x, _ in found), axis)
    means = []
    for one in (one for one in series if points[one.label]):
        xs, ys = [x / size for x, _ in points[one.label]], [y for _, y in points[one.label]]
        dots: Any = {
            "color": look[one.label].colour,
            "marker": look[one.label].marker,
            "linewidths": 0,
            "clip_on": False,
            "zorder": 3,
        }
        panel.scatter(xs, ys, s=16, alpha=0.45, **dots)
        panel.scatter(mean(xs), mean(ys), s=48, label=legend_label(one.label), **dots)
        means.append((mean(xs), mean(ys)))
    front = pareto_front(means, series[0].metric)
    panel.plot(*zip(*front, strict=True), color=GREY, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
    panel.set_xlabel(axis_label(axis, unit))
    panel.margins(y=0.1)  # no marker touches the edge
    panel.set_xlim(0, 1.1 * max(x for found in points.values() for x, _ in found) / size)


def _final_points(one: Series, axis: Axis) -> list[tuple[float, float]]:
    """Return final cost and accuracy of the runs that did not diverge."""
    curves = [found for run in one.runs if (found := curve(run, axis, one.shown)) is not None]
    return [(float(found.x[-1]), float(found.y[-1])) for found in curves if not np.isnan(found.y[-1])]


def pareto_front(points: Sequence[tuple[float, float]], metric: Metric = ACCURACY) -> list[tuple[float, float]]:
    """Return the points for which no other is both cheaper and more accurate."""
    front: list[tuple[float, float]] = []
    sign = 1 if metric.higher_is_better else -1
    for x, y in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not front or sign * y > sign * front[-1][1]:
            front.append((x, y))
    return front


def groups_figure(series: Sequence[Series]) -> Figure:
    """Draw the final accuracy of each variant's models, one bar per method."""
    by_variant = {one.label: _final_by_variant(one) for one in series}
    if not any(by_variant.values()):
        raise BadInput("plot groups: there is nothing to draw, because no run has a final accuracy.")
    with mpl.rc_context(RC):
        figure, axes = new_figure(5.6, 3.2)
        grouped_bars(axes, series, by_variant)
        axes.set_xlabel("Variant")
        accuracy_axes(axes, series[0])
    return figure


def grouped_bars(axes: Axes, series: Sequence[Series], values: dict[str, dict[str, list[float]]]) -> None:
    """Draw a group of bars per key of `values[label]`, one bar per series: mean and standard deviation."""
    groups = list(dict.fromkeys(group for found in values.values() for group in found))
    look, width = looks(series), 0.8 / len(series)
    for number, one in enumerate(series):
        shown = [(place, values[one.label][g]) for place, g in enumerate(groups) if g in values[one.label]]
        axes.bar(
            [place + (number - (len(series) - 1) / 2) * width for place, _ in shown],
            [mean(found) for _, found in shown],
            width * 0.92,
            yerr=[float(np.std(found, ddof=1)) if len(found) > 1 else 0.0 for _, found in shown],
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
            color=look[one.label].colour,
            hatch=None if one.policy == "sync" else "///",
            edgecolor="white",
            linewidth=0.4,
            label=legend_label(one.label),
        )
    axes.set_xticks(range(len(groups)), [plain(group) for group in groups])
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def grouped_boxes(axes: Axes, series: Sequence[Series], values: dict[str, dict[str, dict[str, float]]]) -> None:
    """Draw a group of boxes per key of `values[label]`, one box per series, each as `percentiles` returns it."""
    groups = list(dict.fromkeys(group for found in values.values() for group in found))
    look, thick = looks(series), 0.8 / len(series)
    for number, one in enumerate(series):
        shown = [(place, values[one.label][g]) for place, g in enumerate(groups) if g in values[one.label]]
        axes.bxp(
            [box for _, box in shown],
            positions=[place + (number - (len(series) - 1) / 2) * thick for place, _ in shown],
            widths=thick * 0.8,
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": look[one.label].colour, "linewidth": 0.5},
            medianprops={"color": "white"},
            whiskerprops={"linewidth": 0.7},
            capprops={"linewidth": 0.7},
            manage_ticks=False,
        )
        axes.plot([], [], color=look[one.label].colour, linewidth=6, label=legend_label(one.label))
    axes.set_xticks(range(len(groups)), [plain(group) for group in groups], rotation=90, fontsize=7)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def percentiles(values: Any, at: Mapping[str, float]) -> dict[str, float]:
    """Return the percentiles of a box, by matplotlib's names of its parts."""
    return {part: float(np.percentile(values, percent)) for part, percent in at.items()}


def _final_by_variant(one: Series) -> dict[str, list[float]]:
    """Return, by variant, the accuracy of each seed's last evaluation, unless it had diverged."""
    found: dict[str, list[float]] = {}
    for run in one.runs:
        tested = counted(run.evaluations, one.shown)
        final = [evaluation for evaluation in tested if evaluation.version == tested[-1].version]
        for variant in sorted({evaluation.variant for evaluation in final}):
            accuracy = mean_accuracy([evaluation for evaluation in final if evaluation.variant == variant])
            if not np.isnan(accuracy):
                found.setdefault(variant, []).append(accuracy)
    return found
