"""Figure of predicted against measured training times, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fleetbed.analysis.figures.curve_plots import new_figure
from fleetbed.analysis.figures.style import COLOURS, GREY, MARKERS, RC
from fleetbed.models.cost.validation import Compared, Validation

BAND = 0.2  # drawn around the diagonal
NAMED = 6  # the number of points with the largest errors that are labelled


def validation_figure(found: Validation) -> Figure:
    """Draw one marker per point and one colour per device; hollow markers are models left out of the fit."""
    with mpl.rc_context(RC):
        figure, axes = new_figure(6.0, 5.4)
        times = [s for each in found.compared for s in (each.point.seconds, each.predicted_s)]
        low, high = 0.8 * min(times), 1.25 * max(times)
        line = np.array([low, high])
        axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), color=GREY, alpha=0.15, linewidth=0)
        axes.plot(line, line, color=GREY, linewidth=1)
        for place, result in enumerate(found.devices):
            own = [each for each in found.compared if each.point.device == result.device]
            colour, marker = COLOURS[place % (len(COLOURS) - 1)], MARKERS[place % len(MARKERS)]
            label = f"{result.device}: median {result.errors.median:.0%}, {result.errors.points} points"
            axes.plot(
                [each.point.seconds for each in own],
                [each.predicted_s for each in own],
                marker,
                color=colour,
                label=label,
            )
            unseen = [(each.point.seconds, s) for each in own if (s := each.unseen_s) is not None]
            if unseen and result.unseen is not None:
                axes.plot(
                    [measured for measured, _ in unseen],
                    [predicted for _, predicted in unseen],
                    marker,
                    markersize=7,
                    markerfacecolor="none",
                    color=colour,
                    alpha=0.6,
                    label=f"the same, model left out of the fit: median {result.unseen.median:.0%}",
                )
        for each in _furthest(found.compared):
            axes.annotate(
                each.point.model,
                (each.point.seconds, each.predicted_s),
                xytext=(7, -3) if each.error < 0 else (-7, 4),
                textcoords="offset points",
                ha="left" if each.error < 0 else "right",
                fontsize=7,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal")
        axes.set_xlabel("Measured, s per step")
        axes.set_ylabel("Predicted, s per step")
        axes.set_title(f"Training steps, predicted and published; the band is ±{BAND:.0%}")
        axes.legend(loc="upper left")
    return figure


def _furthest(compared: Sequence[Compared]) -> list[Compared]:
    return sorted(compared, key=lambda each: -abs(np.log(each.predicted_s / each.point.seconds)))[:NAMED]
