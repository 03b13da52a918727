"""The commands on runs: their output and files, and one sentence with exit code 2 for bad input."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest
from handmade import write_models
from synthetic_runs import write_run, write_study

from fleetbed.cli.main import main
from fleetbed.emulator.records.tables import SCHEMA_VERSION


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"), ("fedavg", "fedin"), (1, 2), rounds=5)


def run_command(*args: object) -> int:
    """The exit code."""
    try:
        main([str(arg) for arg in args])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def test_a_target_must_be_an_accuracy(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("compare", study, "--target", 60) == 2
    assert capsys.readouterr().err == "fleetbed: --target 60: an accuracy is from 0 to 1, such as 0.6.\n"


def test_report_writes_the_page_and_says_where(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("report", study, "--out", tmp_path / "r.html", "--target", 0.3) == 0
    *table, last = capsys.readouterr().out.splitlines()
    heads = ("Final accuracy", "Time to 30 %", "Memory of the tightest device", "Late or dropped work", "Degraded")
    assert all(head in table[1] for head in heads)
    assert [line.split()[0] for line in table[2:4]] == ["fedavg", "fedin"]
    assert [line.split(":")[0] for line in table[4:6]] == ["Best final accuracy", "Fastest to 30 %"]
    assert last.startswith(f"report: {tmp_path / 'r.html'} (1")
    assert (tmp_path / "r.html").exists()
    assert (tmp_path / "r_parts" / "clients.csv").exists()


def test_report_replaces_a_page_but_nothing_else(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, experiment = tmp_path / "r.html", tmp_path / "mine.yaml"
    assert run_command("report", study, "--out", page) == 0
    assert run_command("report", study, "--out", page) == 0
    experiment.write_text("title: mine\n")
    capsys.readouterr()
    assert run_command("report", study, "--out", experiment) == 2
    expected = (
        f"fleetbed: --out {experiment}: exists and is not a web page, so it is not replaced; choose another name.\n"
    )
    assert capsys.readouterr().err == expected
    assert experiment.read_text() == "title: mine\n"
    assert run_command("report", study, "--out", tmp_path) == 2
    assert "a folder, but the name of a page is needed" in capsys.readouterr().err


def test_report_of_one_client(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("report", study / "fedin-sync-1", "--client", "007") == 0
    out = capsys.readouterr().out
    assert "client 007" in out
    assert "median of pi-4b" in out
    assert run_command("report", study, "--client", "7", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {run["clients"][0]["client"] for run in found["runs"]} == {"007"}
    assert run_command("report", study, "--csv") == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 4 * 10


def test_compare_in_its_forms(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("compare", study, "--base", "fedavg") == 0
    assert capsys.readouterr().out.startswith("| Method | Seeds |")
    assert run_command("compare", study, "--columns", "final,memory") == 0
    assert capsys.readouterr().out.startswith("| Method | Final accuracy | Peak memory |\n")
    assert run_command("compare", study, "--format", "latex") == 0
    assert r"\begin{tabular}" in capsys.readouterr().out
    assert run_command("compare", study, "--format", "csv") == 0
    assert capsys.readouterr().out.startswith("method,policy,series,metric,seeds,diverged,final_mean")
    assert run_command("compare", study, "--show", "rounds") == 0
    assert "| Round 0 |" in capsys.readouterr().out
    assert run_command("compare", study, "--show", "costs", "--format", "csv") == 0
    assert capsys.readouterr().out.startswith("method,tasks,device_s,cpu_s,")
    assert run_command("compare", study, "--json") == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["methods"]] == ["fedavg", "fedin"]


def test_plot_and_export_print_the_files_they_wrote(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("plot", "groups", study, "--out", tmp_path) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "groups.png"), str(tmp_path / "groups.pdf")]
    assert run_command("export", study / "fedin-sync-1", "--format", "chrome-trace", "--out", tmp_path) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "fedin-sync-1.trace.json")]


def test_privacy_sigma_and_reconstruct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("privacy", "sigma", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sigma"] == pytest.approx(0.106, abs=5e-4)
    folder = write_run(tmp_path, rounds=1)
    write_models(folder, ("resnet10",))
    options = ("--noise", 0, "--images", 2, "--steps", 3, "--out", tmp_path / "out")
    assert run_command("privacy", "reconstruct", folder, *options) == 0
    assert "noise 0 sd: mean SSIM" in capsys.readouterr().out
    assert (tmp_path / "out" / "reconstruction.csv").read_text().startswith("noise_sd,image,ssim,lpips\n0.0,0,")


@pytest.mark.parametrize("command", [("report",), ("compare",), ("export",), ("plot", "time"), ("plot", "partition")])
def test_bad_folders_end_with_code_2_and_one_sentence(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = write_run(tmp_path / "newer", rounds=1)
    db = sqlite3.connect(newer / "run.sqlite")
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    db.commit()
    db.close()
    (tmp_path / "empty").mkdir()
    for folder, says in (
        (tmp_path / "missing", "no such folder"),
        (tmp_path / "empty", "no run, there is no run.sqlite"),
        (newer, f"schema_version is 99, this fleetbed reads up to {SCHEMA_VERSION}"),
    ):
        assert run_command(*command, folder) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("fleetbed: ")
        assert says in captured.err


def test_bad_options_end_with_code_2_and_one_sentence(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "other", "fedin", 1, data="cifar10")
    for args, says in (
        (("compare", study, tmp_path / "other"), "differ in their data"),
        (("compare", study, "--base", "nobody"), "--base nobody: there is no such method in these runs"),
        (("report", study, "--client", "77"), "--client 77: there is no such client"),
        (("compare", study, "--columns", "finl"), "--columns: there is no column 'finl'; did you mean final?"),
        (("compare", study, "--columns", "final", "--json"), "CSV and JSON have all of them"),
        (("plot", "pie", study), "there is no kind of plot 'pie'"),
        (("plot", "inco", study), "no run recorded theta or beta"),
        (("export", study, "--format", "xml"), "there is no format 'xml'"),
        (("privacy", "sigma", "--delta", 2), "--delta is 2"),
        (("privacy", "reconstruct", study / "fedin-sync-1"), "it has no final models"),
    ):
        assert run_command(*args) == 2, args
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert says in err


def test_an_unfinished_run_is_reported_and_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, status="running", stop_after=2)
    assert run_command("compare", folder) == 0
    assert "not finished: still running or killed after round 2 of 12" in capsys.readouterr().out
