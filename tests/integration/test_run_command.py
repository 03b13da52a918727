"""The command line around a run: what it prints, how it ends, what it says beforehand."""

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

ARGUMENTS = ["demo", *(part for setting in TINY for part in ("--set", setting))]


def fleetbed(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleetbed.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


def test_a_study_is_carried_out_and_its_folder_printed(tmp_path: Path) -> None:
    done = fleetbed("run", *ARGUMENTS, "--set", "seeds=[1, 2]", "--set", "rounds=1", "--out", "mine", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert "round 1/1" in done.stderr
    for seed in (1, 2):
        folder = tmp_path / "mine" / f"heteroavg-sync-{seed}"
        assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"done"',)]
    again = fleetbed("run", *ARGUMENTS, "--out", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "mine: the folder exists" in again.stderr
    resumed = fleetbed("run", "--resume", "mine", cwd=tmp_path)
    assert resumed.returncode == 0
    assert resumed.stderr.count("done before") == 2


def test_what_it_will_take_is_told_beforehand_and_is_what_it_takes(tmp_path: Path) -> None:
    told = fleetbed("run", *ARGUMENTS, "--dry-run", "--json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    (forecast,) = json.loads(told.stdout)
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
        (["run", "demo", "--jobs", "2"], "timing.source enforced need the host for themselves"),
        (["run", "demo", "--only", "a"], "--only RUN goes with --resume DIR"),
        (["run", "demoo"], "demo"),
        (["run", "demo", "--set", "algorithms=[{name: fedinn}]"], "fedin"),
        (["run", "demo", "--set", "model.family=resnet-stages"], "resnet-stage"),
        (["run", "demo", "--set", "model.variants=[resnet11]"], "resnet10"),
        (["run", "demo", "--set", "timing.source=fast"], "calibrated"),
        (["run", "demo", "--set", "server.device=serverr"], "server"),
        (["run", "--resume", "nowhere"], "not the folder of a study"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = fleetbed(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("fleetbed: ")
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_polite_end_can_be_gone_on_with(tmp_path: Path) -> None:
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
    assert "go on with: fleetbed run --resume mine" in rest
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


@pytest.mark.parametrize(
    "setting", ["processes=inline", pytest.param("timing.source=calibrated", marks=pytest.mark.slow)]
)
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


def test_one_that_fails_ends_the_others_and_they_can_be_gone_on_with(tmp_path: Path) -> None:
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
    assert "done before" in only.stderr


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
