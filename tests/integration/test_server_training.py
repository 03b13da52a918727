"""Methods whose server trains, in whole runs: its time, and its sockets meanwhile."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from same_runs import results
from small_runs import TINIER, query

from fleetbed.emulator.algorithms import fedgkt
from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.processes.broker import TICK_S
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.resolve import load_experiment

#: with Adam, whose state at the server lives on from merge to merge
SETS = (*TINIER, "rounds=3", "participation.ratio=0.5", "training.optimizer={name: adam, lr: 0.001}")
FEDGKT = "algorithms=[{name: fedgkt, params: {server_epochs: 2}}]"


class Clock(Observer):
    """Notes when the broker looks after its sockets."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self.ticks.clear()

    def tick(self) -> None:
        self.ticks.append(time.monotonic())


def study(folder: Path, *sets: str, observer: Observer | None = None) -> Path:
    experiment = load_experiment("demo", (), (*SETS, FEDGKT, *sets))
    return start_study(experiment, folder, search=(), command="test", observer=observer or Observer())[0]


@pytest.mark.slow
def test_a_merge_in_a_thread_gives_the_same_bits(tmp_path: Path) -> None:
    """With processes a merge runs in a thread, inline it does not."""
    runs = [results(study(tmp_path / mode, f"processes={mode}")) for mode in ("inline", "resident")]
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_the_sockets_are_served_while_the_server_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merges: list[tuple[float, float]] = []

    real: Any = fedgkt.Method.merge

    def merge(self: fedgkt.Method, *args: object) -> object:
        start_s, until_s = time.monotonic(), time.monotonic() + 8 * TICK_S
        while time.monotonic() < until_s:  # a merge is repeated until it has taken two seconds
            merged = real(self, *args)
        merges.append((start_s, time.monotonic()))
        return merged

    monkeypatch.setattr(fedgkt.Method, "merge", merge)
    clock = Clock()
    study(tmp_path / "run", "rounds=1", "processes=resident", observer=clock)
    ((start_s, end_s),) = merges
    inside = [start_s, *(tick for tick in clock.ticks if start_s <= tick <= end_s), end_s]
    gaps = [b - a for a, b in pairwise(inside)]
    assert max(gaps) < 3 * TICK_S, f"the broker did not look after its sockets for {max(gaps):.2f} s"


@pytest.mark.slow
def test_training_costs_device_time_on_the_servers_device(tmp_path: Path) -> None:
    """Three times the epochs take the server three times as long, and everything else as long as before."""
    spent = []
    for epochs in (4, 12):  # multiples of the batch
        sets = (f"algorithms=[{{name: fedgkt, params: {{server_epochs: {epochs}}}}}]", "processes=inline", "rounds=1")
        folder = study(tmp_path / str(epochs), *sets)
        spent.append(query(folder, "SELECT server_s, device_end_s - server_s FROM rounds")[0])
    (little_s, before_s), (much_s, after_s) = spent
    assert much_s == pytest.approx(3 * little_s)
    assert little_s > 0
    assert before_s == pytest.approx(after_s)
