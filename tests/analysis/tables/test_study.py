"""Runs are grouped into series by their configuration, not by their folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_runs import write_run, write_study

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
    write_run(tmp_path / "a", "fedavg", 1, rounds=1)
    write_run(tmp_path / "b", "fedavg", 1, rounds=1)
    with pytest.raises(BadInput, match="fedavg with seed 1 occurs twice; remove one of them"):
        series_of(open_runs([tmp_path / "a", tmp_path / "b"]))


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
