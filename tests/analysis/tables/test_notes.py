"""Cautions are on the report's first page and below the tables: divergence, variants, the host."""

from __future__ import annotations

import csv
import io
import json
import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from handmade import make_evaluation
from synthetic_runs import write_run, write_study
from test_report import embedded
from test_report_commands import run_command

from fleetbed.analysis.figures.plot import draw_plot
from fleetbed.analysis.page.conditions import conditions
from fleetbed.analysis.page.page import page
from fleetbed.analysis.page.report import report_json, write_report
from fleetbed.analysis.tables.compare import compare_runs, records, side_by_side
from fleetbed.analysis.tables.curves import band, curve
from fleetbed.analysis.tables.export import export
from fleetbed.analysis.tables.notes import cautions, variant_notes
from fleetbed.analysis.tables.runs import Run, open_run, open_runs
from fleetbed.analysis.tables.series import series_of
from fleetbed.analysis.tables.summary_table import summary_tables
from fleetbed.analysis.tracking.points import Sent, new_points
from fleetbed.emulator.records.tables import MetricRow


def diverging(folder: Path, seed: int = 1) -> Run:
    """Rounds 0 and 1 learn; in round 2 one of two models has no finite loss, from round 3 on none has one."""
    run = open_run(write_run(folder, "fedavg", seed, seeds=(1, 2), rounds=4, targets=()))
    losses = {0: (2.0, 2.0), 1: (1.0, 1.0), 2: (math.inf, 1.0), 3: (None, None), 4: (None, math.nan)}
    rows = [
        make_evaluation(version, 10.0 * version, 0.1 + 0.1 * version, target=f"v{place}", loss=loss)
        for version, pair in losses.items()
        for place, loss in enumerate(pair)
    ]
    return replace(run, evaluations=tuple(rows))


def test_a_curve_has_a_gap_where_no_model_has_a_finite_loss(tmp_path: Path) -> None:
    found = curve(diverging(tmp_path), "time", "global")
    assert found is not None
    np.testing.assert_allclose(found.y, [0.1, 0.2, 0.3, np.nan, np.nan])
    assert found.first_reaching(0.3) == 20.0
    assert found.first_reaching(0.4) is None


def test_divergence_is_reported_and_every_command_still_works(tmp_path: Path) -> None:
    run = diverging(tmp_path)
    said = "fedavg-sync-1 diverged in round 2: the loss of 1 of 2 models is not finite."
    found = compare_runs([run], None, [])
    assert any(note.startswith(said) for note in found.notes)
    assert summary_tables(found)[0].rows[0][2:4] == ("diverged", "30.0 %")
    (row,) = records(found)
    assert (row["final_mean"], row["diverged"], row["best_mean"]) == (None, 1, pytest.approx(0.3))
    html = page(found)
    assert said in html.split("<main>")[0]
    assert embedded(html)["curves"]["time"][0]["mean"] == [0.1, 0.2, 0.3, None, None]
    for kind in ("time", "rounds", "bytes", "joules", "flops"):
        assert draw_plot(kind, [run], tmp_path / "figures", [])
    write_report([run], tmp_path / "r.html", None, [])
    for form in ("csv", "chrome-trace"):
        for path in export([run], form, tmp_path / "out"):
            if path.suffix == ".json":
                json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert all(math.isfinite(value) for point in new_points(run, Sent())[0] for value in point.values.values())


