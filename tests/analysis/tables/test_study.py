"""Runs are grouped into series by their configuration, not by their folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from synthetic_runs import write_run, write_study

from fleetbed.analysis.page.page import title
from fleetbed.analysis.tables.notes import run_differences
from fleetbed.analysis.tables.runs import open_runs
from fleetbed.analysis.tables.series import base_series, series_of
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Policy


def test_methods_keep_the_order_of_the_experiment_and_seeds_go_together(tmp_path: Path) -> None:
    runs = open_runs([write_study(tmp_path, ("fedin", "fedavg"), (2, 1), rounds=1)])
    assert [(s.label, s.seeds) for s in series_of(runs)] == [("fedin", (1, 2)), ("fedavg", (1, 2))]


def test_a_label_has_the_policy_only_if_there_are_several(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", rounds=1)
    write_run(tmp_path / "a", "fedavg", rounds=1, policy=Policy(kind="async"))
    assert [s.label for s in series_of(open_runs([tmp_path / "a"]))] == ["fedavg, async", "fedavg, sync"]
    write_run(tmp_path / "b", "fedavg", rounds=1, policy=Policy(kind="deadline", deadline_s=5))
    write_run(tmp_path / "c", "fedavg", rounds=1, policy=Policy(kind="deadline", deadline_s=9))
    labels = [s.label for s in series_of(open_runs([tmp_path / "b", tmp_path / "c"]))]
    assert labels == ["fedavg, deadline, deadline_s=5.0", "fedavg, deadline, deadline_s=9.0"]


def test_settings_that_differ_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", 1, rounds=1, title="A")
    write_run(tmp_path / "b", "fedavg", 2, rounds=2, title="B")
    series = series_of(open_runs([tmp_path / "a", tmp_path / "b"]))
    assert [s.label for s in series] == ["fedavg, sync, A", "fedavg, sync, B"]


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    first = write_run(tmp_path, "fedavg", 1, rounds=1)
    shutil.copytree(first, tmp_path / "copy")
    with pytest.raises(BadInput, match="fedavg with seed 1 occurs twice; remove one of them"):
        series_of(open_runs([tmp_path]))


def test_studies_with_the_same_title_are_named_by_their_folders(tmp_path: Path) -> None:
    """The same experiment before and after a change of the code."""
    for name in ("before", "after"):
        write_study(tmp_path / name, ("fedavg", "fedin"), (1, 2), rounds=1)
    runs = open_runs([tmp_path / "before", tmp_path / "after"])
    assert [one.label for one in series_of(runs)] == [
        f"{method}, sync, {name}" for method in ("fedavg", "fedin") for name in ("before", "after")
    ]
    assert title(runs) == "Synthetic fleet (before, after)"
    assert title(open_runs([tmp_path / "before"])) == "Synthetic fleet"
    write_run(tmp_path / "other" / "before", "fedavg", 1, rounds=1)
    runs = open_runs([tmp_path / "before" / "fedavg-sync-1", tmp_path / "other" / "before"])
    assert [one.label for one in series_of(runs)] == [
        f"fedavg, sync, {tmp_path / 'before'}",
        f"fedavg, sync, {tmp_path / 'other' / 'before'}",
    ]


def test_the_base_is_named_or_the_first(tmp_path: Path) -> None:
    series = series_of(open_runs([write_study(tmp_path, ("fedavg", "fedin"), (1,), rounds=1)]))
    assert base_series(series, None).label == "fedavg"
    assert base_series(series, "FedIN").label == "fedin"
    with pytest.raises(BadInput, match=r"--base fedx: there is no such method .*; their methods are fedavg, fedin"):
        base_series(series, "fedx")


def test_only_differences_are_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", rounds=1)
    write_run(tmp_path / "b", "fedin", rounds=1)
    assert run_differences(open_runs([tmp_path / "a", tmp_path / "b"])) == {}
    write_run(tmp_path / "c", "fedin", rounds=1, data="cifar10", targets=(0.7,))
    assert run_differences(open_runs([tmp_path / "a", tmp_path / "c"])) == {
        "data": "These runs differ in their data: name=cifar10; name=fashion-mini.",
        "targets": "These runs differ in their targets: 0.5; 0.7.",
    }
