"""`fleetbed.run` and `fleetbed.fit` with real experiments: by name, by mapping, interrupted and continued."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml
from small_runs import TINIER, query

import fleetbed
from fleetbed.profiles.settings import apply_settings

SETTINGS = apply_settings({}, [*TINIER, "processes=inline", "rounds=1"])
EXPERIMENT = {"title": "From Python", "fleet": "demo", **SETTINGS}


def test_a_mapping_is_run_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads, frozen = torch.get_num_threads(), gc.get_freeze_count()
    results = fleetbed.run(EXPERIMENT, set={"seeds": (3,), "training.optimizer.lr": 0.02}, out=tmp_path / "mine")
    assert (results.folder, results.finished) == (tmp_path / "mine", True)
    (run,) = results.runs
    assert (run.config.seed, run.config.experiment.training.optimizer.lr) == (3, 0.02)
    assert {row["outcome"] for row in results.tasks} == {"ok"}
    assert "round 1/1" in capsys.readouterr().err
    assert run.about.command == "fleetbed.run('experiment', set={'seeds': (3,), 'training.optimizer.lr': 0.02})"
    assert (torch.get_num_threads(), gc.get_freeze_count(), gc.isenabled()) == (threads, frozen, True)
    more = fleetbed.run(resume=tmp_path / "mine", set={"rounds": 2}, progress=False)
    assert capsys.readouterr().err == ""
    assert max(row["round"] for row in more.rounds) == 2


def test_a_path_is_run_in_a_thread_and_its_paths_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    monkeypatch.chdir(tmp_path)
    found: list[fleetbed.Results] = []
    worker = threading.Thread(target=lambda: found.append(fleetbed.run(Path("mine.yaml"), progress=False)))
    worker.start()
    worker.join()
    (results,) = found
    assert results.finished
    assert results.folder.parent == Path("runs")
    assert results.folder.name.startswith("mine-")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "needs either an experiment or resume"),
        ({"experiment": "demo", "resume": "x"}, "needs either an experiment or resume"),
        ({"experiment": "dmeo"}, "there is no experiment 'dmeo'; did you mean demo"),
        ({"experiment": ["demo"]}, "the experiment is a list of 1, but a name, a path or a mapping"),
        ({"experiment": {"title": "x"}}, "the experiment: the key fleet is missing"),
        ({"experiment": "demo", "set": {"rounds": object()}}, "set 'rounds' has a value that YAML cannot hold"),
        ({"experiment": "demo", "set": {"training.speed": 1}}, "training.speed: there is no key 'speed'"),
        ({"experiment": "demo", "only": "fedin-sync-1"}, "only= needs resume=FOLDER"),
        ({"experiment": "demo", "jobs": 2}, "needs the host to itself"),
        ({"resume": "x", "out": "y"}, "leave out= and profiles= out"),
    ],
)
def test_wrong_arguments_are_a_sentence(
    arguments: dict[str, object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fleetbed.BadInput, match=sentence.replace("(", r"\(")):
        fleetbed.run(**arguments)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_fit_says_what_each_device_trains() -> None:
    table = fleetbed.fit("demo", set={"algorithms": [{"name": "heteroavg"}, {"name": "fedin"}]})
    assert {row["method"] for row in table} == {"heteroavg", "fedin"}
    for method in ("heteroavg", "fedin"):
        assert sorted(number for row in table if row["method"] == method for number in row["clients"]) == list(range(8))
    assert all(row["memory_bytes"] < row["cap_bytes"] and row["reason"] for row in table)


@pytest.mark.slow
def test_in_small_boards_memory_and_time_decide_and_all_methods_train_the_same() -> None:
    table = fleetbed.fit("small-boards")
    trained: dict[str, dict[str, str]] = {}
    for row in table:
        trained.setdefault(row["method"], {})[row["device"]] = row["variant"]
    assert list(trained) == ["heteroavg", "fedin", "inco"]
    assert trained["heteroavg"] == trained["fedin"] == trained["inco"]
    assert len(set(trained["fedin"].values())) >= 3
    stopped_by = {row["stopped_by"]["name"] for row in table if row["stopped_by"]}
    assert {"memory", "time"} <= stopped_by


INTERRUPTED = """
import os, signal, sys, threading, time
import fleetbed

def interrupt():
    while not os.path.exists(sys.argv[1] + "/heteroavg-sync-1/state"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
sets = {"rounds": 500, "timing.source": "modelled", "data.train_limit": 200, "training.max_steps": 1}
try:
    fleetbed.run("demo", set={**sets, "algorithms": [{"name": "heteroavg"}]}, out=sys.argv[1], progress=False)
except KeyboardInterrupt as stop:
    print(type(stop).__name__, stop)
print(fleetbed.load(sys.argv[1]).states["heteroavg-sync-1"])
"""


@pytest.mark.slow
def test_an_interrupt_stops_cleanly_and_leaves_results(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731 (under nohup it is ignored)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=heed,
        env=os.environ,
    )
    first, second = done.stdout.splitlines()
    assert first == f"StudyInterrupted continue with fleetbed.run(resume={str(out)!r})"
    assert second.startswith("interrupted after round ")
    assert query(out / "heteroavg-sync-1", "SELECT value FROM meta WHERE key = 'status'") == [('"interrupted"',)]
