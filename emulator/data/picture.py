"""Draws a partition: one column per client, one row per class, and the size of each client above."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fleetbed.profiles.yaml_text import plain

_TRAIN, _TEST = "#0072b2", "#e69f00"  # from the Okabe-Ito palette, distinct in every kind of colour vision
_NUMBERS_UP_TO = 16  # clients and classes; with more, the numbers in the cells would be unreadable


def draw_partition(train: NDArray[np.int64], test: NDArray[np.int64], path: Path, title: str, subtitle: str) -> None:
    """Write a PNG; `train` and `test` are counts of [client, class]."""
    clients, classes = train.shape
    width = float(np.clip(0.5 * clients, 7, 15))
    height = float(np.clip(0.34 * classes, 3, 11))
    figure = Figure((width, height + 3), dpi=110, layout="constrained")
    sizes, cells = figure.subplots(2, 1, sharex=True, height_ratios=[1.7, height])
    fitting = textwrap.shorten(plain(title), int(10 * width), placeholder=" ...")
    # both are the user's text, in which a dollar sign does not start a formula
    figure.suptitle(fitting, x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    sizes.set_title(plain(subtitle), loc="left", fontsize=9, color="#444444", parse_math=False)
    _draw_sizes(sizes, train, test)
    _draw_cells(figure, cells, train)
    figure.savefig(path)


def _draw_sizes(axes: Any, train: NDArray[np.int64], test: NDArray[np.int64]) -> None:
    numbers = np.arange(len(train))
    axes.bar(numbers, train.sum(axis=1), width=0.8, color=_TRAIN, label="training")
    axes.bar(numbers, test.sum(axis=1), width=0.35, color=_TEST, label="test")
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8, borderpad=0)


def _draw_cells(figure: Figure, axes: Any, counts: NDArray[np.int64]) -> None:
    clients, classes = counts.shape
    most = max(int(counts.max()), 2)
    # logarithmic, because a client often has one sample of a class and a thousand of another; none stays white
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)))
    mesh = axes.pcolormesh(
        np.arange(clients),
        np.arange(classes),
        np.ma.masked_equal(counts.T, 0),
        cmap=blues,
        norm=LogNorm(1, most),
        edgecolors="white",
        linewidth=0.3 if clients <= 100 else 0,  # with more clients the lines would cover the cells
        shading="nearest",
    )
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.set_xlim(-0.5, clients - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(min(clients, 20), integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(min(classes, 20), integer=True))
    ticks = [t * 10**power for power in range(len(str(most))) for t in (1, 2, 5) if t * 10**power <= most]
    bar = figure.colorbar(mesh, ax=axes, label="training samples (white: none)", pad=0.01)
    bar.set_ticks(ticks, labels=[str(tick) for tick in ticks])
    bar.minorticks_off()
    if max(clients, classes) <= _NUMBERS_UP_TO:
        middle = np.sqrt(counts.max())
        for (client, label), count in np.ndenumerate(counts):
            colour = "white" if count > middle else "black"
            axes.text(client, label, str(count) if count else "", ha="center", va="center", fontsize=8, color=colour)
