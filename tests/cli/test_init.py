"""`fleetbed init`, and where profiles are looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fleetbed
from fleetbed.cli.main import main
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.resolve import VARIABLE, available, search_folders


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_the_files_pass_their_check_and_none_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own_cache: None
) -> None:
    folder = tmp_path / "mine"
    assert call("init", str(folder)) == 0
    written = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert {"experiment.yaml", "fleets/my-fleet.yaml", "devices/my-board.yaml", "my_net.py", "my_method.py"} < set(
        written
    )
    for name, text in written.items():
        if name.endswith(".yaml"):
            schema = text.splitlines()[0].partition("$schema=")[2]
            assert (folder / name).parent.joinpath(schema).resolve().is_relative_to(folder / "schemas")
    capsys.readouterr()
    checked = [str(folder / name) for name in written if name.endswith(".yaml")]
    assert call("profiles", "check", *checked) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count(": ok") == 3
    (folder / "experiment.yaml").unlink()
    assert call("init", str(folder)) == 2
    assert "fleets/my-fleet.yaml already exists" in capsys.readouterr().err
    assert not (folder / "experiment.yaml").exists()


@pytest.mark.slow
def test_the_experiment_runs_as_it_is_and_swept(tmp_path: Path, own_cache: None) -> None:
    assert call("init", str(tmp_path / "mine")) == 0
    sets = {"rounds": 1, "training.max_steps": 1, "sweep": {"training.optimizer.lr": [0.02, 0.1]}}
    results = fleetbed.run(tmp_path / "mine" / "experiment.yaml", set=sets, out=tmp_path / "runs", progress=False)
    assert results.finished
    assert sorted(results.states) == [
        f"{method}-sync-lr={lr}-1" for method in ("heteroavg", "my_method") for lr in (0.02, 0.1)
    ]
    rates = {(row["method"], row["training.optimizer.lr"]) for row in results.tasks}
    assert rates == {(method, lr) for method in ("heteroavg", "my_method") for lr in (0.02, 0.1)}
    assert [row["method"] for row in results.compare()] == [
        f"{method}, lr={lr}" for method in ("heteroavg", "my_method") for lr in (0.02, 0.1)
    ]
    assert "heteroavg, lr=0.02" in results.report().read_text()
    command = [sys.executable, "-m", "fleetbed.cli.main", "run", "--resume", str(tmp_path / "runs")]
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (again.returncode, again.stderr.count("already done")) == (0, 4)


def profile_folder(folder: Path, name: str) -> Path:
    (folder / "fleets").mkdir(parents=True)
    fleet = {"title": name, "members": [{"device": "raspberry-pi-5-8gb", "count": 1}]}
    (folder / "fleets" / f"{name}.yaml").write_text(yaml.safe_dump(fleet))
    return folder


def test_profiles_are_found_by_option_environment_and_beside_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (profile_folder(tmp_path / name, name) for name in ("one", "two", "three"))
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(one), str(two)]))
    assert search_folders(None) == (one, two)
    assert search_folders([three]) == (three,)
    assert search_folders(None, str(three / "mine.yaml")) == (one, two, three)
    assert search_folders([one], str(three / "experiments" / "mine.yaml")) == (one, three)
    assert search_folders([one], str(tmp_path / "mine.yaml")) == (one,)
    assert {"one", "two"} <= set(available("fleet", search_folders(None)))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match=f"{VARIABLE} .*nothing: there is no such folder"):
        search_folders(None)
