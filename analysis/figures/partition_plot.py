"""Figure of the label distribution of a run's partition."""

from __future__ import annotations

import json

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fleetbed.analysis.figures.curve_plots import new_figure
from fleetbed.analysis.figures.style import COLOURS, RC
from fleetbed.analysis.tables.runs import Run
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain


def partition_figure(run: Run) -> Figure:
    """Draw the training samples of each class, one column per client, and the total of each client."""
    if not run.clients:
        raise BadInput(
            f"plot partition: {run.folder} has not recorded its partition yet, because it has only just started."
        )
    counts = np.array([json.loads(client.label_counts) for client in run.clients])
    names = [plain(client.name) for client in run.clients]
    data = run.config.experiment.data
    with mpl.rc_context(RC):
        width = min(14.0, max(5.0, 0.16 * len(names) + 2.2))
        figure, (top, cells) = new_figure(width, 4.4, nrows=2, sharex=True, height_ratios=(1, 2.4))
        top.bar(range(len(names)), counts.sum(axis=1), color=COLOURS[0], width=0.85)
        top.set_ylabel("Samples")
        top.grid(axis="x", visible=False)
        top.set_title(f"{plain(data.name)}, {data.partition.kind} partition, seed {run.config.seed}")
        image = cells.imshow(counts.T, aspect="auto", cmap="viridis", interpolation="nearest")
        cells.grid(visible=False)
        cells.set_yticks(range(counts.shape[1]))
        every = -(-len(names) // 25)
        cells.set_xticks(range(0, len(names), every), names[::every], rotation=90, fontsize=7)
        cells.set_xlabel("Client")
        cells.set_ylabel("Class")
        figure.colorbar(image, ax=cells, label="Training samples")
    return figure
