"""Accuracies of different series (other models or other data) are never mixed or compared."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import make_evaluation
from synthetic_runs import write_run
from test_report import embedded
from test_report_commands import run_command

from fleetbed.analysis.figures.plot import draw_plot
from fleetbed.analysis.page.page import page
from fleetbed.analysis.page.report import write_report
from fleetbed.analysis.tables.by_round import accuracy_tables
from fleetbed.analysis.tables.clients import client_rows
from fleetbed.analysis.tables.compare import compare_runs, records
from fleetbed.analysis.tables.export import export
from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.analysis.tables.series import series_of
from fleetbed.analysis.tables.summary_table import summary_tables
from fleetbed.emulator.method.series import default_series
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import EvaluationRow
from fleetbed.profiles.errors import BadInput


def _evaluations(**accuracies: float) -> tuple[EvaluationRow, ...]:
    """Of two rounds; the personal ones are of clients 0 and 1, one on 30 and one on 10 samples."""
    rows = []
    for version in (0, 1, 2):
        share = version / 2
        if "everyone" in accuracies:
            rows.append(make_evaluation(version, 5.0 * version, share * accuracies["everyone"], target="global"))
        for name, local in (("own", 1), ("whole", 0)):
            for client, samples in ((0, 30), (1, 10)):
                if name in accuracies:
                    who = {"client": client, "local": local, "samples": samples, "target": f"{name}-{client}"}
                    rows.append(make_evaluation(version, 5.0 * version, share * accuracies[name], **who))
    return tuple(rows)


def _run(folder: Path, method: str, seed: int = 1, **accuracies: float) -> Run:
    run = open_run(write_run(folder, method, seed, methods=("fedavg", "fedin", "fedhe"), seeds=(1, 2, 3), rounds=2))
    return replace(run, evaluations=_evaluations(**accuracies))


@pytest.fixture
def homo(tmp_path: Path) -> Run:
    """As FedHeNN-homo: a global model on the whole test set, and personal ones on their own parts."""
    return _run(tmp_path, "fedin", everyone=0.465, own=0.925)


def test_the_default_is_the_papers_and_old_runs_without_it_have_a_rule(homo: Run) -> None:
    assert "series" not in homo.meta  # a run of an earlier version
    assert records(compare_runs([homo], None, []))[0]["final_mean"] == pytest.approx(0.925)
    declared = replace(homo, meta={**homo.meta, "series": "global"})
    assert records(compare_runs([declared], None, []))[0]["final_mean"] == pytest.approx(0.465)
    assert default_series({"global", "personal-all"}, None) == "global"
    assert default_series({"personal-all"}, None) == "personal-all"
    assert default_series(set(), None) == "global"


def test_the_reader_chooses(homo: Run, tmp_path: Path) -> None:
    for asked, accuracy in (("global", 0.465), ("personal-own", 0.925)):
        found = compare_runs([homo], None, [], asked)
        assert records(found)[0]["final_mean"] == pytest.approx(accuracy)
        assert records(found)[0]["series"] == asked
        assert f"{100 * accuracy:.1f} %" in summary_tables(found)[0].markdown()
        assert f"{100 * accuracy:.1f} %" in accuracy_tables(found)[0].markdown()
        assert f"{100 * accuracy:.1f} %" in page(found)
        (path,) = export([homo], "chrome-trace", tmp_path / asked, asked)
        counters = [e["args"]["accuracy"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "C"]
        assert counters[-1] == pytest.approx(accuracy)
        assert client_rows(homo, found.groups[0].shown)[0].accuracy == pytest.approx(accuracy)
    with pytest.raises(BadInput, match=r"--series personal-all: none of these runs .*personal-own, global"):
        compare_runs([homo], None, [], "personal-all")
    with pytest.raises(BadInput, match=r"--series: there is no series 'personal'; did you mean personal-all or"):
        compare_runs([homo], None, [], "personal")


def test_methods_in_different_series_are_not_set_side_by_side(homo: Run, tmp_path: Path) -> None:
    average = _run(tmp_path, "fedavg", everyone=0.6)
    alone = _run(tmp_path, "fedhe", whole=0.3)
    found = compare_runs([average, homo, alone], None, [])
    assert {group.shown: [s.series.label for s in group.summaries] for group in found.groups} == {
        "global": ["fedavg"],
        "personal-own": ["fedin"],
        "personal-all": ["fedhe"],
    }
    assert [row["difference_mean"] for row in records(found)] == [None, None, None]
    written = summary_tables(found)
    assert [table.title.split(":")[0] for table in written] == [
        "Series global",
        "Series personal-own",
        "Series personal-all",
    ]
    assert any(note.startswith("Methods are shown in different series, which are not compared") for note in found.notes)
    html = page(found)
    assert "Methods are shown in different series, which are not compared" in html.split("<main>")[0]
    assert [group["shown"] for group in embedded(html)["groups"]] == ["global", "personal-own", "personal-all"]
    names = {path.name for path in draw_plot("time", [average, homo, alone], tmp_path / "figures", [])}
    assert {"time_global.png", "time_personal-own.png", "time_personal-all.png"} <= names


def test_in_a_common_series_they_are_compared_and_one_that_lacks_it_is_named(homo: Run, tmp_path: Path) -> None:
    average, alone = _run(tmp_path, "fedavg", everyone=0.6), _run(tmp_path, "fedhe", whole=0.3)
    found = compare_runs([average, homo, alone], "fedavg", [], "global")
    (group,) = found.groups
    assert [row["difference_mean"] for row in records(found)] == [None, pytest.approx(0.465 - 0.6), None]
    assert "fedhe has no series global; it has personal-all." in found.notes
    assert summary_tables(found)[0].rows[2][:5] == ("fedhe", "1", "–", "–", "–")
    assert "not reached" not in summary_tables(found)[0].rows[2]
    assert group.shown == "global"
    first, *parts = write_report([average, homo, alone], tmp_path / "r.html", None, [], "global")
    assert "fedhe has no series global" in first.read_text()
    assert "accuracy_time.png" in {part.name for part in parts}


def test_the_series_of_evaluations_are_exported(homo: Run, tmp_path: Path) -> None:
    written = {path.name: path for path in export([homo], "csv", tmp_path / "out")}
    rows = list(csv.DictReader(io.StringIO(written["evaluations.csv"].read_text())))
    assert {row["target"]: row["series"] for row in rows} == {
        "global": "global",
        "own-0": "personal-own",
        "own-1": "personal-own",
    }
    with pytest.raises(BadInput, match=r"--series personal-all: .* was not evaluated so; it has personal-own, global"):
        export([homo], "chrome-trace", tmp_path / "out", "personal-all")


def test_the_commands_take_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs", rounds=2)
    records_of = Records(folder / "run.sqlite")
    records_of.write([make_evaluation(2, 9.0, 0.875, target="client-000", client=0, local=1, samples=50)])
    records_of.close()
    assert run_command("compare", folder) == 0
    assert "87.5 %" in capsys.readouterr().out
    assert run_command("compare", folder, "--series", "global") == 0
    assert "87.5 %" not in capsys.readouterr().out
    for command in (("report",), ("plot", "time"), ("export",)):
        out = tmp_path / ("report.html" if command == ("report",) else "out")
        assert run_command(*command, folder, "--out", out, "--series", "personal-own") == 0
        capsys.readouterr()
        assert run_command(*command, folder, "--out", out, "--series", "mine") == 2
        assert "--series: there is no series 'mine'" in capsys.readouterr().err


def test_a_series_that_the_method_declares_is_shown_before_anything_was_evaluated(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, rounds=1))
    begun = replace(run, meta={**run.meta, "series": "personal-all"}, evaluations=())
    assert series_of([begun])[0].shown == "personal-all"
