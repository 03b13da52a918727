"""Figures of the final models of runs: CKA per stage, features in the plane, updates per layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray
from torch import Tensor

from fleetbed.analysis.figures.changes import files_by_round
from fleetbed.analysis.figures.curve_plots import accuracy_axes, grouped_bars, grouped_boxes, new_figure, percentiles
from fleetbed.analysis.figures.nets import (
    FinalModel,
    client_models,
    dataset_of,
    final_models,
    initial_tensors,
    stage_activations,
    test_samples,
)
from fleetbed.analysis.figures.similarity import Floats, cka_matrix, off_diagonal_mean, pca, tsne
from fleetbed.analysis.figures.style import COLOURS, MARKERS, RC, legend_label, looks
from fleetbed.analysis.tables.curves import counted, mean_accuracy
from fleetbed.analysis.tables.series import Series
from fleetbed.emulator.data import Dataset
from fleetbed.emulator.records.kept_merges import CLIENTS
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain

CKA_SAMPLES = 256
CKA_ROUNDS = 12  # of those whose models were kept
FEATURE_POINTS = 420  # over all models
PERCENTILES = {"whislo": 5, "q1": 25, "med": 50, "q3": 75, "whishi": 95}


def cka_figures(series: Sequence[Series]) -> dict[str, Figure]:
    """Draw heat maps of CKA between models, by method and stage, their means as bars, and how those go with accuracy.

    The models are those that clients sent for the last merge, if the run kept them, and otherwise the final ones.
    """
    matrices: dict[str, dict[str, Floats]] = {}
    names: dict[str, list[str]] = {}
    for one in series:
        run = one.runs[0]
        dataset = dataset_of(run)
        sent = files_by_round(run, CLIENTS)
        models = client_models(run, dataset, sent[max(sent)]) if sent else final_models(run, dataset)
        if len(models) < 2:
            raise BadInput(
                f"plot cka: {run.folder} ended with a single model, so there is nothing to compare it with; a run with "
                f"evaluation.client_models keeps those of the clients."
            )
        matrices[one.label] = stage_similarity(models, dataset)
        names[one.label] = [_short_name(model) for model in models]
    found = {"cka": _heat_maps(matrices, names), "cka_stages": _stage_bars(series, matrices)}
    points = {one.label: _cka_and_accuracy(one) for one in series}
    if any(points.values()):
        found["cka_accuracy"] = _relation(series, points)
    return found


def _cka_and_accuracy(one: Series) -> dict[str, list[tuple[float, float]]]:
    """Return, by stage, the mean CKA between the clients' models and the accuracy, in up to so many rounds."""
    run = one.runs[0]
    tested = counted(run.evaluations, one.shown)
    sent = files_by_round(run, CLIENTS)
    rounds = sorted(sent.keys() & {each.round for each in tested})
    found: dict[str, list[tuple[float, float]]] = {}
    dataset = dataset_of(run)
    for place in np.linspace(0, len(rounds) - 1, min(len(rounds), CKA_ROUNDS)).round().astype(int):
        number = rounds[place]
        accuracy = mean_accuracy([each for each in tested if each.round == number])
        models = client_models(run, dataset, sent[number])
        for stage, matrix in stage_similarity(models, dataset).items():
            found.setdefault(stage, []).append((off_diagonal_mean(matrix), accuracy))
    return found


def _relation(series: Sequence[Series], points: dict[str, dict[str, list[tuple[float, float]]]]) -> Figure:
    stages = list(dict.fromkeys(stage for found in points.values() for stage in found))
    look = looks(series)
    with mpl.rc_context(RC):
        figure, grid = new_figure(2.4 * len(stages) + 1.4, 2.8, ncols=len(stages), sharey=True, squeeze=False)
        for axes, stage in zip(grid[0], stages, strict=True):
            for one in series:
                for place, (x, y) in enumerate(points[one.label].get(stage, [])):
                    label = legend_label(one.label) if place == 0 else None
                    axes.scatter(x, y, s=22, color=look[one.label].colour, marker=look[one.label].marker, label=label)
            axes.set_title(stage, fontsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(3))
        figure.supxlabel("Mean CKA between the clients' models of a round", size=9)
        accuracy_axes(grid[0][0], series[0])
        grid[0][-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def stage_similarity(models: Sequence[FinalModel], dataset: Dataset) -> dict[str, Floats]:
    """Return the CKA of each pair of models by stage."""
    activations = stage_activations(models, test_samples(dataset, CKA_SAMPLES)[0])
    return {stage: cka_matrix([_floats(v) for v in values]) for stage, values in activations.items()}


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
        found[file_name("features", one.label, found)] = figure
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
        boxes[one.label] = {layer: percentiles(values, PERCENTILES) for layer, values in moved.items()}
    layers = {layer for found in boxes.values() for layer in found}
    with mpl.rc_context(RC):
        figure, axes = new_figure(max(5.0, 0.34 * len(layers) + 1.2), 3.6)
        grouped_boxes(axes, series, boxes)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # the default writes formulas, which RC turns off
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("Change of a weight, last − first state\n(5, 25, 50, 75, 95 % of |Δw|)")
    return figure


def _floats(tensor: Tensor) -> Floats:
    return tensor.double().numpy()


def _short_name(model: FinalModel) -> str:
    return model.variant if model.client is None else f"{model.client:03d} {model.variant}"


def file_name(kind: str, label: str, taken: Collection[str]) -> str:
    """Return a file name for the label that is short, portable and not in use."""
    clean = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in label)[:80]
    names = (f"{kind}_{clean}{end}" for end in ["", *(f"_{number}" for number in range(2, len(taken) + 3))])
    return next(name for name in names if name not in taken)
