"""Figure of original images and their reconstructions from features."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure
from torch import Tensor

from fleetbed.analysis.figures.curve_plots import new_figure
from fleetbed.analysis.figures.privacy import Attack, mean_ssim
from fleetbed.analysis.figures.style import RC


def reconstruction_figure(original: Tensor, attacks: Sequence[Attack]) -> Figure:
    rows: list[tuple[str, Tensor, tuple[float, ...] | None]] = [("original", original, None)]
    rows += [(f"noise {a.noise:g} σ\nSSIM {mean_ssim(a):.2f}", a.images, a.ssim) for a in attacks]
    count = len(original)
    with mpl.rc_context(RC):
        size = (0.9 * count + 1.0, 1.0 * len(rows) + 0.2)
        figure, grid = new_figure(*size, nrows=len(rows), ncols=count, squeeze=False)
        for line, (label, images, scores) in zip(grid, rows, strict=True):
            for number, (axes, image) in enumerate(zip(line, images, strict=True)):
                shown = image[0] if len(image) == 1 else image.permute(1, 2, 0)
                axes.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set_xticks([])
                axes.set_yticks([])
                axes.grid(visible=False)
                if scores is not None:
                    axes.set_xlabel(f"{scores[number]:.2f}", fontsize=6.5, labelpad=1)
            line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=7.5)
    return figure
