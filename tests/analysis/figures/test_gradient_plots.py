"""The figures of the changes of weights: their statistics against values by hand, and what cannot be drawn."""

from __future__ import annotations

from math import isnan, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_runs import write_run

from fleetbed.analysis.figures.changes import norm, relative, similarity, stage_of, statistics_of
from fleetbed.analysis.figures.gradient_plots import gradient_figures
from fleetbed.analysis.figures.plot import draw_plot
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.analysis.tables.series import series_of
from fleetbed.emulator.records.kept_merges import KeptMerges
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Evaluation

#: in the order in which they are drawn
LAYERS = ("layer3.0.conv1.weight", "layer3.0.conv2.weight", "layer4.0.conv1.weight")
ONE = np.array([[3.0, 1.0], [2.0, -4.0]])
OTHER = np.array([[0.0, 1.0], [2.0, 0.0]])


def keep(run: Path, rounds: dict[int, list[float]], layers: tuple[str, ...] = LAYERS) -> Path:
    """Have a run keep changes: in each of these rounds, these values in every layer, two in a row."""
    kept = KeptMerges(run, Evaluation(changes=("*",)))
    for number, values in rounds.items():
        after = {name: torch.tensor(values).reshape(-1, 2) for name in layers}
        kept.keep(number, number, {name: torch.zeros_like(tensor) for name, tensor in after.items()}, after, [])
    return run


def test_similarity_is_cka_with_outputs_as_samples() -> None:
    # of vectors it is the squared correlation: deviations (-1, 0, 1) and (-1, 1, 0), so (1 / 2)^2
    assert similarity(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])) == pytest.approx(0.25)
    kernels = np.random.default_rng(1).normal(size=(6, 4, 3, 3))
    assert similarity(kernels, -2 * kernels) == pytest.approx(1)
    assert similarity(kernels, kernels[:, ::-1]) == pytest.approx(1), "the order of the inputs does not count"
    assert similarity(kernels, kernels[::-1]) < 0.99, "that of the outputs does"


def test_statistics_are_those_of_the_difference() -> None:
    found = statistics_of(ONE, OTHER)  # 3, 0, 0, -4
    assert found == pytest.approx({"norm": 5.0, "mean |x|": 7 / 4, "deviation": sqrt(25 / 4 - (1 / 4) ** 2)})


def test_the_norm_is_over_all_layers() -> None:
    assert norm({"a": np.array([3.0]), "b": np.array([[0.0, 4.0]]), "c": np.array([9.0])}, ["a", "b"]) == 5


def test_values_are_divided_by_the_smallest_of_their_stage() -> None:
    values = {"layer3.0.conv1": 2.0, "layer3.0.conv2": 6.0, "layer4.0.conv1": 5.0, "fc": 0.0}
    found = relative(values)
    assert isnan(found.pop("fc"))
    assert found == {"layer3.0.conv1": 1.0, "layer3.0.conv2": 3.0, "layer4.0.conv1": 1.0}


@pytest.mark.parametrize(
    ("layer", "stage"),
    [
        ("layer3.0.conv1.weight", "layer3"),
        ("resnet18/layer4.1.conv2.weight", "resnet18/layer4"),
        ("blocks.11.norm2.weight", "blocks.11"),
        ("vit12/blocks.7.norm1.weight", "vit12/blocks.7"),
        ("fc.weight", "fc"),
    ],
)
def test_a_stage_is_the_name_up_to_its_number(layer: str, stage: str) -> None:
    assert stage_of(layer) == stage


