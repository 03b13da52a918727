"""Every kind of plot is drawn, labelled and saved; a plot that cannot be drawn is refused with one sentence."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import write_models
from synthetic_runs import write_run, write_study

from fleetbed.analysis.figures.curve_plots import curves_figure, pareto_figure, pareto_front
from fleetbed.analysis.figures.nets import dataset_of, final_models, initial_tensors
from fleetbed.analysis.figures.plot import draw_plot
from fleetbed.analysis.figures.style import COLOURS, KNOWN, MARKERS, looks, save
from fleetbed.analysis.page.payload import payload
from fleetbed.analysis.tables.compare import side_by_side
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
        ("loss", ["loss"]),
        ("pareto", ["pareto"]),
        ("groups", ["groups"]),
        ("inco", ["inco"]),
        ("metrics", ["metrics"]),
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


POLICIES = (
    Policy(),
    Policy(kind="deadline", deadline_s=50),
    Policy(kind="async", concurrency=2),
    Policy(kind="buffered", concurrency=2, buffer=2),
)


def test_methods_under_policies_share_a_panel_as_long_as_there_are_colours(tmp_path: Path) -> None:
    for method in ("fedavg", "inco"):
        for policy in POLICIES:
            write_run(tmp_path, method, methods=("fedavg", "inco"), seeds=(1,), clients=4, rounds=2, policy=policy)
    every = series_of(open_runs([tmp_path]))
    few = [one for one in every if one.policy in ("sync", "async")]
    (axes,) = curves_figure(few, "time", []).axes
    assert len({line.get_color() for line in axes.get_lines()}) == 4
    assert len({line.get_marker() for line in axes.get_lines()}) == 4
    panels = curves_figure(every, "time", []).axes
    assert [axes.get_title() for axes in panels] == ["fedavg", "inco"]
    for axes in panels:
        names = {text.get_text() for text in axes.get_legend().get_texts()}
        assert names == {"sync", "deadline", "async", "buffered"}
        assert len({line.get_color() for line in axes.get_lines()}) == 4


def test_axes_carry_their_units_and_lines_their_data(runs: list[Run]) -> None:
    (axes,) = curves_figure(series_of(runs), "bytes", [0.3]).axes
    assert axes.get_xlabel() == "Bytes up and down, whole fleet (GiB)"
    assert axes.get_ylabel() == "Test accuracy (%)"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["fedavg (2 seeds)", "inco (2 seeds)"]
    target, first, *_ = axes.get_lines()
    assert set(target.get_ydata()) == {0.3}
    assert first.get_drawstyle() == "steps-post"
    assert np.max(first.get_xdata()) == pytest.approx(sum(t.bytes_both for t in runs[0].tasks) / 2**30, rel=0.2)
    assert axes.get_legend().get_title().get_text() == "line: mean; band: ± 1 standard deviation"


def test_the_label_of_a_target_is_outside_the_axes(runs: list[Run]) -> None:
    (axes,) = curves_figure(series_of(runs), "time", [0.3]).axes
    axes.figure.canvas.draw()
    (label,) = axes.texts
    assert label.get_text() == "30 %"
    assert label.get_window_extent().x0 >= axes.get_window_extent().x1


def test_no_marker_of_the_pareto_figure_reaches_the_edge(runs: list[Run]) -> None:
    figure = pareto_figure(series_of(runs))
    figure.canvas.draw()
    for axes in figure.axes:
        box = axes.get_window_extent()
        for dots in axes.collections:
            radius = np.sqrt(dots.get_sizes()[0]) / 2 * figure.dpi / 72
            for x, y in axes.transData.transform(dots.get_offsets()):
                assert box.x0 < x <= box.x1 - radius
                assert box.y0 + radius <= y <= box.y1 - radius


def test_page_and_figure_draw_accuracy_by_round_from_the_same_points(runs: list[Run]) -> None:
    comparison = side_by_side(runs, None, [])
    data = payload(comparison)
    (axes,) = curves_figure(comparison.series, "rounds", comparison.targets).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    for one, curve in zip(data["series"], data["curves"]["rounds"], strict=True):
        line = lines[f"{one['label']} (2 seeds)"]
        np.testing.assert_allclose(line.get_xdata(), curve["x"])
        np.testing.assert_allclose(line.get_ydata(), curve["mean"], rtol=1e-4)
        assert COLOURS[one["colour"]] == line.get_color()
        assert MARKERS[one["marker"]] == line.get_marker()
    assert axes.get_ylim() == data["groups"][0]["range"]


def test_saving_twice_gives_the_same_bytes(runs: list[Run], tmp_path: Path) -> None:
    first, second = (save(curves_figure(series_of(runs), "time", []), tmp_path / name) for name in ("a", "b"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_a_method_always_has_the_same_colour() -> None:
    def series(*methods: str) -> list[Series]:
        return [Series(method, method, "sync", ()) for method in methods]

    alone, among = looks(series("fedin")), looks(series("private", "mine", "fedin", "heteroavg"))
    assert alone["fedin"] == among["fedin"]
    assert looks(series("inco-heteroavg"))["inco-heteroavg"] == looks(series("inco"))["inco"]
    everyone = looks(series(*KNOWN))
    assert len({(look.colour, look.marker) for look in everyone.values()}) == len(KNOWN)
    assert len(looks(series(*(f"own {n}" for n in range(60))))) == 60


@pytest.mark.parametrize(
    "labels",
    [
        ("heteroavg, sync", "heteroavg, deadline", "heteroavg, async"),
        ("heteroavg", "fedavg", "all-large", "fedin", "inco", "fedhe"),
        ("one", "two", "three", "four", "five", "six"),
    ],
)
def test_series_side_by_side_differ_in_colour_and_in_marker(labels: tuple[str, ...]) -> None:
    found = looks([Series(label, label.split(",")[0], "sync", ()) for label in labels])
    assert len({look.colour for look in found.values()}) == len(labels)
    assert len({look.marker for look in found.values()}) == len(labels)


def test_eleven_series_differ_in_colour_and_more_in_colour_or_marker() -> None:
    table_3 = (
        "inco",
        "inco-heteroprox",
        "inco-inclusivefl",
        "all-small",
        "heteroavg",
        "heterofl",
        "scalefl",
        "inclusivefl",
    )
    for labels in (table_3, KNOWN[:11], KNOWN[-11:], [f"method {number}" for number in range(11)]):
        found = looks([Series(label, label, "sync", ()) for label in labels])
        assert len({look.colour_number for look in found.values()}) == len(labels)
    many = looks([Series(f"method {number}", "mine", "sync", ()) for number in range(24)]).values()
    assert len({(look.colour_number, look.marker_number) for look in many}) == 24


def lab(colour: str) -> np.ndarray:
    """CIELAB of a colour such as #0072B2, by its definition (D65)."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(matrix) @ linear / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("palette", ["figures", "light page", "dark page"])
def test_no_two_colours_are_alike(palette: str) -> None:
    css = (files("fleetbed.analysis.page") / "assets" / "report.css").read_text()
    found = re.findall(r"--c\d+: (#[0-9a-f]{6})", css)
    colours = {"figures": COLOURS, "light page": found[:11], "dark page": found[11:]}[palette]
    assert len(colours) == 11
    for first, second in itertools.combinations(colours, 2):
        assert np.linalg.norm(lab(first) - lab(second)) > 30, (first, second)
    hues = [np.degrees(np.arctan2(b, a)) % 360 for _, a, b in map(lab, colours) if np.hypot(a, b) > 20]
    assert sum(220 < hue < 310 for hue in hues) == 1  # one blue


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
