"""Figures of the final models of runs: CKA per stage, features in the plane, updates per layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullFormatter
from numpy.typing import NDArray
from torch import Tensor

from fleetbed.analysis.figures.curve_plots import grouped_bars, new_figure
from fleetbed.analysis.figures.nets import (
    FinalModel,
    dataset_of,
    final_models,
    initial_tensors,
    stage_activations,
    test_samples,
)
from fleetbed.analysis.figures.similarity import Floats, cka_matrix, off_diagonal_mean, pca, tsne
from fleetbed.analysis.figures.style import COLOURS, MARKERS, RC, legend_label, looks
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain

CKA_SAMPLES = 256
FEATURE_POINTS = 420  # over all models
PERCENTILES = {"whislo": 5, "q1": 25, "med": 50, "q3": 75, "whishi": 95}


def cka_figures(series: Sequence[Series]) -> dict[str, Figure]:
    """Draw heat maps of CKA between the final models, by method and stage, and their means as bars."""
    matrices: dict[str, dict[str, Floats]] = {}
    names: dict[str, list[str]] = {}
    for one in series:
        run = one.runs[0]
        names[one.label], matrices[one.label] = stage_similarity(run)
        if len(names[one.label]) < 2:
            raise BadInput(f"plot cka: {run.folder} ended with a single model, so there is nothing to compare it with.")
    return {"cka": _heat_maps(matrices, names), "cka_stages": _stage_bars(series, matrices)}


def stage_similarity(run: Run) -> tuple[list[str], dict[str, Floats]]:
    """Return the names of a run's final models, and the CKA of each pair of them by stage."""
    dataset = dataset_of(run)
    models = final_models(run, dataset)
    activations = stage_activations(models, test_samples(dataset, CKA_SAMPLES)[0])
    matrices = {stage: cka_matrix([_floats(v) for v in values]) for stage, values in activations.items()}
    return [_short_name(model) for model in models], matrices


def _heat_maps(matrices: dict[str, dict[str, Floats]], names: dict[str, list[str]]) -> Figure:
    stages = list(dict.fromkeys(stage for found in matrices.values() for stage in found))
    with mpl.rc_context(RC):
        width, height = 1.7 * len(stages) + 1.2, 1.9 * len(matrices) + 0.4
        figure, grid = new_figure(width, height, nrows=len(matrices), ncols=len(stages), squeeze=False)
        for row, (label, found) in zip(grid, matrices.items(), strict=True):
            for axes, stage in zip(row, stages, strict=True):
                axes.grid(visible=False)
                if stage not in found:
                    axes.axis("off")
                    continue
                image = axes.imshow(found[stage], vmin=0, vmax=1, cmap="viridis")
                axes.set_title(f"{stage}, mean {off_diagonal_mean(found[stage]):.2f}", fontsize=8)
                axes.set_xticks([])
                axes.set_yticks([])
            few = len(names[label]) <= 12
            row[0].set_yticks(range(len(names[label])) if few else [], names[label] if few else [], fontsize=6)
            row[0].set_ylabel(plain(label))
        figure.colorbar(image, ax=grid, label="CKA, 0 to 1", shrink=0.8)
    return figure


def _stage_bars(series: Sequence[Series], matrices: dict[str, dict[str, Floats]]) -> Figure:
    means = {label: {s: [off_diagonal_mean(m)] for s, m in found.items()} for label, found in matrices.items()}
    with mpl.rc_context(RC):
        figure, axes = new_figure(5.6, 3.0)
        grouped_bars(axes, series, means)
        axes.set_ylim(0, 1)
        axes.set_xlabel("Stage, from shallow to deep")
        axes.set_ylabel("Mean CKA between models")
    return figure