def test_a_figure_for_each_stage_one_of_norms_and_two_that_compare(tmp_path: Path) -> None:
    rounds = {1: [3.0, 0.0, 0.0, 4.0], 2: [0.0, 1.0, 0.0, 0.0]}
    keep(write_run(tmp_path, "fedavg", methods=("fedavg", "inco"), rounds=2), rounds)
    keep(write_run(tmp_path, "inco", methods=("fedavg", "inco"), rounds=2), rounds)
    runs = open_runs([tmp_path])
    alone = gradient_figures(series_of(runs[:1]))
    assert list(alone) == ["gradients_layer3", "gradients_layer4", "gradients_norm"]
    figures = gradient_figures(series_of(runs))
    assert list(figures) == [*alone, "gradients_similarity", "gradients_differences"]
    stage = figures["gradients_layer3"].axes
    assert [axes.get_title() for axes in stage] == ["layer3.0.conv1", "layer3.0.conv2", "", ""]
    assert [text.get_text() for text in stage[0].get_yticklabels()] == ["1", "2"]
    (axes,) = figures["gradients_norm"].axes
    line, _ = axes.get_lines()
    assert line.get_xydata().tolist() == pytest.approx(np.array([[1, sqrt(3) * 5], [2, sqrt(3)]]))
    (axes,) = figures["gradients_similarity"].axes
    assert len(axes.patches) == len(LAYERS), "one series compared with the first"
    names = [path.name for path in draw_plot("gradients", runs, tmp_path / "out", [])]
    assert names == [f"{name}.{form}" for name in figures for form in ("png", "pdf")]


def test_layers_are_drawn_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    layers = ("blocks.7.norm2.weight", "blocks.11.norm1.weight", "blocks.7.norm1.weight")
    keep(write_run(tmp_path, rounds=1), {1: [1.0, 2.0]}, layers)
    figures = gradient_figures(series_of(open_runs([tmp_path])))
    assert list(figures) == ["gradients_blocks_7", "gradients_blocks_11", "gradients_norm"]
    assert [axes.get_title() for axes in figures["gradients_blocks_7"].axes] == ["blocks.7.norm1", "blocks.7.norm2"]


def test_each_round_is_a_curve_and_of_many_rounds_some_are_drawn(tmp_path: Path) -> None:
    keep(write_run(tmp_path, rounds=30), {n: [-1.0, 0.0, 0.0, 2.0, 2.0, 0.0] for n in range(1, 31)}, LAYERS[:1])
    axes = gradient_figures(series_of(open_runs([tmp_path])))["gradients_layer3"].axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert (len(labels), labels[0], labels[-1]) == (11, "1", "30")
    first = axes.get_lines()[-1]  # drawn last, in front
    peaks = first.get_ydata() / 1.6
    assert sorted(peaks[peaks > 0]) == [0.5, 1.0], "one -1, two 2 at the edge, and no zeros"


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    both = ("fedavg", "inco")
    runs = [write_run(tmp_path / "a", name, methods=both, rounds=1) for name in both]
    with pytest.raises(BadInput, match=r"it kept no changes of weights; choose a run with evaluation\.changes"):
        draw_plot("gradients", open_runs(runs), tmp_path, [])
    keep(runs[0], {1: [1.0, 2.0]}, LAYERS[:1])
    keep(runs[1], {1: [1.0, 2.0]}, LAYERS[1:])
    with pytest.raises(BadInput, match="kept changes of different weights"):
        draw_plot("gradients", open_runs(runs), tmp_path, [])
    (runs[1] / "changes" / "merge-00000001.safetensors").unlink()
    keep(runs[1], {2: [1.0, 2.0]}, LAYERS)
    with pytest.raises(BadInput, match="changes of different rounds"):
        draw_plot("gradients", open_runs(runs), tmp_path, [])
    other = keep(write_run(tmp_path / "b", "inco", 2, rounds=1), {1: [1.0, 2.0]})
    with pytest.raises(BadInput, match="no seed in common"):
        draw_plot("gradients", open_runs([runs[0], other]), tmp_path, [])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = keep(write_run(tmp_path, rounds=1), {1: [1.0, 2.0]})
    path = run / "changes" / "merge-00000001.safetensors"
    whole = path.read_bytes()
    for content in (whole[:20], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=r"merge-00000001\.safetensors: not what was kept of a merge"):
            draw_plot("gradients", open_runs([run]), tmp_path, [])
