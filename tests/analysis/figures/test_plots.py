"""Every kind of plot is drawn, labelled and saved; a plot that cannot be drawn is refused with one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import write_models
from synthetic_runs import write_run, write_study

from fleetbed.analysis.figures.curve_plots import curves_figure, pareto_front
from fleetbed.analysis.figures.nets import dataset_of, final_models, initial_tensors
from fleetbed.analysis.figures.plot import draw_plot
from fleetbed.analysis.figures.style import COLOURS, KNOWN, looks, save
from fleetbed.analysis.tables.runs import Run, open_run, open_runs
from fleetbed.analysis.tables.series import Series, series_of
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Policy

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    study = write_study(tmp_path_factory.mktemp("study"), ("fedavg", "inco"), (1, 2), clients=10, rounds=4)
    write_models(study / "fedavg-sync-1", ("resnet10", "resnet14", "resnet26"))
    write_models(study / "inco-sync-1", ("resnet10", "resnet14", "resnet26"), moved=0.05)
    return open_runs([study])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("time", ["time"]),
        ("joules", ["joules"]),
        ("pareto", ["pareto"]),
        ("groups", ["groups"]),
        ("inco", ["inco"]),
        ("partition", ["partition"]),
        ("updates", ["updates"]),
        ("cka", ["cka", "cka_stages"]),
    ],
)
def test_each_kind_is_a_png_and_a_pdf(
    runs: list[Run], kind: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbed.analysis.figures.model_plots.CKA_SAMPLES", 24)
    written = draw_plot(kind, runs, tmp_path / "out", [])
    assert [p.name for p in written] == [f"{name}.{form}" for name in names for form in ("png", "pdf")]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert written[1].read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_features_have_a_figure_per_method(runs: list[Run], tmp_path: Path) -> None:
    written = draw_plot("features", runs, tmp_path, [])
    assert {p.name for p in written} == {f"features_{m}.{f}" for m in ("fedavg", "inco") for f in ("png", "pdf")}


def test_methods_under_policies_have_a_panel_each(tmp_path: Path) -> None:
    for method in ("fedavg", "inco"):
        for policy in (Policy(), Policy(kind="async", concurrency=2)):
            write_run(tmp_path, method, methods=("fedavg", "inco"), seeds=(1,), clients=4, rounds=2, policy=policy)
    panels = curves_figure(series_of(open_runs([tmp_path])), "time", []).axes
    assert [axes.get_title() for axes in panels] == ["fedavg", "inco"]
    for axes in panels:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [
            "async",
            "sync",
        ]  # as opened: neither experiment has both
        assert len({(line.get_color(), line.get_marker()) for line in axes.get_lines()}) == 2


def test_axes_carry_their_units_and_lines_their_data(runs: list[Run]) -> None:
    (axes,) = curves_figure(series_of(runs), "bytes", [0.3]).axes
    assert axes.get_xlabel() == "Bytes up and down, whole fleet (GB)"
    assert axes.get_ylabel() == "Test accuracy (%)"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["fedavg (2 seeds)", "inco (2 seeds)"]
    target, first, *_ = axes.get_lines()
    assert set(target.get_ydata()) == {0.3}
    assert first.get_drawstyle() == "steps-post"
    assert np.max(first.get_xdata()) == pytest.approx(sum(t.bytes_both for t in runs[0].tasks) / 1e9, rel=0.2)


def test_saving_twice_gives_the_same_bytes(runs: list[Run], tmp_path: Path) -> None:
    first, second = (save(curves_figure(series_of(runs), "time", []), tmp_path / name) for name in ("a", "b"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_a_method_always_has_the_same_colour() -> None:
    def series(*methods: str) -> list[Series]:
        return [Series(method, method, "sync", ()) for method in methods]

    alone, among = looks(series("fedin")), looks(series("private", "FedIN", "mine", "fedin", "heteroavg"))
    assert alone["fedin"] == among["fedin"] == among["FedIN"]
    assert among["mine"].colour not in {look.colour for name, look in among.items() if name != "mine"}
    everyone = looks(series(*KNOWN))
    assert len({(look.colour, look.marker) for look in everyone.values()}) == len(KNOWN)
    assert len(looks(series(*(f"own {n}" for n in range(60))))) == 60
    assert len(set(COLOURS)) == 7


def test_the_pareto_front_has_the_points_that_no_other_beats() -> None:
    assert pareto_front([(3, 0.9), (1, 0.5), (2, 0.4), (2, 0.7), (4, 0.8)]) == [(1, 0.5), (2, 0.7), (3, 0.9)]


def test_models_are_rebuilt_with_their_weights_and_found_again_at_their_start(runs: list[Run]) -> None:
    run = runs[0]
    dataset = dataset_of(run)
    models = final_models(run, dataset)
    assert [model.variant for model in models] == ["resnet10", "resnet14", "resnet26"]
    start = initial_tensors(run, dataset, models[1])
    moved = [float((p.detach() - start[n]).std()) for n, p in models[1].net.named_parameters() if p.ndim > 1]
    assert moved == pytest.approx([0.01] * len(moved), rel=0.2)  # what write_models added


def test_a_plot_that_cannot_be_drawn_is_refused(runs: list[Run], tmp_path: Path) -> None:
    lone = open_run(write_run(tmp_path, "fedavg", rounds=2))
    with pytest.raises(BadInput, match="plot inco: no run recorded theta or beta"):
        draw_plot("inco", [lone], tmp_path, [])
    with pytest.raises(BadInput, match="it has no final models, because they were removed"):
        draw_plot("cka", [lone], tmp_path, [])
    with pytest.raises(BadInput, match=r"plot KIND: there is no kind of plot 'tme'; did you mean time"):
        draw_plot("tme", runs, tmp_path, [])
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot write there"):
        draw_plot("groups", runs, tmp_path / "file" / "x", [])


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", rounds=1)
    write_models(folder, ("resnet10",))
    path = folder / "models" / "resnet10.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadInput, match=r"resnet10\.safetensors: not an intact model"):
        draw_plot("updates", [open_run(folder)], tmp_path, [])