def feature_figures(series: Sequence[Series]) -> dict[str, Figure]:
    """Draw, for each method, the features of the same test samples in all final models, by class and by model."""
    found: dict[str, Figure] = {}
    for one in series:
        run = one.runs[0]
        dataset = dataset_of(run)
        models = _of_one_width(final_models(run, dataset, most=7), test_samples(dataset, 2)[0])
        x, y = test_samples(dataset, FEATURE_POINTS // len(models))
        features = np.concatenate([_features(model, x) for model in models])
        classes = np.tile(y.numpy(), len(models))
        owners = np.repeat(np.arange(len(models), dtype=np.int64), len(x))
        flat, share = pca(features)
        planes = {f"PCA, {100 * share.sum():.0f} % of the variance": flat, "t-SNE": tsne(features)}
        with mpl.rc_context(RC):
            figure, grid = new_figure(7.2, 6.0, nrows=2, ncols=2, squeeze=False)
            for row, (title, plane) in zip(grid, planes.items(), strict=True):
                _scatter(row[0], plane, classes, [str(c) for c in range(dataset.spec.classes)], "class")
                _scatter(row[1], plane, owners, [_short_name(model) for model in models], "model")
                row[0].set_ylabel(title)
            figure.suptitle(
                f"{plain(one.label)}: features of {len(x)} test samples in {len(models)} models", fontsize=10
            )
        found[_file_name("features", one.label, found)] = figure
    return found


def _of_one_width(models: list[FinalModel], x: Tensor) -> list[FinalModel]:
    """Select the models with the most frequent width: features of different widths have no common plane."""
    widths = [_features(model, x).shape[1] for model in models]
    usual = max(set(widths), key=lambda width: (widths.count(width), width))
    return [model for model, width in zip(models, widths, strict=True) if width == usual]


def _features(model: FinalModel, x: Tensor) -> Floats:
    import torch

    with torch.inference_mode():
        return _floats(model.net.features(x).flatten(1))


def _scatter(axes: Axes, plane: Floats, groups: NDArray[np.int64], names: list[str], title: str) -> None:
    for number, name in enumerate(names):
        chosen = groups == number
        axes.scatter(
            plane[chosen, 0],
            plane[chosen, 1],
            s=9,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number // len(COLOURS) % len(MARKERS)],
            linewidths=0,
            alpha=0.75,
            label=legend_label(name),
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.legend(title=f"by {title}", loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=6.5, title_fontsize=7)


def updates_figure(series: Sequence[Series]) -> Figure:
    """Draw how far the weights of each layer moved from the first state to the last, in the largest final model."""
    boxes: dict[str, dict[str, dict[str, float]]] = {}
    for one in series:
        run = one.runs[0]
        dataset = dataset_of(run)
        model = max(final_models(run, dataset), key=lambda model: sum(p.numel() for p in model.net.parameters()))
        start = initial_tensors(run, dataset, model)
        moved = {
            name.removesuffix(".weight"): np.abs(_floats(tensor.detach() - start[name])).ravel()
            for name, tensor in model.net.named_parameters()
            if name.endswith("weight") and tensor.ndim > 1
        }
        boxes[one.label] = {
            layer: {key: float(np.percentile(values, p)) for key, p in PERCENTILES.items()}
            for layer, values in moved.items()
        }
    layers = list(dict.fromkeys(layer for found in boxes.values() for layer in found))
    look, thick = looks(series), 0.8 / len(series)
    with mpl.rc_context(RC):
        figure, axes = new_figure(max(5.0, 0.34 * len(layers) + 1.2), 3.6)
        for number, one in enumerate(series):
            shown = [
                (place, boxes[one.label][layer]) for place, layer in enumerate(layers) if layer in boxes[one.label]
            ]
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
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # the default writes formulas, which RC turns off
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(range(len(layers)), layers, rotation=90, fontsize=7)
        axes.set_ylabel("Change of a weight, last − first state\n(5, 25, 50, 75, 95 % of |Δw|)")
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _floats(tensor: Tensor) -> Floats:
    return tensor.double().numpy()


def _short_name(model: FinalModel) -> str:
    return model.variant if model.client is None else f"{model.client:03d} {model.variant}"


def _file_name(kind: str, label: str, taken: Collection[str]) -> str:
    """Return a file name for the label that is short, portable and not in use."""
    clean = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in label)[:80]
    names = (f"{kind}_{clean}{end}" for end in ["", *(f"_{number}" for number in range(2, len(taken) + 3))])
    return next(name for name in names if name not in taken)
