"""The report page and its parts are complete, self-contained, safe and correct."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_runs import write_run, write_study

from fleetbed.analysis.page.conditions import conditions
from fleetbed.analysis.page.page import page
from fleetbed.analysis.page.payload import payload
from fleetbed.analysis.page.report import clients_csv, report_json, write_report
from fleetbed.analysis.tables.clients import client_rows, find_client, kind_medians
from fleetbed.analysis.tables.compare import side_by_side
from fleetbed.analysis.tables.runs import open_run, open_runs
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Policy


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"), ("fedavg", "fedin"), (1, 2), clients=10, rounds=6)


@pytest.fixture(scope="module")
def written(study: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_report(open_runs([study]), tmp_path_factory.mktemp("out") / "report.html", "fedavg", [])


def embedded(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_page_needs_nothing_from_outside(written: list[Path]) -> None:
    html = written[0].read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:,)', html)
    assert "@import" not in html
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in html


def test_the_parts_are_written_next_to_the_page(written: list[Path]) -> None:
    first, *parts = written
    figures = [f"accuracy_{axis}.{kind}" for axis in ("time", "rounds", "bytes", "joules") for kind in ("png", "pdf")]
    figures += ["loss_time.png", "loss_time.pdf"]
    assert {p.name for p in parts} == {*figures, "comparison.csv", "clients.csv", "rounds.csv", "curves.csv"}
    assert all(p.parent == first.with_name("report_parts") and p.stat().st_size > 0 for p in parts)
    with first.with_name("report_parts").joinpath("rounds.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * 6


def test_the_page_shows_the_runs_and_their_limits(written: list[Path]) -> None:
    html = written[0].read_text()
    for text in (
        "fedavg, fedin on 10 clients with 5 kinds of device (fleet synthetic), 6 rounds, seeds 1, 2.",
        "Synthetic CPU @ 2.60GHz, 2 cores",
        "fleetbed run synthetic --seed 1",
        '<td class="text">pacing</td><td>10</td><td>0.2 %</td><td>0.3 %</td>',
        "no CUDA device",
    ):
        assert text in html, text


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ({}, "the largest variant that fits its device. Memory"),
        ({"choose": "common"}, "the largest variant that fits its device under every method. Memory"),
        ({"assign": ("resnet10",)}, "assigns a variant to every client, whether it fits the device or not. Memory"),
    ],
)
def test_the_page_says_how_variants_were_chosen(study: Path, model: dict[str, Any], note: str) -> None:
    run = open_runs([study])[0]
    experiment = run.config.experiment
    changed = msgspec.structs.replace(experiment, model=msgspec.structs.replace(experiment.model, **model))
    html = page(side_by_side([replace(run, config=msgspec.structs.replace(run.config, experiment=changed))], None, []))
    assert note in html


def test_limits_of_the_host_are_not_shown_as_limits_of_the_run(study: Path) -> None:
    run = open_run(study / "fedavg-sync-1")
    modelled = tuple(msgspec.structs.replace(c, status="modelled", backend="prediction", got=None) for c in run.caps)
    told = conditions([replace(run, caps=tuple(cap for cap in modelled if cap.knob == "memory"))])
    assert '<td class="text status-modelled">modelled</td><td class="text">prediction</td><td>10</td>' in told
    assert '<th scope="row">cpu</th><td class="text status-not">not used</td>' in told
    assert "status-enforced" not in told
    assert "status-unavailable" in told  # the GPU
    live = conditions([replace(run, caps=())])
    assert '<th scope="row">cpu</th><td class="text status-enforced">enforced</td>' in live


def test_the_embedded_tasks_are_those_of_the_run(study: Path, written: list[Path]) -> None:
    data = embedded(written[0].read_text())
    run = open_run(study / "fedin-sync-2")
    (shown,) = (one for one in data["runs"] if one["label"] == "fedin, seed 2")
    columns, tick = shown["tasks"], shown["tasks"]["tick_s"]
    assert len(columns["client"]) == len(run.tasks)
    start, starts = 0.0, []
    for step in columns["start"]:
        start += step
        starts.append(start * tick)
    for place, task in enumerate(sorted(run.tasks, key=lambda task: (task.dispatched_s, task.client))):
        assert starts[place] == pytest.approx(task.dispatched_s, abs=tick)
        assert columns["compute"][place] * tick == pytest.approx(task.phases().get("compute", 0.0), abs=tick)
        assert data["outcomes"][columns["outcome"][place]] == task.outcome


def test_text_of_a_run_cannot_become_code_in_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>&"
    write_run(tmp_path / "runs", title=evil, rounds=1)
    text = page(side_by_side(open_runs([tmp_path / "runs"]), None, []))
    assert "alert(1)</script>" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_runs_that_did_not_end_and_runs_that_differ_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", status="failed", stop_after=2)
    write_run(tmp_path, "fedin", data="cifar10")
    text = page(side_by_side(open_runs([tmp_path]), None, []))
    assert "fedavg-sync-1 is failed after round 2 of 12: client 003 sent a message that is too large." in text
    assert "These runs differ in their data" in text


def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path) -> None:
    import sqlite3

    folder = write_run(tmp_path, status="running")
    with sqlite3.connect(folder / "run.sqlite") as db:
        for table in ("tasks", "rounds", "evaluations", "metrics", "notices"):
            db.execute(f"DELETE FROM {table}")
    db.close()
    first, *parts = write_report(open_runs([tmp_path]), tmp_path / "r.html", None, [])
    assert "not finished" in first.read_text()
    assert not [p for p in parts if p.suffix == ".png"]


def test_a_place_that_cannot_be_written_is_bad_input(study: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--out .*file: cannot write there"):
        write_report(open_runs([study]), tmp_path / "file" / "report.html", None, [])


def test_timelines_are_left_out_beyond_the_limit(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbed.analysis.page.payload.MOST_TASKS", 60)
    data = payload(side_by_side(open_runs([study]), None, []))
    assert [(run["label"], run["tasks"] is not None) for run in data["runs"]] == [
        ("fedavg, seed 1", True),
        ("fedavg, seed 2", False),
        ("fedin, seed 1", True),
        ("fedin, seed 2", False),
    ]


def test_a_client_row_sums_its_tasks(study: Path) -> None:
    run = open_run(study / "fedavg-sync-1")
    row = client_rows(run, "global")[3]
    tasks = [task for task in run.tasks if task.client == 3]
    assert row.client == "003"
    assert row.tasks == len(tasks) == 6
    assert row.bytes_down == sum(task.bytes_down for task in tasks)
    assert row.compute_s == pytest.approx(sum(task.phases().get("compute", 0.0) for task in tasks))
    assert row.ok + row.late + row.oom + row.crash + row.offline == 6
    assert row.peak_bytes == max(task.peak_bytes or 0 for task in tasks)
    newest = [e for e in run.evaluations if e.version == 6 and e.variant == row.variant]
    assert row.accuracy == newest[0].accuracy


def test_energy_without_a_task_is_idle_watts_over_the_rest_of_the_run(study: Path) -> None:
    run = open_run(study / "fedavg-sync-1")
    for row, client in zip(client_rows(run, "global"), run.clients, strict=True):
        if client.idle_w is None:
            assert row.idle_joules is None
        else:
            assert row.idle_joules == pytest.approx(client.idle_w * max(0.0, run.device_s - row.device_s))
    assert any(row.idle_joules for row in client_rows(run, "global"))


def test_an_unfit_client_has_a_row_without_work(study: Path) -> None:
    row = client_rows(open_run(study / "fedavg-sync-1"), "global")[9]
    assert (row.variant, row.tasks, row.peak_bytes, row.joules, row.accuracy) == (None, 0, None, None, None)


def test_medians_are_of_the_same_kind(study: Path) -> None:
    rows = client_rows(open_run(study / "fedavg-sync-1"), "global")
    samples = sorted(row.samples for row in rows if row.device == "pi-3b")
    assert kind_medians(rows)["pi-3b"]["samples"] == sum(samples) / 2  # two of that kind
    assert "joules" not in kind_medians(rows)["phone-2018"]  # no power in its profile


def test_one_client_by_name_as_csv_and_json(study: Path) -> None:
    runs = open_runs([study])
    (header, *lines) = csv.reader(clients_csv(runs, "007").splitlines())
    assert [line[header.index("client")] for line in lines] == ["007"] * 4
    found = report_json(runs, "fedavg", [0.3], "7")
    assert [run["clients"][0].client for run in found["runs"]] == ["007"] * 4
    assert found["targets"] == [0.3]
    with pytest.raises(BadInput, match=r"--client 900: there is no such client in .*; its clients are 000 to 009\."):
        find_client(runs[0], "900")


def test_every_policy_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path, policy=Policy(kind="async"), rounds=3)
    write_run(tmp_path, policy=Policy(kind="deadline", deadline_s=40), rounds=3)
    data = payload(side_by_side(open_runs([tmp_path]), None, []))
    by_label = {run["label"]: run for run in data["runs"]}
    assert by_label["fedavg, async, seed 1"]["rounds"]["waited_for"] == []
    assert {row["outcome"] for row in by_label["fedavg, deadline, seed 1"]["waste"]} >= {"late"}
