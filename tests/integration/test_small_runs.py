"""Runs with real processes and sockets: the same results in every mode, faults as outcomes, nothing left behind."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import query

from fleetbed.emulator import bench
from fleetbed.emulator.broker import Broker
from fleetbed.emulator.engine import Engine
from fleetbed.emulator.evaluation import Evaluations
from fleetbed.emulator.storage import load_bundle
from fleetbed.emulator.watch import Watch
from fleetbed.profiles.errors import BadInput

Start = Callable[..., Path]
#: what a task's row says of device time and of learning; host times and meters differ from run to run
REPEATABLE = (
    "SELECT task, client, round, variant, outcome, base_version, merged_version, dispatched_s, downloaded_s, "
    "compute_start_s, compute_end_s, uploaded_s, plan_s, flops, bytes_down, bytes_up, joules, steps, samples, loss "
    "FROM tasks ORDER BY task"
)
EVALUATIONS = "SELECT version, round, device_s, target, accuracy, loss FROM evaluations ORDER BY version, target"


def processes() -> dict[str, psutil.Process]:
    """The processes of our run by what `ps` calls them."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline()).strip()
        except psutil.Error:
            continue
        if line.startswith("fleetbed: "):
            found[line.removeprefix("fleetbed: ")] = process
    return found


def leftovers(zygote: int) -> list[str]:
    """What is still there of our run: processes, cgroups (named after the zygote), sockets (named after us)."""
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/fleetbed-????????-{zygote}-*")]
    sockets = [str(path) for path in Path(tempfile.gettempdir()).glob(f"fleetbed-????????-{os.getpid()}-*")]
    return [*processes(), *cgroups, *sockets]


class Meddler(Watch):
    """Does something to a client's process, once, while it trains."""

    def __init__(self, act: Callable[[psutil.Process], Any], client: str = "003") -> None:
        self._act = act
        self._client = client
        self._broker: Broker | None = None
        self.seen: set[str] = set()
        self.zygote = 0

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        assert isinstance(engine.executor, Broker)
        self._broker = engine.executor
        found = processes()
        self.seen, self.zygote = set(found), found["zygote"].pid

    def tick(self) -> None:
        if self._broker is None or all(o.worker != f"client-{self._client}" for o in self._broker.running()):
            return
        self._broker = None
        for name, process in processes().items():
            if name.startswith(f"client {self._client}"):
                self._act(process)


def test_every_mode_gives_the_same_results_and_leaves_nothing_behind(start: Start) -> None:
    watch = Meddler(lambda _: None)
    resident = start("processes=resident", name="resident", watch=watch)
    assert {"zygote", "client 000 raspberry-pi-zero-2w", "client 007 raspberry-pi-5-8gb"} <= watch.seen
    assert leftovers(watch.zygote) == []
    folders = [resident, *(start(f"processes={mode}", name=mode) for mode in ("on-demand", "inline"))]
    assert processes() == {}
    for sql in (REPEATABLE, EVALUATIONS):
        rows = [query(folder, sql) for folder in folders]
        assert len(rows[0]) >= 3
        assert rows[0] == rows[1] == rows[2]
    models = [{p.name: load_bundle(p) for p in sorted((f / "models").iterdir())} for f in folders]
    assert models[0]
    for name, bundle in models[0].items():
        for other in models[1:]:
            assert all(t.equal(other[name].tensors[key]) for key, t in bundle.tensors.items())


def test_clients_with_memory_to_spare_train_in_lent_memory_and_nothing_else_differs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = start("rounds=3", name="lent")
    monkeypatch.setattr(bench, "size_for", lambda *_: 0)
    own = start("rounds=3", name="own")
    said = "SELECT count(*) FROM caps WHERE knob = 'memory' AND note LIKE '%are lent%'"
    assert (query(lent, said), query(own, said)) == ([(8,)], [(0,)])
    for sql in (REPEATABLE, EVALUATIONS):
        assert query(lent, sql) == query(own, sql)
    peaks = [dict(query(folder, "SELECT task, peak_bytes FROM tasks")) for folder in (lent, own)]
    assert all(peaks[0][task] < 1.3 * peak + (4 << 20) for task, peak in peaks[1].items())
    assert all(peaks[0][task] > 0.7 * peak for task, peak in peaks[1].items())


def test_what_a_run_records(start: Start) -> None:
    folder = start()
    assert query(folder, "SELECT DISTINCT outcome FROM tasks") == [("ok",)]
    assert query(folder, "SELECT version, round, merged FROM rounds") == [(1, 1, 8), (2, 2, 8)]
    assert query(folder, "SELECT count(*) FROM clients") == [(8,)]
    assert query(folder, "SELECT value FROM meta WHERE key = 'status'") == [('"done"',)]
    (bad,) = query(
        folder,
        "SELECT count(*) FROM tasks WHERE NOT (dispatched_s < downloaded_s AND downloaded_s = compute_start_s "
        "AND compute_start_s < compute_end_s AND compute_end_s < uploaded_s AND host_queued_s <= host_start_s "
        "AND host_start_s < host_end_s AND cpu_s > 0 AND bytes_up > 0 AND steps = 2 AND joules > 0)",
    )
    assert bad == (0,)
    # a plan is FLOPs over the device's rate
    for plan_s, flops, rate in query(
        folder, "SELECT plan_s, flops, rate_gflops FROM tasks JOIN clients USING (client)"
    ):
        assert plan_s == pytest.approx(flops / rate / 1e9)


def test_a_killed_client_is_an_outcome_and_the_round_goes_on(start: Start) -> None:
    watch = Meddler(lambda process: process.send_signal(signal.SIGKILL))
    folder = start("training.epochs=20", "training.max_steps=40", watch=watch)
    assert query(folder, "SELECT client, outcome, detail FROM tasks WHERE outcome != 'ok'") == [
        (3, "crash", "ended by signal 9")
    ]
    assert query(folder, "SELECT merged FROM rounds") == [(7,), (8,)]
    assert leftovers(watch.zygote) == []


@pytest.mark.slow
def test_a_stopped_client_is_a_hang(start: Start) -> None:
    folder = start("training.epochs=20", "training.max_steps=40", watch=Meddler(lambda process: process.suspend()))
    assert query(folder, "SELECT client, outcome, detail FROM tasks WHERE outcome != 'ok'") == [
        (3, "hang", "its heartbeats stopped")
    ]


def test_the_folder_of_another_run_is_not_touched(start: Start) -> None:
    folder = start()
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(BadInput, match="exists"):
        start()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_what_is_refused_leaves_no_folder(start: Start, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="method"):
        start("algorithms=[{name: hetroavg}]")
    assert list(tmp_path.iterdir()) == []


def test_the_socket_lets_no_other_user_in(start: Start) -> None:
    modes = []

    def look(process: psutil.Process) -> None:
        (folder,) = Path(tempfile.gettempdir()).glob(f"fleetbed-????????-{os.getpid()}-*")
        modes.append(folder.stat().st_mode & 0o777)

    start("rounds=1", watch=Meddler(look))
    assert modes == [0o700]
