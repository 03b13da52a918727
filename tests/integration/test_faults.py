"""Whatever happens to clients, messages, memory and disk: an outcome or a sentence, never a hang or a wrong result."""

from __future__ import annotations

import errno
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_harness import Saboteur, can_squeeze
from same_runs import results, workers_in
from small_runs import TINIER, query

from fleetbed.emulator.engine import dispatch
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.machine.calibration import Calibration, HostRate, Store, host_fingerprint
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes import task_runner
from fleetbed.emulator.run.study import resume_study, start_study
from fleetbed.emulator.wire import storage
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.resolve import load_experiment

Start = Callable[..., Path]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A run whose hung clients are given up after 4 host seconds, with a calibration that was made up."""
    monkeypatch.setattr(dispatch, "HANG_S", 4.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rate = HostRate(alone_gflops=50.0, busy_gflops=40.0, cores=2, alone_spread=0.0, busy_spread=0.0, other_cores=0.0)
    Store().save(Calibration(host_fingerprint(), "2020-01-01", rate))

    def start(*sets: str, observer: Observer | None = None, folder: Path | None = None) -> Path:
        experiment = load_experiment("demo", (), (*TINIER, *sets))
        return start_study(
            experiment, folder or tmp_path / "s", search=(), command="", observer=observer or Observer()
        )[0]

    return start


OUTCOMES = {
    "drop": ("hang", "no answer within"),
    "garble": ("crash", "sent an invalid message"),
    "cut": ("refused", "sent an invalid message"),
}


@pytest.mark.slow
def test_a_lost_or_spoilt_message_and_a_dead_client_are_outcomes(go: Start) -> None:
    plan = dict(enumerate(("drop", "duplicate", "garble", "delay", "cut", "kill"), 1))
    saboteur = Saboteur(plan)
    # tasks so long that hardly ever one has answered, unheard, at the moment at which its client is killed
    steps = ("training.epochs=20", "training.max_steps=20")
    folder = go("rounds=8", "participation.ratio=0.5", *steps, observer=saboteur)
    assert [fault for fault, _, _ in saboteur.done] == list(plan.values())
    expected = {}
    for fault, round_, worker in saboteur.done:
        if fault in OUTCOMES:
            expected[round_, int(worker.removeprefix("client-"))] = OUTCOMES[fault]
    found = query(folder, "SELECT round, client, outcome, detail FROM tasks WHERE outcome != 'ok' ORDER BY task")
    assert {(round_, client): outcome for round_, client, outcome, _ in found} == {
        key: outcome for key, (outcome, _) in expected.items()
    }
    for round_, client, _, detail in found:
        assert detail.startswith(expected[round_, client][1])
    assert query(folder, "SELECT max(round), sum(merged) FROM rounds") == [(8, 4 * 8 - len(expected))]
    assert workers_in(folder) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A disk of so many KiB that can be made larger."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = []

    def size(kib: int) -> Path:
        options = f"remount,size={kib}k" if mounted else f"size={kib}k"
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True)
        if made.returncode:
            pytest.skip(f"no disk can be mounted here: {made.stderr.decode().strip()}")
        mounted.append(kib)
        return place

    yield size
    if mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("kib", [700, *(pytest.param(kib, marks=pytest.mark.slow) for kib in (20, 60, 100, 300, 500))])
def test_a_full_disk_is_one_sentence_and_the_run_resumes_when_there_is_space(
    go: Start, tmp_path: Path, small_disk: Callable[[int], Path], kib: int
) -> None:
    sets = ("processes=inline", "rounds=4")
    whole = results(go(*sets, folder=tmp_path / "whole"))
    folder = small_disk(kib) / "s"
    with pytest.raises(FleetbedError, match=r"the disk is full.*--resume"):
        go(*sets, folder=folder)
    small_disk(50_000)
    (resumed,) = resume_study(folder, Observer())
    assert results(resumed) == whole


def test_a_client_state_that_cannot_be_written_ends_the_run_which_can_be_resumed(
    go: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ("processes=inline", "algorithms=[{name: fedhe, params: {batch: 4}}]", "evaluation.every=2")
    whole = results(go(*sets, folder=tmp_path / "whole"))

    def save_bundle(path: Path, bundle: Bundle, *, cached: bool = True) -> None:
        if path.stem == "task-00000009":  # of the second round
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        storage.save_bundle(path, bundle, cached=cached)

    with monkeypatch.context() as patch:
        patch.setattr(task_runner, "save_bundle", save_bundle)
        with pytest.raises(FleetbedError, match=r"task 9 of client 00\d: OSError.* No space left .*--resume"):
            go(*sets)
    (resumed,) = resume_study(tmp_path / "s", Observer())
    assert results(resumed) == whole


@pytest.mark.slow
def test_two_hundred_rounds_with_every_fault(go: Start) -> None:
    kinds = ["drop", "duplicate", "delay", "garble", "cut", "kill", "slow disk"]
    plan = {round_: kinds[round_ // 5 % len(kinds)] for round_ in range(5, 196, 5)}
    plan |= {51: "stop", 131: "stop"}
    if can_squeeze():
        plan |= {32: "oom", 82: "oom", 122: "oom"}
    saboteur = Saboteur(plan)
    folder = go(
        "rounds=200",
        "timing.source=enforced",
        "participation.ratio=0.5",
        "training.epochs=3",
        "training.max_steps=3",
        "evaluation.every=50",
        observer=saboteur,
    )
    outcomes = Counter(outcome for (outcome,) in query(folder, "SELECT outcome FROM tasks"))
    print(
        Counter(fault for fault, _, _ in saboteur.done), outcomes, saboteur.samples[0], saboteur.samples[-1], sep="\n"
    )
    assert len(saboteur.done) == len(plan)
    assert query(folder, "SELECT max(round) FROM rounds") == [(200,)]
    # each task has one outcome, and none is missing
    assert query(folder, "SELECT count(*), max(task) + 1 FROM tasks WHERE outcome != ''") == [(800, 800)]
    assert outcomes["hang"] >= 2
    assert outcomes["crash"] >= 3
    assert not can_squeeze() or 1 <= outcomes["oom"] <= 3
    assert sum(outcomes.values()) - outcomes["ok"] <= len(plan)
    (_, files, memory), (_, files_end, memory_end) = saboteur.samples[1], saboteur.samples[-1]
    assert files_end <= files + 2
    assert memory_end <= memory + (32 << 20)
    assert workers_in(folder) == []
