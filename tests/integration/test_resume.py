"""A run that was stopped at any moment can be resumed, with the same result as an undisturbed one."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from observers import StopAfter, Stopped
from same_runs import results, traces_of, workers_in
from small_runs import TINIER as TINY
from small_runs import query

from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.machine.calibration import Calibration, HostRate, Store, host_fingerprint
from fleetbed.emulator.resume import identity
from fleetbed.emulator.run.study import resume_study, start_study
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.resolve import load_experiment

SYNC = ("rounds=3", "participation.ratio=0.5")
ASYNC = ("rounds=2", "policies=[{kind: async, concurrency: 3}]")
BUFFERED = ("rounds=2", "policies=[{kind: buffered, buffer: 3, concurrency: 4}]")
#: the method whose clients keep a model of their own
KEEPING = ("rounds=3", "algorithms=[{name: fedhe}]", "participation.ratio=0.5")
#: a run that keeps what its merges did, and what they were made of, in files of their own
MERGES = (*SYNC, "evaluation.changes=['layer*conv?.weight']", "evaluation.client_models=true")

#: `fleetbed run` that kills itself: while it handles the nth event, or with the nth checkpoint half written
DOOMED = """
import os, signal, sys
from fleetbed.cli.main import main
from fleetbed.emulator.wire import storage
from fleetbed.emulator.engine.engine import Engine

moment, left = sys.argv.pop(1), int(sys.argv.pop(1))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def handle(self, event, real=Engine._handle):
    global left
    left -= 1
    if left == 0:
        die()
    real(self, event)

