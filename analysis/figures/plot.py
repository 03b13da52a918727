"""Draws the figures of `fleetbed plot` by kind. Heavy modules are imported by the kind that needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series, by_shown, runs_of, series_of
from fleetbed.analysis.tables.writing import writable
from fleetbed.profiles.errors import BadInput, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fleetbed.analysis.tables.curves import Axis

#: a description of each kind, for the help text
KINDS = {
    "time": "accuracy against device time",
    "rounds": "accuracy against rounds",
    "bytes": "accuracy against bytes",
    "joules": "accuracy against energy",
    "flops": "accuracy against FLOPs",
    "loss": "test loss against device time",
    "metrics": "metrics of merges and of clients against device time",
    "pareto": "final accuracy against its cost",
    "groups": "final accuracy by variant",
    "cka": "CKA between the final models, per stage",
    "features": "PCA and t-SNE of the final models' features",
    "updates": "how far the weights of each layer moved",
    "gradients": "the changes that a run kept by evaluation.changes",
    "inco": "InCo's theta and beta",
    "partition": "label distribution of the clients",
}


#: the kinds that need the models or the data of a run
ABOUT_MODELS = ("cka", "features", "updates", "partition")


def draw_plot(
    kind: str, runs: Sequence[Run], out: Path, targets: Sequence[float], asked_series: str | None = None
) -> list[Path]:
    """Draw a kind of plot, save it in `out` as PNG and PDF, and return the files."""
    return save_figures(draw_figures(kind, runs, targets, asked_series), out)


def draw_figures(
    kind: str, runs: Sequence[Run], targets: Sequence[float], asked_series: str | None = None
) -> dict[str, Figure]:
    """Draw a kind of plot; return its figures by file name."""
    if kind not in KINDS:
        raise nearest(kind, KINDS, "kind of plot", "plot KIND")
    for run in runs:
        if kind in ABOUT_MODELS and run.config.experiment.flower is not None:
            raise BadInput(f"plot {kind}: {run.folder} is a run of a Flower app, whose models and data are its own.")
    return _draw(kind, series_of(runs, asked_series), targets)


def save_figures(figures: Mapping[str, Figure], out: Path) -> list[Path]:
    """Save figures in this folder as PNG and PDF; return the files."""
    from fleetbed.analysis.figures.style import save

    with writable(out):
        return [path for name, figure in figures.items() for path in save(figure, out / name)]


def grouped(name: str, series: Sequence[Series]) -> dict[str, list[Series]]:
    """Return, by file name, the methods that share a figure because they show the same target series."""
    groups = by_shown(series)
    return {name if len(groups) == 1 else f"{name}_{shown}": members for shown, members in groups.items()}


def _draw(kind: str, series: list[Series], targets: Sequence[float]) -> dict[str, Figure]:
    """Return the figures by file name."""
    evaluated = [one for one in series if one.evaluated] or series
    axes: dict[str, Axis] = {name: name for name in ("time", "rounds", "bytes", "joules", "flops")}
    if kind in axes:
        from fleetbed.analysis.figures.curve_plots import curves_figure
        from fleetbed.analysis.tables.curves import targets_of

        return {
            name: curves_figure(members, axes[kind], targets_of(runs_of(members), members[0], targets))
            for name, members in grouped(kind, evaluated).items()
        }
    if kind == "loss":
        from fleetbed.analysis.figures.curve_plots import curves_figure

        return {name: curves_figure(members, "time", (), "loss") for name, members in grouped(kind, evaluated).items()}
    if kind == "metrics":
        from fleetbed.analysis.figures.metric_plots import metrics_figure

        return {kind: metrics_figure(series)}
    if kind in ("cka", "features", "updates"):
        from fleetbed.analysis.figures import model_plots

        if kind == "updates":
            return {kind: model_plots.updates_figure(series)}
        return model_plots.cka_figures(series) if kind == "cka" else model_plots.feature_figures(series)
    if kind == "gradients":
        from fleetbed.analysis.figures.gradient_plots import gradient_figures

        return gradient_figures(series)
    if kind == "partition":
        from fleetbed.analysis.figures.partition_plot import partition_figure

        return {kind: partition_figure(series[0].runs[0])}
    from fleetbed.analysis.figures import curve_plots

    if kind == "inco":
        from fleetbed.analysis.figures.metric_plots import inco_figure

        return {kind: inco_figure(series)}
    figure = curve_plots.pareto_figure if kind == "pareto" else curve_plots.groups_figure
    return {name: figure(members) for name, members in grouped(kind, evaluated).items()}
