"""The command line around a run: its output, its exit codes, its forecast."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from small_runs import TINY, query

from fleetbed.cli.main import main

OVER_RAY = ("--set", "processes=ray", "--set", "timing.source=modelled")
ARGUMENTS = ["demo", *(part for setting in TINY for part in ("--set", setting))]


def fleetbed(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleetbed.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_study_is_carried_out_and_its_folder_printed(tmp_path: Path) -> None:
    done = fleetbed("run", *ARGUMENTS, "--set", "seeds=[1, 2]", "--set", "rounds=1", "--out", "mine", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert "round 1/1" in done.stderr
    assert done.stderr.splitlines()[-1] == "see the results with: fleetbed report mine"
    for seed in (1, 2):
        folder = tmp_path / "mine" / f"heteroavg-sync-{seed}"
        assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"done"',)]
    again = fleetbed("run", *ARGUMENTS, "--out", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "mine: the folder already exists" in again.stderr
    resumed = fleetbed("run", "--resume", "mine", "--json", cwd=tmp_path)
    assert resumed.returncode == 0
    assert resumed.stderr.count("already done") == 2
    told = json.loads(resumed.stdout)
    assert told["runs"] == [f"mine/heteroavg-sync-{seed}" for seed in (1, 2)]
    for seed in (1, 2):
        found = told["results"][f"heteroavg-sync-{seed}"]
        line = f"heteroavg-sync-{seed}: accuracy {found['scores']['global']:.1%} after round {found['round']}"
        assert line in done.stderr.splitlines()[-3:-1]
        assert line in resumed.stderr.splitlines()[-2:]
    one = fleetbed("run", "--resume", "mine/heteroavg-sync-2", cwd=tmp_path)
    assert (one.returncode, one.stdout, one.stderr.count("already done")) == (0, "mine/heteroavg-sync-2\n", 1)
    for options in (["--jobs", "2"], ["--set", "rounds=2"], ["--only", "heteroavg-sync-1"]):
        refused = fleetbed("run", "--resume", "mine/heteroavg-sync-2", *options, cwd=tmp_path)
        assert refused.returncode == 2
        assert "is a single run: use --set, --jobs and --only with the folder of its study" in refused.stderr


@pytest.mark.slow
def test_the_forecast_matches_the_run(tmp_path: Path) -> None:
    told = fleetbed("run", *ARGUMENTS, "--dry-run", "--json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    (forecast,) = json.loads(told.stdout)["runs"]
    assert list(tmp_path.iterdir()) == []
    assert (forecast["clients"], forecast["unfit"], forecast["tasks"]) == (8, 0, 16)
    fleetbed("run", *ARGUMENTS, "--set", "processes=inline", "--out", "mine", cwd=tmp_path)
    folder = tmp_path / "mine" / "heteroavg-sync-1"
    ((device_s,),) = query(folder, "SELECT max(device_end_s) FROM rounds")
    assert forecast["device_s"] == pytest.approx(device_s, rel=1e-9)
    stored = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert stored < 3 * forecast["disk_bytes"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run"], "either an experiment or --resume"),
        (["run", "demo", "--jobs", "2"], "timing.source enforced needs the host to itself"),
        (["run", "demo", "--only", "a"], "--only RUN needs --resume DIR"),
        (["run", "demo", "--dry-run", "--jobs", "2"], "timing.source enforced needs the host to itself"),
        (["run", "demo", "--dry-run", "--out", "."], "--out .: the folder already exists"),
        (["run", "--resume", ".", "--dry-run"], "--dry-run cannot be used with --resume"),
        (["run", "--resume", ".", "--out", "x"], "--out cannot be used with --resume"),
        (["run", "--resume", ".", "--profiles", "."], "--profiles cannot be used with --resume"),
        (["run", "--resume", ".", "--only", "a", "--jobs", "2"], "--only RUN cannot be used with --jobs"),
        (
            ["run", "demo", "--address", "a:1"],
            "--address a:1 is for --on ray, and for processes: ray, which no run has.",
        ),
        (["run", "demo", *OVER_RAY, "--jobs", "2"], "a run with processes: ray uses all cores of all nodes; remove"),
        (["run", "--resume", ".", "--only", "a", "--set", "rounds=9"], "--set cannot be used with --only"),
        (["run", "--resume", ".", "--set", "rounds=9"], "not the folder of a study"),
        (["run", "demoo"], "demo"),
        (["run", "demo", "--set", "algorithms=[{name: fedinn}]"], "fedin"),
        (["run", "demo", "--set", "model.family=resnet-stages"], "resnet-stage"),
        (["run", "demo", "--set", "model.variants=[resnet11]"], "resnet10"),
        (["run", "demo", "--set", "timing.source=fast"], "modelled"),
        (["run", "demo", "--set", "server.device=serverr"], "server"),
        (["run", "--resume", "nowhere"], "not the folder of a study"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    err = capfd.readouterr().err
    assert end.value.code == 2, err
    assert err.count("\n") == 1, err
    assert err.startswith("fleetbed: ")
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


def test_bad_input_ends_the_command_with_its_exit_code(tmp_path: Path) -> None:
    done = fleetbed("run", "demo", "--set", "algorithms=[{name: fedinn}]", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_cleanly_stopped_run_can_be_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fleetbed.cli.main", "run", *ARGUMENTS, "--set", "rounds=200", "--out", "mine"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # under nohup we ignore it, and so would the command
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("round 2/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        assert process.wait() == 130
    assert "continue with: fleetbed run --resume mine" in rest
    assert "Traceback" not in rest
    folder = tmp_path / "mine" / "heteroavg-sync-1"
    assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"interrupted"',)]
    assert not _workers_of(process.pid)


def _workers_of(broker: int) -> list[str]:
    """Processes that were started for this broker: its zygote's folder is named after it."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_text()
                except OSError:
                    continue
                if f"-{broker}-" in line and "fleetbed-" in line:
                    found.append(line)
        if not found:
            return []
        time.sleep(0.1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["processes=inline", pytest.param("processes=on-demand", marks=pytest.mark.slow)])