def write(path, content, real=storage._write):
    global left
    real(path, content)
    if "checkpoint" in str(path):
        left -= 1
        if left == 0:
            os.truncate(path, os.path.getsize(path) // 2)
            die()

if moment == "event":
    Engine._handle = handle
else:
    storage._write = write
main()
"""


def study(folder: Path, *sets: str, observer: Observer | None = None) -> Path:
    experiment = load_experiment("demo", (), (*TINY, *sets))
    return start_study(experiment, folder, search=(), command="test", observer=observer or Observer())[0]


def command(*arguments: str, sets: tuple[str, ...] = ()) -> list[str]:
    return [*arguments, *(word for each in (*TINY, *sets) for word in ("--set", each))]


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(SYNC, id="sync"),
        pytest.param(ASYNC, id="async"),
        pytest.param(BUFFERED, id="buffered", marks=pytest.mark.slow),
        pytest.param(KEEPING, id="keeping", marks=pytest.mark.slow),
        pytest.param(MERGES, id="merges"),
    ],
)
def test_it_ends_the_same_wherever_it_was_stopped(tmp_path: Path, sets: tuple[str, ...]) -> None:
    sets = (*sets, "processes=inline")
    whole = results(study(tmp_path / "whole", *sets))
    stopped = tmp_path / "stopped"
    with pytest.raises(Stopped):
        study(stopped, *sets, observer=StopAfter(17))
    for ticks in (1, 14, 5, 9):
        with pytest.raises(Stopped):
            resume_study(stopped, StopAfter(ticks))
    (folder,) = resume_study(stopped, Observer())
    assert results(folder) == whole
    assert len(whole["kept"]) == (2 * 3 if MERGES[-1] in sets else 0)
    assert not list(folder.rglob("*.part"))


@pytest.mark.slow
def test_it_survives_kill_9_while_it_works_and_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    whole = results(study(tmp_path / "whole", *MERGES, "processes=inline"))
    folder = tmp_path / "killed"
    lives = [
        command(sys.executable, "-c", DOOMED, "event", "17", "run", "demo", "--out", str(folder), sets=MERGES),
        [sys.executable, "-c", DOOMED, "checkpoint", "1", "run", "--resume", str(folder)],
    ]
    for life in lives:
        broker = subprocess.Popen(life, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        assert broker.wait() == -signal.SIGKILL
    assert list(folder.rglob("*.part"))
    (found,) = resume_study(folder, Observer())
    # the mode is part of the configuration, but what comes out of it is not
    assert results(found) == whole
    assert not list(folder.rglob("*.part"))
    assert workers_in(found) == []
    assert traces_of(broker.pid) == []


@pytest.mark.slow
def test_nothing_is_left_when_broker_and_zygote_were_killed_together(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    life = command(sys.executable, "-m", "fleetbed.cli.main", "run", "demo", "--out", str(folder), sets=("rounds=50",))
    broker = subprocess.Popen(life, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    run = folder / "heteroavg-sync-1"
    while not (run / "state" / "checkpoint-00000001.safetensors").exists():
        assert broker.poll() is None
        time.sleep(0.05)
    workers = workers_in(run)
    (zygote,) = [process for process in workers if "zygote" in " ".join(process.cmdline())]
    assert len(workers) > 8
    broker.send_signal(signal.SIGSTOP)  # or it may clean up before it is killed itself
    os.kill(zygote.pid, signal.SIGKILL)
    broker.kill()
    # looked for before it is reaped: from then on any other run that starts may clean up
    assert any(traces_of(pid) for pid in (broker.pid, zygote.pid))
    broker.wait()
    for process in workers:  # clients die with the zygote
        process.wait(10)
    study(tmp_path / "next", "rounds=1")
    assert traces_of(broker.pid) + traces_of(zygote.pid) == []


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    sets = ("processes=inline", "rounds=1", "seeds=[1, 2]")
    whole = [results(tmp_path / "whole" / name) for name in _names(study(tmp_path / "whole", *sets).parent)]
    folder = tmp_path / "killed"
    study(folder, *sets)
    second = folder / "heteroavg-sync-2"
    for path in (second / "state").iterdir():
        path.unlink()
    shutil.rmtree(second / "models")
    (second / "run.sqlite").write_bytes(b"")  # as it is before its first transaction
    for part in (".setup.json.123.part", "state/.checkpoint-00000000.safetensors.123.part"):
        (second / part).write_bytes(b"half")
    observer = StopAfter(10**9)
    folders = resume_study(folder, observer)
    assert [results(each) for each in folders] == whole
    assert "already done" in observer.said


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A study that was stopped in its third round, with two checkpoints."""
    with pytest.raises(Stopped):
        study(tmp_path / "stopped", *SYNC, "processes=inline", observer=StopAfter(30))
    return tmp_path / "stopped"


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/state/checkpoint-*"))


def _newest(folder: Path) -> int:
    """The number of merges that the newest checkpoint has; -1 without one."""
    return max((int(path.stem.split("-")[1]) for path in _checkpoints(folder)), default=-1)


def damage(path: Path, *, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, stopped: Path) -> None:
    whole = results(study(tmp_path / "whole", *SYNC, "processes=inline"))
    _, newest = _checkpoints(stopped)
    damage(newest, at=0.9)
    observer = StopAfter(10**9)
    (folder,) = resume_study(stopped, observer)
    assert any(newest.name in text and "continuing from an older checkpoint" in text for text in observer.said)
    assert results(folder) == whole


def test_if_every_checkpoint_is_damaged_the_message_gives_advice(stopped: Path) -> None:
    for path in _checkpoints(stopped):
        damage(path, at=0.01)  # in the header, where no tensor lies
    with pytest.raises(Exception, match=r"checkpoint-.*checkpoint-.*move .* away, and --resume starts"):
        resume_study(stopped, Observer())


def _edit_study(folder: Path, **changes: Any) -> None:
    content = msgspec.json.decode((folder / "study.json").read_bytes())
    content["experiment"]["training"] |= changes
    (folder / "study.json").write_bytes(msgspec.json.encode(content))


def test_another_configuration_is_refused_with_the_differences(stopped: Path) -> None:
    _edit_study(stopped, batch=8)
    with pytest.raises(BadInput, match=r"configuration.*experiment\.training\.batch \(4 then, 8 now\)"):
        resume_study(stopped, Observer())


def test_another_version_is_refused_and_named(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "version", lambda name: "9.9" if name == "torch" else "0.1.0")
    with pytest.raises(BadInput, match=r"versions.* torch \(2\.\S+ then, 9\.9 now\)"):
        resume_study(stopped, Observer())


def test_another_device_is_refused_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "profiles" / "devices"
    folder.mkdir(parents=True)
    device = folder / "mine.yaml"
    device.write_text(
        "title: mine\ntrains_on: cpu\ncpu: {description: x, cores: 1, fp32_gflops: 2}\n"
        "memory: {installed_mib: 1000, visible_mib: 900, available_mib: 800, bandwidth_gb_s_measured: 2}\n"
        "link: ethernet_1g\n"
    )
    sets = (*TINY, "processes=inline", "server.device=mine")
    experiment = load_experiment("demo", (folder.parent,), sets)
    with pytest.raises(Stopped):
        start_study(experiment, tmp_path / "s", search=(folder.parent,), command="", observer=StopAfter(30))
    device.write_text(device.read_text().replace("fp32_gflops: 2", "fp32_gflops: 3"))
    with pytest.raises(BadInput, match=r"profiles changed: server "):
        resume_study(tmp_path / "s", Observer())


def test_other_data_is_refused_and_named(tmp_path: Path) -> None:
    def write(seed: int) -> None:
        rng = np.random.default_rng(seed)
        x = rng.integers(0, 255, (240, 16, 16), dtype=np.uint8)
        y = np.arange(240) % 10
        np.savez(tmp_path / "own.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])

    write(1)
    with pytest.raises(Stopped):
        study(tmp_path / "s", f"data.name={tmp_path / 'own.npz'}", "processes=inline", observer=StopAfter(30))
    write(2)  # with the labels as they were, so that everybody has the same samples by number
    with pytest.raises(BadInput, match=r"profiles changed: data \("):
        resume_study(tmp_path / "s", Observer())


def test_a_study_that_somebody_works_on_is_left_alone(tmp_path: Path) -> None:
    class Intruder(Observer):
        refused = 0

        def tick(self) -> None:
            with pytest.raises(BadInput, match="another process is using this folder"):
                resume_study(tmp_path / "s", Observer())
            self.refused += 1

    observer = Intruder()
    study(tmp_path / "s", "processes=inline", "rounds=1", observer=observer)
    assert observer.refused > 0


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had it was just done, and the next one would make a new file."""
    only = study(tmp_path / "s", "processes=inline", "rounds=1").name
    real = fcntl.flock

    def flock(lock: int, kind: int) -> None:
        real(lock, kind)
        path = Path(f"/proc/self/fd/{lock}").readlink()
        if path.name != "study.lock":
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(BadInput, match="another process is using this folder"):
        resume_study(tmp_path / "s", Observer(), only=only)


@pytest.mark.slow
def test_an_enforced_run_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its durations are measured anew, so only what was merged before is the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rate = HostRate(alone_gflops=50.0, busy_gflops=40.0, cores=2, alone_spread=0.0, busy_spread=0.0, other_cores=0.0)
    Store().save(Calibration(host_fingerprint(), "2020-01-01", rate))
    sets = (*ASYNC, "timing.source=enforced")

    class AfterFive(Observer):
        def start(self, engine: Engine, evaluations: Evaluations) -> None:
            self.engine = engine

        def tick(self) -> None:
            if hasattr(self, "engine") and self.engine.progress.version >= 5:
                raise Stopped

    with pytest.raises(Stopped):
        study(tmp_path / "s", *sets, observer=AfterFive())
    before = "SELECT task, client, uploaded_s, merged_version FROM tasks WHERE merged_version <= 5 ORDER BY task"
    merged = query(tmp_path / "s" / "heteroavg-async-1", before)
    (folder,) = resume_study(tmp_path / "s", Observer())
    assert query(folder, before) == merged
    assert query(folder, "SELECT max(version), max(round), count(*) FROM rounds") == [(16, 2, 16)]
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome NOT IN ('ok', 'late')") == [(0,)]


@pytest.mark.slow
@pytest.mark.parametrize("sets", [("rounds=12",), ("rounds=12", "policies=[{kind: async}]")], ids=["sync", "async"])
def test_kills_at_random_moments(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """Four whenever it happens, two with a checkpoint half written."""
    whole = results(study(tmp_path / "whole", *sets))
    draw = random.Random(len(sets))
    folder, said = tmp_path / "killed", tmp_path / "said"
    begin = command("run", "demo", "--out", str(folder), sets=sets)
    table = []
    pids = []

    def popen(life: list[str]) -> subprocess.Popen[bytes]:
        with said.open("ab") as errors:
            return subprocess.Popen(life, stderr=errors, stdout=subprocess.DEVNULL)

    for number in range(10):
        words = ["run", "--resume", str(folder)] if (folder / "study.json").exists() else begin
        if number % 3 == 2:
            life = [sys.executable, "-c", DOOMED, "checkpoint", str(draw.randint(1, 2)), *words]
            broker = popen(life)
            moment = "in a checkpoint"
        else:
            life = [sys.executable, "-m", "fleetbed.cli.main", *words]
            broker = popen(life)
            merges, wait_s = draw.randint(0, 2), draw.uniform(0.0, 1.5)
            moment = f"{wait_s:.2f} s after {merges} merges"
            until = _newest(folder) + merges
            while _newest(folder) < until and broker.poll() is None:
                time.sleep(0.01)
            time.sleep(wait_s)
            broker.kill()
        assert broker.wait() in (-signal.SIGKILL, 0), said.read_text()[-1000:]
        pids.append(broker.pid)
        table.append((number + 1, moment, f"at merge {_newest(folder)}"))
    (found,) = resume_study(folder, Observer())
    print(*table, results(found)["weights"], whole["weights"], sep="\n")
    assert results(found) == whole
    assert workers_in(found) == []
    assert [trace for pid in pids for trace in traces_of(pid)] == []
    assert query(found, "SELECT count(*) - count(DISTINCT task) FROM tasks") == [(0,)]
