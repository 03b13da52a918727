"""Draws the figures of the study from curves.csv and cka.csv:  python docs/study/figures.py

order.png       how far each method is above HeteroAvg when it has spent what HeteroAvg spends in all its rounds: as
                many rounds, as much device time, as many bytes, as many joules
policies.png    accuracy against device time under each policy, for the methods of the four papers
similarity.png  CKA between the final models by stage
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import claims
import matplotlib as mpl
import policies
import similarity
from claims import NAMES, Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from orders import BASE, BUDGETS, METHODS, PERSONAL, TITLES, by_cost, means

from fleetbed.analysis.figures.curve_plots import new_figure
from fleetbed.analysis.figures.style import COLOURS, DASHES, MARKERS, RC

HERE = Path(__file__).parent


def order_figure(rows: Sequence[Row]) -> Figure:
    costs = {study: by_axis for study in TITLES if (by_axis := by_cost(rows, study))}
    with mpl.rc_context(RC):
        figure, grid = new_figure(7.4, 3.6 * len(costs) + 0.2, nrows=len(costs), squeeze=False)
        for (axes,), (study, by_axis) in zip(grid, costs.items(), strict=True):
            _slopes(axes, {f"equal {BUDGETS[axis]}": above_base(means(one)) for axis, one in by_axis.items()})
            axes.set_title(f"{TITLES[study]} (HeteroAvg: {100 * means(by_axis['rounds'])[BASE]:.1f} %)")
            axes.set_ylabel("Accuracy minus HeteroAvg's, points")
    return figure


def above_base(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: 100 * (share - shares[BASE]) for name, share in shares.items()}


def style_of(method: str) -> dict[str, Any]:
    """Return colour, marker and line, the same in every panel; dashed if clients have models of their own."""
    number = METHODS.index(method)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": "dashed" if method in PERSONAL else "solid",
    }


def _slopes(axes: Axes, by_column: Mapping[str, Mapping[str, float]]) -> None:
    columns = list(by_column.values())
    places = range(len(columns))
    lines = {name: [column[name] for column in columns] for name in METHODS if name in columns[0]}
    for name, line in lines.items():
        axes.plot(places, line, **style_of(name))
    low, high = axes.get_ylim()
    heights = _apart({name: line[-1] for name, line in lines.items()}, (high - low) / 21)
    for name, line in lines.items():
        colour = style_of(name)["color"]
        axes.annotate(
            NAMES[name],
            (places[-1], line[-1]),
            (places[-1] + 0.12, heights[name]),
            color=colour,
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )
    axes.set_xticks(places, list(by_column))
    axes.set_xlim(-0.15, places[-1] + 1.1)
    axes.grid(axis="x", visible=False)


def _apart(heights: Mapping[str, float], least: float) -> dict[str, float]:
    """Return heights for labels that keep this distance, from the lowest up."""
    found: dict[str, float] = {}
    before = float("-inf")
    for name in sorted(heights, key=heights.__getitem__):
        before = found[name] = max(heights[name], before + least)
    return found


def policies_figure(rows: Sequence[Row]) -> Figure:
    """Draw the mean over the seeds that all policies have against the mean device time of the same evaluation."""
    by_policy = policies.curves_by_policy(rows)
    common = {
        method: set.intersection(*(set(curves[method]) for curves in by_policy.values() if method in curves))
        for method in policies.STUDIES
    }
    with mpl.rc_context(RC):
        figure, (grid,) = new_figure(9.6, 2.7, ncols=len(policies.STUDIES), squeeze=False)
        for axes, method in zip(grid, policies.STUDIES, strict=True):
            for number, (policy, curves) in enumerate(by_policy.items()):
                if method in curves:
                    runs = list(zip(*(curves[method][seed] for seed in common[method]), strict=True))
                    axes.plot(
                        [mean(float(row["time"]) for row in at_once) for at_once in runs],
                        [100 * mean(float(row["accuracy"]) for row in at_once) for at_once in runs],
                        color=COLOURS[number],
                        linestyle=DASHES[policy],
                        label=policy,
                    )
            axes.set_title(NAMES[method])
            axes.set_xlabel("Device time, s")
        grid[0].set_ylabel("Accuracy, %")
        grid[0].legend(loc="lower right")
    return figure


def similarity_figure(rows: Iterable[Row]) -> Figure:
    found = similarity.means(rows)
    studies = [study for study in TITLES if (study, BASE, "sync") in found]
    with mpl.rc_context(RC):
        figure, (grid,) = new_figure(3.9 * len(studies) + 1.2, 3.2, ncols=len(studies), squeeze=False, sharey=True)
        for axes, study in zip(grid, studies, strict=True):
            for name in (name for name in METHODS if (study, name, "sync") in found):
                stages = found[study, name, "sync"]
                axes.plot(list(stages), list(stages.values()), label=NAMES[name], **style_of(name))
            axes.set_title(TITLES[study])
            axes.set_xlabel("Stage, from shallow to deep")
        grid[0].set_ylabel("Mean CKA between models")
        grid[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def main() -> None:
    rows = claims.read_rows(claims.CURVES)
    order_figure(rows).savefig(HERE / "order.png")
    policies_figure(rows).savefig(HERE / "policies.png")
    similarity_figure(claims.read_rows(similarity.TABLE)).savefig(HERE / "similarity.png")


if __name__ == "__main__":
    main()