def test_runs_side_by_side_come_to_the_same(tmp_path: Path, setting: str) -> None:
    seeds = ("--set", "seeds=[1, 2, 3]", "--set", "rounds=1", "--set", setting)
    one = fleetbed("run", *ARGUMENTS, *seeds, "--out", "one", cwd=tmp_path)
    two = fleetbed("run", *ARGUMENTS, *seeds, "--out", "two", "--jobs", "2", cwd=tmp_path)
    assert (one.returncode, two.returncode, two.stdout) == (0, 0, "two\n"), two.stderr
    assert "heteroavg-sync-2: round 1/1" in two.stderr
    for seed in (1, 2, 3):
        ours, theirs = (tmp_path / name / f"heteroavg-sync-{seed}" for name in ("one", "two"))
        results = "SELECT task, client, outcome, uploaded_s, loss, bytes_up FROM tasks ORDER BY task"
        assert query(ours, results) == query(theirs, results) != []
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == sorted(p.name for p in (tmp_path / "one").iterdir())


@pytest.mark.slow
def test_a_run_that_fails_stops_the_others_which_can_be_resumed(tmp_path: Path) -> None:
    seeds = ("--set", "seeds=[1, 2]", "--set", "rounds=3", "--set", "processes=inline")
    assert fleetbed("run", *ARGUMENTS, *seeds, "--out", "s", "--jobs", "2", cwd=tmp_path).returncode == 0
    checkpoints = tmp_path / "s" / "heteroavg-sync-1" / "state"
    with sqlite3.connect(tmp_path / "s" / "heteroavg-sync-1" / "run.sqlite") as db:
        db.execute("UPDATE meta SET value = '\"running\"' WHERE key = 'status'")
    for file in checkpoints.glob("checkpoint-*"):
        file.write_bytes(b"")
    broken = fleetbed("run", "--resume", "s", "--jobs", "2", cwd=tmp_path)
    assert broken.returncode == 1
    assert "run heteroavg-sync-1 failed" in broken.stderr
    assert "Traceback" not in broken.stderr
    only = fleetbed("run", "--resume", "s", "--only", "heteroavg-sync-2", cwd=tmp_path)
    assert only.returncode == 0
    assert "already done" in only.stderr


