"""Figures of the changes that merges made to weights: distributions, norms, and similarity between settings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fleetbed.analysis.figures.changes import (
    KeptChanges,
    both,
    common_layers,
    norm,
    relative,
    similarity,
    stage_of,
    statistics_of,
)
from fleetbed.analysis.figures.curve_plots import draw_band, grouped_boxes, new_figure, percentiles
from fleetbed.analysis.figures.model_plots import file_name
from fleetbed.analysis.figures.similarity import Floats
from fleetbed.analysis.figures.style import COLOURS, DASHES, MARKERS, OWN_DASH, RC, legend_label, looks
from fleetbed.analysis.tables.curves import Band
from fleetbed.analysis.tables.series import Series
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain

MOST_ROUNDS = 11  # as in the papers' figures, of rounds 40 to 50
BINS = 81
WIDEST = 99.5  # percentile of |Δw| up to which a distribution is drawn
OVERLAP = 1.6  # how high the curve of a round is, in distances between two rounds
WHOLE = {"whislo": 0, "q1": 25, "med": 50, "q3": 75, "whishi": 100}


def gradient_figures(series: Sequence[Series]) -> dict[str, Figure]:
    """Draw the changes of the weights that all series kept; the first series is the one that others are compared to."""
    kept = {one.label: [KeptChanges(run) for run in one.runs] for one in series}
    layers = common_layers([each for runs in kept.values() for each in runs])
    found: dict[str, Figure] = {}
    for stage in dict.fromkeys(map(stage_of, layers)):
        shown = [layer for layer in layers if stage_of(layer) == stage]
        figure = _distributions({label: runs[0] for label, runs in kept.items()}, shown, series)
        found[file_name("gradients", stage, found)] = figure
    found["gradients_norm"] = _norms(kept, layers, series)
    if len(series) > 1:
        found["gradients_similarity"] = _similarities(kept, layers, series)
        found["gradients_differences"] = _differences(kept, layers, series)
    return found


def _distributions(kept: dict[str, KeptChanges], layers: Sequence[str], series: Sequence[Series]) -> Figure:
    """Draw one row per series and one column per layer, with the distribution of each round above the one before."""
    values = {label: _some_rounds(one, layers) for label, one in kept.items()}
    look = looks(series)
    with mpl.rc_context(RC):
        size = (1.9 * len(layers) + 0.8, 2.4 * len(kept) + 0.5)
        figure, grid = new_figure(*size, nrows=len(kept), ncols=len(layers), squeeze=False, sharex="col")
        for row, (label, rounds) in zip(grid, values.items(), strict=True):
            for axes, layer in zip(row, layers, strict=True):
                every = np.abs(np.concatenate([found[layer] for each in values.values() for found in each.values()]))
                limit = float(np.percentile(every, WIDEST)) if len(every) else 1.0
                _ridge(axes, {number: changes[layer] for number, changes in rounds.items()}, limit, look[label].colour)
            row[0].set_ylabel(f"{plain(label)}\nround")
        for axes, name in zip(grid[0], _short(layers), strict=True):
            axes.set_title(name, fontsize=8)
        figure.supxlabel("Change of a weight in a round, where it changed; each curve has its own height", size=8)
    return figure


def _some_rounds(one: KeptChanges, layers: Sequence[str]) -> dict[int, dict[str, Floats]]:
    """Return the changes that are not 0, of all kept rounds or, if they are many, of an even selection.

    On small images most weights of a deep kernel see nothing but padding, so that they never change.
    """
    rounds = sorted(one.files)
    places = np.linspace(0, len(rounds) - 1, min(len(rounds), MOST_ROUNDS)).round().astype(int)
    chosen = {rounds[place]: one.of(rounds[place]) for place in places}
    return {number: {layer: found[layer][found[layer] != 0] for layer in layers} for number, found in chosen.items()}


def _ridge(axes: Axes, rounds: dict[int, Floats], limit: float, colour: str) -> None:
    edges = np.linspace(-limit, limit, BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    for place, values in reversed(list(enumerate(rounds.values()))):  # so that an earlier round is in front
        counts, _ = np.histogram(values, edges)
        heights = place + OVERLAP * counts / max(1, counts.max())
        axes.fill_between(middles, place, heights, color=colour, alpha=0.35, linewidth=0)
        axes.plot(middles, heights, color=colour, linewidth=0.8)
    axes.set_yticks(range(len(rounds)), [str(number) for number in rounds], fontsize=6.5)
    axes.set_xlim(-limit, limit)
    axes.xaxis.set_major_locator(MaxNLocator(3, symmetric=True))
    axes.tick_params(axis="x", labelsize=6.5)


def _norms(kept: dict[str, list[KeptChanges]], layers: Sequence[str], series: Sequence[Series]) -> Figure:
    look = looks(series)
    with mpl.rc_context(RC):
        figure, axes = new_figure()
        for one in series:
            runs = kept[one.label]
            rounds = sorted(set.intersection(*(set(each.files) for each in runs)))
            norms = np.array([[norm(each.of(number), layers) for number in rounds] for each in runs])
            spread = norms.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(rounds))
            found = Band(np.array(rounds, dtype=np.float64), norms.mean(axis=0), spread, len(runs))
            dashes = DASHES.get(one.policy, OWN_DASH)
            draw_band(axes, found, 1.0, one.label, look[one.label], dashes, stairs=False)
        axes.set_xlabel("Round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"Frobenius norm of the change\n({len(layers)} layers together)")
        axes.legend(
            loc="best" if len(series) <= 4 else "upper left", bbox_to_anchor=None if len(series) <= 4 else (1, 1)
        )
    return figure


def _pairs(first: Series, other: Series, kept: dict[str, list[KeptChanges]]) -> list[tuple[KeptChanges, KeptChanges]]:
    """Return the runs of two series that have the same seed, and so began with the same weights."""
    by_seed = dict(zip(first.seeds, kept[first.label], strict=True))
    members = zip(other.seeds, kept[other.label], strict=True)
    found = [(by_seed[seed], run) for seed, run in members if seed in by_seed]
    if not found:
        raise BadInput(
            f"plot gradients: {first.label} and {other.label} have no seed in common, so they cannot be compared."
        )
    return found


def _similarities(kept: dict[str, list[KeptChanges]], layers: Sequence[str], series: Sequence[Series]) -> Figure:
    """Draw the CKA with the first series as boxes over rounds and seeds."""
    first, *others = series
    boxes: dict[str, dict[str, dict[str, float]]] = {}
    for other in others:
        found: dict[str, list[float]] = {layer: [] for layer in layers}
        for one, two in _pairs(first, other, kept):
            for _, a, b in both(one, two):
                for layer in layers:
                    found[layer].append(similarity(a[layer], b[layer]))
        names = _short(layers)
        boxes[other.label] = {name: percentiles(found[layer], WHOLE) for name, layer in zip(names, layers, strict=True)}
    with mpl.rc_context(RC):
        figure, axes = new_figure(max(5.0, 0.34 * len(layers) * len(others) + 1.6), 3.4)
        grouped_boxes(axes, others, boxes)
        axes.set_ylim(0, 1)
        axes.set_ylabel(f"CKA of the change with that of\n{plain(first.label)}, over the rounds")
    return figure


def _differences(kept: dict[str, list[KeptChanges]], layers: Sequence[str], series: Sequence[Series]) -> Figure:
    """Draw CKA and statistics of the difference to the first series, as multiples of the smallest in each stage."""
    first, *others = series
    with mpl.rc_context(RC):
        width = max(3.0, 0.3 * len(layers) + 1.0)
        figure, grid = new_figure(width * len(others) + 1.0, 3.2, ncols=len(others), squeeze=False, sharey=True)
        for axes, other in zip(grid[0], others, strict=True):
            found: dict[str, dict[str, list[float]]] = {}
            for one, two in _pairs(first, other, kept):
                for _, a, b in both(one, two):
                    for layer in layers:
                        figures = {"CKA": similarity(a[layer], b[layer]), **statistics_of(a[layer], b[layer])}
                        for name, value in figures.items():
                            found.setdefault(name, {}).setdefault(layer, []).append(value)
            for number, (name, by_layer) in enumerate(found.items()):
                values = relative({layer: mean(each) for layer, each in by_layer.items()})
                _lines_by_stage(axes, layers, values, name, number)
            axes.set_xticks(range(len(layers)), _short(layers), rotation=90, fontsize=7)
            axes.set_title(legend_label(f"{other.label} − {first.label}"), fontsize=9)
        grid[0][0].set_ylabel("Mean over rounds, divided by the\nsmallest in its stage")
        grid[0][-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _lines_by_stage(axes: Axes, layers: Sequence[str], values: dict[str, float], name: str, number: int) -> None:
    for stage in dict.fromkeys(map(stage_of, layers)):
        places = [place for place, layer in enumerate(layers) if stage_of(layer) == stage]
        axes.plot(
            places,
            [values[layers[place]] for place in places],
            color=COLOURS[number],
            marker=MARKERS[number],
            label=name if stage == stage_of(layers[0]) else None,
        )


def _short(layers: Sequence[str]) -> list[str]:
    """Return the names of layers without what all of them have in common."""
    models = {layer.rpartition("/")[0] for layer in layers}
    return [
        plain((layer.rpartition("/")[2] if len(models) == 1 else layer).removesuffix(".weight")) for layer in layers
    ]
