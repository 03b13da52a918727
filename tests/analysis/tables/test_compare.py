"""Comparisons against numbers calculated by hand."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from handmade import make_evaluation, make_task
from synthetic_runs import write_run, write_study

from fleetbed.analysis.tables.compare import compare_runs, records
from fleetbed.analysis.tables.runs import Run, open_run, open_runs
from fleetbed.analysis.tables.summary_table import column_names, summary_tables
from fleetbed.analysis.tables.writing import Table, csv_text
from fleetbed.profiles.errors import BadInput


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two methods, two seeds; the second method reaches 50 % in one of them only."""
    found = []
    curves = {
        ("fedavg", 1): [(0, 0.1), (10, 0.3), (20, 0.5)],
        ("fedavg", 2): [(0, 0.1), (10, 0.4), (40, 0.6)],
        ("fedin", 1): [(0, 0.1), (5, 0.6), (20, 0.7)],
        ("fedin", 2): [(0, 0.1), (5, 0.3), (20, 0.4)],
    }
    for (method, seed), points in curves.items():
        run = open_run(write_run(tmp_path, method, seed, methods=("fedavg", "fedin"), seeds=(1, 2), rounds=2))
        tasks = (
            make_task(1, 0, 1, (0, 1, 1, 3, 4), flops=3e9, peak_bytes=70),
            make_task(2, 1, 1, (0, 1, 1, 3, None), flops=1e9, peak_bytes=90, outcome="oom", merged_version=None),
        )
        evaluations = tuple(make_evaluation(v, x, a) for v, (x, a) in enumerate(points))
        found.append(replace(run, tasks=tasks, evaluations=evaluations))
    return found


def test_the_numbers_of_a_study(runs: list[Run]) -> None:
    base, other = records(compare_runs(runs, "fedavg", [0.5]))
    assert (base["method"], base["seeds"], base["reached_0.5"], base["time_to_0.5"]) == ("fedavg", 2, 2, 30.0)
    assert base["final_mean"] == pytest.approx(0.55)
    assert base["final_sd"] == pytest.approx(np.std([0.5, 0.6], ddof=1))
    assert (base["difference_mean"], base["speed_up_0.5"]) == (None, 1.0)
    assert (other["reached_0.5"], other["time_to_0.5"], other["speed_up_0.5"]) == (1, None, None)
    assert other["difference_mean"] == pytest.approx(((0.7 - 0.5) + (0.4 - 0.6)) / 2)
    assert (other["pairs"], other["difference_low"], other["difference_high"]) == (2, None, None)
    assert [other[f"difference_seed_{seed}"] for seed in (1, 2)] == [pytest.approx(0.2), pytest.approx(-0.2)]
    assert other["peak_bytes"] == 90
    assert other["dropped"] == pytest.approx(0.25)


def test_speed_up_is_over_the_seeds_of_both(runs: list[Run]) -> None:
    _, other = records(compare_runs(runs, "fedavg", [0.3]))
    assert other["speed_up_0.3"] == pytest.approx((10 + 10) / (5 + 5))


def test_a_target_that_is_never_reached(runs: list[Run]) -> None:
    written = summary_tables(compare_runs(runs, None, [0.5, 0.65]))[0].rows[1]
    assert "reached by 1 of 2" in written
    assert "not reached" in summary_tables(compare_runs(runs, None, [0.95]))[0].rows[0]


def test_the_table_in_its_three_forms(runs: list[Run]) -> None:
    (found,) = summary_tables(compare_runs(runs, None, [0.5]))
    lines = found.markdown().splitlines()
    assert lines[0].startswith("| Method | Seeds | Final accuracy | Best accuracy | Difference to fedavg |")
    assert lines[2].startswith("| fedavg | 2 | 55.0 ± 7.1 % | 55.0 ± 7.1 % | – | 30 ± 14 s | 40 ± 0 B |")
    assert "| +20.0, −20.0 (2 pairs) |" in lines[3]
    latex = found.latex()
    assert r"55.0 $\pm$ 7.1 \%" in latex
    assert latex.count(r"\\") == 3
    rows = records(compare_runs(runs, None, [0.5]))
    back = list(csv.DictReader(io.StringIO(csv_text(list(rows[0]), [list(r.values()) for r in rows]))))
    assert float(back[0]["time_to_0.5"]) == 30.0
    assert back[1]["time_to_0.5"] == ""


def test_the_columns_of_a_paper(runs: list[Run]) -> None:
    found = compare_runs(runs, None, [0.3])
    (table,) = summary_tables(found, ["final", "speed-up", "tightest"])
    assert table.columns == ("Method", "Final accuracy", "Speed-up to 30 %", "Memory of the tightest device")
    assert table.rows[0] == ("fedavg", "55.0 ± 7.1 %", "1.00×", "90 of 100 B (pi-zero-2w)")
    assert table.rows[1][2] == "2.00 ± 0.00×"  # twice as fast with either seed
    assert column_names(" final, time ,") == ["final", "time"]
    with pytest.raises(BadInput, match=r"--columns: there is no column 'accuracy'; .*allowed are best, bytes"):
        column_names("final,accuracy")
    with pytest.raises(BadInput, match="--columns: name at least one column of seeds, final"):
        column_names(" , ")


def test_special_characters_survive_markdown_and_latex() -> None:
    odd = Table(("Method",), (("a|b_c & 50 %",),))
    assert "a\\|b_c & 50 %" in odd.markdown()
    assert r"a|b\_c \& 50 \%" in odd.latex()
    assert "a|b_c &amp; 50 %" in odd.html()


def test_other_data_is_refused_and_other_targets_too_unless_one_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", rounds=1)
    write_run(tmp_path / "b", "fedin", rounds=1, data="cifar10")
    write_run(tmp_path / "c", "fedin", rounds=1, targets=(0.7,))
    with pytest.raises(
        BadInput, match=r"differ in their data: name=cifar10; name=fashion-mini; compare the runs of one"
    ):
        compare_runs(open_runs([tmp_path / "a", tmp_path / "b"]), None, [])
    mixed = open_runs([tmp_path / "a", tmp_path / "c"])
    with pytest.raises(BadInput, match=r"differ in their targets: 0\.5; 0\.7; choose one with --target"):
        compare_runs(mixed, None, [])
    assert compare_runs(mixed, None, [0.6]).targets == (0.6,)


def test_other_differences_are_in_the_notes(tmp_path: Path, runs: list[Run]) -> None:
    other_fleet = msgspec.structs.replace(runs[3].config.experiment, fleet="elsewhere")
    moved = replace(runs[3], config=msgspec.structs.replace(runs[3].config, experiment=other_fleet))
    assert "These runs differ in their fleet: elsewhere; synthetic." in compare_runs([runs[0], moved], None, []).notes
    failed = open_run(write_run(tmp_path / "f", status="failed", stop_after=2))
    assert any(
        note.startswith("fedavg-sync-1 is failed after round 2") for note in compare_runs([failed], None, []).notes
    )


def test_a_study_from_disk(tmp_path: Path) -> None:
    found = compare_runs(open_runs([write_study(tmp_path, rounds=4)]), None, [])
    assert [one.label for one in found.series] == ["fedavg", "fedin"]
    assert found.targets == (0.5,)