@pytest.mark.slow
def test_a_killed_command_leaves_none_of_its_runs_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fleetbed.cli.main", "run", *ARGUMENTS, "--set", "rounds=500"]
    command += ["--set", "seeds=[1, 2]", "--set", "processes=inline", "--out", "s", "--jobs", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "round 1/" not in process.stderr.readline():
        assert process.poll() is None
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    runs = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    assert runs
    process.kill()
    process.wait()
    process.stderr.close()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in runs):
        assert time.monotonic() < deadline, "a run outlived the command that started it"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_job_that_is_killed_is_never_a_success(tmp_path: Path) -> None:
    """Not even for a parent that does not want to know how its children end, which is inherited."""
    command = [sys.executable, "-m", "fleetbed.cli.main", "run", *ARGUMENTS, "--set", "rounds=500"]
    command += ["--set", "seeds=[1, 2]", "--set", "processes=inline", "--out", "s", "--jobs", "2"]
    careless = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=careless) as process:
        assert process.stderr is not None
        while "heteroavg-sync-1: round 1/" not in (line := process.stderr.readline()):
            assert line, "it ended before its time"
        (victim,) = _commands_with("--only", "heteroavg-sync-1", str(process.pid))
        os.kill(victim, signal.SIGKILL)
        rest = process.stderr.read()
        assert process.wait() == 1, rest
    assert "fleetbed: run heteroavg-sync-1 was ended by signal 9" in rest
    assert "Traceback" not in rest
    assert query(tmp_path / "s" / "heteroavg-sync-2", "SELECT value FROM meta WHERE key = 'status'") == [
        ('"interrupted"',)
    ]


def _commands_with(option: str, value: str, parent: str) -> list[int]:
    """The children of a process whose command line has this option."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in children.read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if option in words and words[words.index(option) + 1] == value:
                found.append(int(pid))
    return found


@pytest.mark.slow
def test_rounds_are_added_by_the_command(tmp_path: Path) -> None:
    inline = ("--set", "processes=inline", "--set", "seeds=[1, 2]")
    assert fleetbed("run", *ARGUMENTS, *inline, "--set", "rounds=1", "--out", "s", cwd=tmp_path).returncode == 0
    assert fleetbed("run", *ARGUMENTS, *inline, "--set", "rounds=3", "--out", "w", cwd=tmp_path).returncode == 0
    more = fleetbed("run", "--resume", "s", "--set", "rounds=3", "--jobs", "2", cwd=tmp_path)
    assert (more.returncode, more.stdout) == (0, "s\n"), more.stderr
    for seed in (1, 2):
        same = "SELECT task, client, outcome, uploaded_s, loss, bytes_up FROM tasks ORDER BY task"
        assert query(tmp_path / "s" / f"heteroavg-sync-{seed}", same) == query(
            tmp_path / "w" / f"heteroavg-sync-{seed}", same
        )


@pytest.mark.slow
def test_a_run_without_a_result_does_not_end_the_others(tmp_path: Path) -> None:
    policies = "policies=[{kind: deadline, deadline_s: 0.036}, {kind: sync}]"
    command = ["run", *ARGUMENTS, "--set", "processes=inline", "--set", policies, "--out", "s", "--jobs", "2"]
    done = fleetbed(*command, cwd=tmp_path)
    statuses = {
        path.parent.name: query(path.parent, "SELECT value FROM meta WHERE key = 'status'")[0][0]
        for path in (tmp_path / "s").glob("*/run.sqlite")
    }
    assert statuses == {"heteroavg-deadline-1": '"empty"', "heteroavg-sync-1": '"done"'}, done.stderr
    assert done.returncode == 1
    assert "fleetbed: heteroavg-deadline-1: no result was merged" in done.stderr
    assert "heteroavg-sync-1: accuracy" in done.stderr
