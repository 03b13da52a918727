"""Methods whose server trains, in whole runs: its time, its sockets meanwhile, and resumption."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from observers import StopAfter, Stopped
from same_runs import results
from small_runs import TINIER, query

from fleetbed.emulator.algorithms import fedgkt
from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.processes.broker import TICK_S
from fleetbed.emulator.run.study import resume_study, start_study
from fleetbed.profiles.resolve import load_experiment

#: with Adam, whose state at the server lives on from merge to merge
SETS = (*TINIER, "rounds=3", "participation.ratio=0.5", "data.public=8", "training.optimizer={name: adam, lr: 0.001}")
METHODS = {
    "fedtgp": "{server_epochs: 2, server_batch: 3}",
    "fedgkt": "{server_epochs: 2}",
    "fedmd": "{public: 8, pretrain_public: 1, match_batch: 4}",
    "fedgen": "{server_steps: 3}",
    "fedet": "{public: 8, server_steps: 3, server_batch: 4}",
}


class Clock(Observer):
    """Notes when the broker looks after its sockets."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self.ticks.clear()

    def tick(self) -> None:
        self.ticks.append(time.monotonic())


def study(folder: Path, method: str, *sets: str, observer: Observer | None = None) -> Path:
    algorithm = f"algorithms=[{{name: {method}, params: {METHODS[method]}}}]"
    experiment = load_experiment("demo", (), (*SETS, algorithm, *sets))
    return start_study(experiment, folder, search=(), command="test", observer=observer or Observer())[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_ends_as_an_undisturbed_one(tmp_path: Path, method: str) -> None:
    whole = results(study(tmp_path / "whole", method, "processes=inline"))
    stopped = tmp_path / "stopped"
    with pytest.raises(Stopped):
        study(stopped, method, "processes=inline", observer=StopAfter(17))
    with pytest.raises(Stopped):
        resume_study(stopped, StopAfter(14))
    (folder,) = resume_study(stopped, Observer())
    assert results(folder) == whole


@pytest.mark.slow
def test_a_merge_in_a_thread_gives_the_same_bits(tmp_path: Path) -> None:
    """With processes a merge runs in a thread, inline it does not."""
    runs = [results(study(tmp_path / mode, "fedgkt", f"processes={mode}")) for mode in ("inline", "resident")]
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
    study(tmp_path / "run", "fedgkt", "rounds=1", "processes=resident", observer=clock)
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
        folder = study(tmp_path / str(epochs), "fedgkt", *sets)
        spent.append(query(folder, "SELECT server_s, device_end_s - server_s FROM rounds")[0])
    (little_s, before_s), (much_s, after_s) = spent
    assert much_s == pytest.approx(3 * little_s)
    assert little_s > 0
    assert before_s == pytest.approx(after_s)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("method", ["fedtgp", "fedgkt", "fedmd", "fedgen"])
def test_declared_memory_is_what_clients_need(tmp_path: Path, method: str) -> None:
    """In a client's first turn, before files of what it kept add the host's page cache to the kernel's figure."""
    model = ("model.variants=[resnet10]", "model.options={base_width: 32}", "training.batch=16", "data.train_limit=800")
    rounds = "rounds=2" if method == "fedgen" else "rounds=1"  # its generator comes with the second
    folder = study(tmp_path / "run", method, *model, rounds, "training.max_steps=4", "processes=resident")
    rows = query(
        folder,
        "SELECT max(peak_bytes), memory_predicted_bytes FROM tasks JOIN clients USING (client) GROUP BY client",
    )
    if any(peak is None for peak, _ in rows):
        pytest.skip("no memory cgroup can be written here")
    assert [f"{predicted / peak - 1:+.0%}" for peak, predicted in rows if abs(predicted / peak - 1) > 0.25] == []
