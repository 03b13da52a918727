"""Paper figures by kind: what `fleetbed plot` draws. What is heavy is imported by the kind that needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbed.analysis.runs import Run
from fleetbed.analysis.study import Series, series_of
from fleetbed.analysis.tables import writable
from fleetbed.profiles.errors import nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fleetbed.analysis.curves import Axis

#: what each kind shows, for the help text
KINDS = {
    "time": "accuracy against device time",
    "rounds": "accuracy against rounds",
    "bytes": "accuracy against bytes",
    "joules": "accuracy against energy",
    "flops": "accuracy against FLOPs",
    "pareto": "final accuracy against what it cost",
    "groups": "final accuracy by variant",
    "cka": "CKA between the final models, per stage",
    "features": "PCA and t-SNE of the final models' features",
    "updates": "how far the weights of each layer moved",
    "inco": "InCo's theta and beta",
    "partition": "label distribution of the clients",
}


def plot(kind: str, runs: Sequence[Run], out: Path, targets: Sequence[float]) -> list[Path]:
    """Draw the kind and save it below `out` as PNG and PDF; what was written."""
    if kind not in KINDS:
        raise nearest(kind, KINDS, "kind of plot", "plot KIND")
    from fleetbed.analysis.style import save

    series = series_of(runs)
    figures = _draw(kind, series, targets)
    with writable(out):
        return [path for name, figure in figures.items() for path in save(figure, out / name)]


def _draw(kind: str, series: list[Series], targets: Sequence[float]) -> dict[str, Figure]:
    """By file name."""
    axes: dict[str, Axis] = {name: name for name in ("time", "rounds", "bytes", "joules", "flops")}
    if kind in axes:
        from fleetbed.analysis.curve_plots import curves_figure
        from fleetbed.analysis.curves import targets_of

        runs = [run for one in series for run in one.runs]
        return {kind: curves_figure(series, axes[kind], targets_of(runs, series[0], targets))}
    if kind in ("cka", "features", "updates"):
        from fleetbed.analysis import model_plots

        if kind == "updates":
            return {kind: model_plots.updates_figure(series)}
        return model_plots.cka_figures(series) if kind == "cka" else model_plots.feature_figures(series)
    if kind == "partition":
        from fleetbed.analysis.partition_plot import partition_figure

        return {kind: partition_figure(series[0].runs[0])}
    from fleetbed.analysis import curve_plots

    others: dict[str, Callable[[Sequence[Series]], Figure]] = {
        "pareto": curve_plots.pareto_figure,
        "groups": curve_plots.groups_figure,
        "inco": curve_plots.metric_figure,
    }
    return {kind: others[kind](series)}