def test_a_seed_that_diverged_is_counted_and_not_averaged(tmp_path: Path) -> None:
    gone = diverging(tmp_path)
    other = open_run(write_run(tmp_path, "fedavg", 2, seeds=(1, 2), rounds=4, targets=()))
    sound = replace(other, evaluations=tuple(make_evaluation(v, 10.0 * v, 0.1 + 0.1 * v) for v in range(5)))
    (series,) = series_of([gone, sound])
    found = band(series, "time")
    assert found is not None
    np.testing.assert_allclose(found.mean, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert summary_tables(compare_runs([gone, sound], None, []))[0].rows[0][2] == "50.0 % (1 of 2 seeds diverged)"


def test_nothing_but_divergence_still_has_a_report(tmp_path: Path) -> None:
    run = diverging(tmp_path)
    run = replace(run, evaluations=tuple(msgspec.structs.replace(e, loss=None) for e in run.evaluations))
    first, *parts = write_report([run], tmp_path / "r.html", None, [])
    assert "diverged in round 0: the loss of 2 of 2 models is not finite" in first.read_text()
    assert "accuracy_time.png" in {part.name for part in parts}


def test_a_loss_of_null_is_read_as_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And an accuracy of NULL beside a finite loss, which no version has ever written for classes, as damage."""
    folder = write_run(tmp_path, rounds=3)
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("CREATE TABLE other AS SELECT * FROM evaluations")
        db.execute("DROP TABLE evaluations")
        db.execute("ALTER TABLE other RENAME TO evaluations")
        db.execute("UPDATE evaluations SET loss = NULL WHERE version >= 2")
    db.close()
    assert run_command("compare", folder) == 0
    assert "fedavg-sync-1 diverged in round 2: the loss of" in capsys.readouterr().out
    assert run_command("compare", folder, "--show", "rounds") == 0
    assert "| diverged | diverged |" in capsys.readouterr().out
    assert run_command("plot", "groups", folder, "--out", tmp_path) == 2
    assert "no run has a final accuracy" in capsys.readouterr().err
    assert run_command("report", folder, "--out", tmp_path / "r.html") == 0
    capsys.readouterr()
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("UPDATE evaluations SET accuracy = NULL WHERE version = 1")
    db.close()
    assert run_command("compare", folder) == 2
    assert "table evaluations: neither accuracy nor mae" in capsys.readouterr().err


def _with_variants(run: Run, *variants: str) -> Run:
    clients = tuple(
        msgspec.structs.replace(client, variant=variant) for client, variant in zip(run.clients, variants, strict=False)
    )
    return replace(run, clients=clients, tasks=())


def test_methods_that_trained_different_variants_are_named_on_the_first_page(tmp_path: Path) -> None:
    fedavg, fedin = open_runs([write_study(tmp_path, seeds=(1,), rounds=2)])
    same = [_with_variants(run, *["resnet26"] * 8) for run in (fedavg, fedin)]
    assert variant_notes(series_of(same)) == []
    mixed = [same[0], _with_variants(fedin, *["resnet18"] * 2, *["resnet26"] * 6)]
    found = compare_runs(mixed, None, [])
    said = "trained different variants, so part of a difference may come from the models: "
    said += "fedavg 8 × resnet26; fedin 2 × resnet18, 6 × resnet26."
    assert any(said in note for note in found.notes)
    assert said in page(found).split("<main>")[0]
    assert said in summary_tables(found)[0].markdown()
    moved = [_with_variants(fedavg, "resnet18", "resnet26"), _with_variants(fedin, "resnet26", "resnet18")]
    assert "1 × resnet18, 1 × resnet26, but not on the same clients" in variant_notes(series_of(moved))[0]


def test_a_client_that_stepped_down_in_one_method_is_noticed(tmp_path: Path) -> None:
    fedavg, fedin = open_runs([write_study(tmp_path, seeds=(1,), rounds=2)])
    down = replace(fedin, tasks=(*fedin.tasks[:-1], msgspec.structs.replace(fedin.tasks[-1], variant="resnet10")))
    assert fedin.tasks[-1].variant != "resnet10"
    assert variant_notes(series_of([fedavg, fedin])) == []
    assert f"1 × {fedin.tasks[-1].variant}, then resnet10" in variant_notes(series_of([fedavg, down]))[0]


def test_limits_that_the_host_could_also_enforce_are_shown(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, rounds=1))
    modelled = tuple(msgspec.structs.replace(cap, status="modelled", backend="plan") for cap in run.caps)
    told = conditions([replace(run, caps=modelled)])
    assert '<th scope="row">cpu</th><td class="text status-modelled">modelled</td>' in told
    assert '<th scope="row">cpu</th><td class="text status-not">not used</td><td class="text">pacing + cgroup' in told
    assert '<th scope="row">gpu-compute</th><td class="text status-unavailable">unavailable</td>' in told
    knob = {"knob": "gpu-compute", "status": "unavailable", "backend": "none", "note": "no GPU", "enable": "buy one"}
    assert "no GPU To enable: buy one" in conditions([replace(run, meta={**run.meta, "host_can": [knob]})])


def test_metrics_of_tasks_are_in_report_and_exports(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, rounds=2))
    tasks = [task for task in run.tasks if task.client in (0, 1)]
    values = {task.task: float(number) for number, task in enumerate(tasks)}
    reported = [MetricRow(task.round, task.task, "distance", values[task.task]) for task in tasks]
    run = replace(run, metrics=(*reported, MetricRow(1, tasks[0].task, "broken", None)))
    html = page(side_by_side([run], None, []))
    assert "fedavg: distance</th><td>4</td><td>1.50</td>" in html
    assert "fedavg: broken</th><td>1, 1 not finite</td><td>–</td>" in html
    assert set(embedded(html)["runs"][0]["metrics"]["distance"]) == {"000", "001"}
    assert report_json([run], None, [], None)["runs"][0]["task_metrics"]["distance"].keys() == {0, 1}
    parts = {path.name: path for path in write_report([run], tmp_path / "r.html", None, [])}
    rows = list(csv.DictReader(io.StringIO(parts["task_metrics.csv"].read_text())))
    assert [float(row["value"]) for row in rows if row["name"] == "distance"] == list(values.values())
    sent = {name: value for point in new_points(run, Sent())[0] for name, value in point.values.items()}
    assert sent["method/distance"] == 2.5  # the mean of 2 and 3, in the last round
    assert "method/broken" not in sent


def test_a_sound_study_has_no_cautions(tmp_path: Path) -> None:
    assert cautions(series_of(open_runs([write_study(tmp_path, rounds=2)]))) == []


def test_a_disturbed_calibration_is_one_caution_for_all_runs(tmp_path: Path) -> None:
    runs = open_runs([write_study(tmp_path, ("fedavg", "fedin"), (1,), rounds=1)])
    cores = {"fedavg-sync-1": "others kept 0.9 cores busy", "fedin-sync-1": "others kept 1.1 cores busy"}
    disturbed = [
        replace(run, meta={**run.meta, "calibration": {"disturbed": {"rate": cores[run.name]}}}) for run in runs
    ]
    assert [note for note in cautions(series_of(disturbed)) if "calibration" in note] == [
        "fedavg-sync-1, fedin-sync-1 may have been paced too fast or too slowly: other processes disturbed the "
        "calibration of the host (others kept 0.9 cores busy; others kept 1.1 cores busy)."
    ]
    assert not any("calibration" in note for note in cautions(series_of(runs)))


def on_hosts(folder: Path, **hosts: tuple[str, str]) -> list[str]:
    """The cautions about runs of two methods and two seeds, on these hosts by name and CPU type, else on `one`."""
    runs = []
    for run in open_runs([write_study(folder / "study", methods=("fedavg", "fedprox"), seeds=(1, 2))]):
        name, cpu = hosts.get(run.name.replace("-sync-", "_"), ("one", "A"))
        runs.append(replace(run, meta={**run.meta, "host": {"name": name, "cpu": cpu}}))
    return [note for note in cautions(series_of(runs)) if "processor" in note]


def test_pairs_on_unequal_processors_are_a_caution(tmp_path: Path) -> None:
    assert on_hosts(tmp_path, fedprox_2=("two", "B")) == [
        "Runs that are compared were carried out on different processors, so part of a difference may come from these: "
        "seed 2: fedavg on A, fedprox on B."
    ]


def test_equal_pairs_on_unequal_processors_are_named(tmp_path: Path) -> None:
    assert on_hosts(tmp_path, fedavg_2=("two", "B"), fedprox_2=("two", "B")) == [
        "Runs were carried out on different processors, but those of one seed on the same: seed 1: A; seed 2: B."
    ]


def test_several_hosts_with_one_processor_are_named(tmp_path: Path) -> None:
    assert on_hosts(tmp_path, fedprox_2=("two", "A")) == [
        "The runs were carried out on 2 hosts with the same processor, A."
    ]


def test_one_host_needs_no_word(tmp_path: Path) -> None:
    assert on_hosts(tmp_path) == []
