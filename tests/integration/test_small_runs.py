"""Runs with real processes and sockets: the same results in every mode, faults as outcomes, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from small_runs import query

from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.method import job
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.run import preparation
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.storage import load_bundle
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
    """What is still there of our run: processes, and cgroups, which are named after the zygote."""
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/fleetbed-????????-{zygote}-*")]
    return [*processes(), *cgroups]


class Meddler(Observer):
    """Does something to a client's processes while they train, to so many of them."""

    def __init__(self, act: Callable[[psutil.Process], Any], client: str = "003", times: int = 1) -> None:
        self._act = act
        self._times = times
        self._done: set[int] = set()
        self._client = client
        self._broker: Broker | None = None
        self.seen: set[str] = set()
        self.zygote = 0

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        assert isinstance(engine.executor, Broker)
        self._broker = engine.executor
        self.seen = set(processes())

    def tick(self) -> None:
        if self._broker is None or all(o.worker != f"client-{self._client}" for o in self._broker.running()):
            return
        found = processes()
        self.zygote = found["zygote"].pid
        for name, process in found.items():
            if name.startswith(f"client {self._client}") and process.pid not in self._done:
                self._done.add(process.pid)
                self._act(process)
        if len(self._done) == self._times:
            self._broker = None


@pytest.mark.slow
def test_every_mode_gives_the_same_results_and_leaves_nothing_behind(start: Start) -> None:
    observer = Meddler(lambda _: None)
    resident = start("processes=resident", name="resident", observer=observer)
    assert {"zygote", "client 000 raspberry-pi-zero-2w", "client 007 raspberry-pi-5-8gb"} <= observer.seen
    assert leftovers(observer.zygote) == []
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


@pytest.mark.slow
def test_clients_that_keep_their_heap_give_the_same_results(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = start("rounds=3", name="kept")
    monkeypatch.setattr(preparation, "HEAP_PART", 0.0)
    given_back = start("rounds=3", name="given-back")
    said = "SELECT value FROM meta WHERE key = 'heap_between_tasks'"
    assert (query(kept, said), query(given_back, said)) == ([('"kept"',)], [('"given back"',)])
    for sql in (REPEATABLE, EVALUATIONS):
        assert query(kept, sql) == query(given_back, sql)


class PeakReader(Observer):
    """Reads, when the loop has ended, the largest usage of memory that the kernel counted for each client's group."""

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}

    def stop(self) -> None:
        for name, process in processes().items():
            if name.startswith("client "):
                self.peaks[int(name.split()[1])] = kernels_peak(process.pid)


def kernels_peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return int(Path(f"/sys/fs/cgroup/memory{path}/memory.max_usage_in_bytes").read_text())
    pytest.skip("no cgroup of version 1 here; its kernel has one peak for all readers")


@pytest.mark.slow
@pytest.mark.root
def test_the_peak_in_the_records_is_that_of_the_kernel(start: Start) -> None:
    reader = PeakReader()
    folder = start("rounds=1", "model.options={base_width: 32}", "training.max_steps=4", observer=reader)
    recorded = dict(query(folder, "SELECT client, peak_bytes FROM tasks"))
    assert recorded.keys() == reader.peaks.keys()
    for client, peak in recorded.items():
        assert peak == pytest.approx(reader.peaks[client], rel=0.02)


def test_records_of_a_run(start: Start) -> None:
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
    # the same work has the same plan on the same device, and a longer one on a slower device
    plans: dict[tuple[float, float], set[float]] = {}
    for plan_s, flops, rate in query(
        folder, "SELECT plan_s, flops, rate_gflops FROM tasks JOIN clients USING (client)"
    ):
        plans.setdefault((flops, rate), set()).add(plan_s)
    assert all(len(found) == 1 for found in plans.values())
    for (flops, rate), found in plans.items():
        slower = [plan for (same, other), plan in plans.items() if same == flops and other < rate]
        assert all(min(plan) > max(found) for plan in slower)


@pytest.mark.slow
@pytest.mark.parametrize(("by", "mode"), [(signal.SIGKILL, "resident"), (signal.SIGSTOP, "on-demand")])
def test_a_client_that_is_lost_once_changes_nothing(start: Start, by: signal.Signals, mode: str) -> None:
    steps = ("training.epochs=10", "training.max_steps=10", "rounds=1", f"processes={mode}")
    observer = Meddler(lambda process: process.send_signal(by))
    folders = start(*steps, name="calm"), start(*steps, observer=observer)
    assert len(observer._done) == 1
    for sql in (REPEATABLE, EVALUATIONS):
        assert query(folders[0], sql) == query(folders[1], sql)
    assert leftovers(observer.zygote) == []


@pytest.mark.slow
def test_a_client_that_is_killed_twice_is_an_outcome_and_the_round_goes_on(start: Start) -> None:
    observer = Meddler(lambda process: process.send_signal(signal.SIGKILL), times=2)
    folder = start("training.epochs=20", "training.max_steps=40", observer=observer)
    assert query(folder, "SELECT client, outcome, detail FROM tasks WHERE outcome != 'ok'") == [
        (3, "crash", "ended by signal 9")
    ]
    assert query(folder, "SELECT merged FROM rounds") == [(7,), (8,)]
    assert leftovers(observer.zygote) == []


@pytest.mark.slow
def test_a_stopped_client_is_replaced_and_nothing_is_lost(start: Start) -> None:
    sets = ("training.epochs=20", "training.max_steps=40")
    folder = start(*sets, observer=Meddler(lambda process: process.suspend()), name="stopped")
    assert query(folder, "SELECT client, outcome, detail FROM tasks WHERE outcome != 'ok'") == []
    undisturbed = start(*sets, name="undisturbed")
    for sql in (REPEATABLE, EVALUATIONS):
        assert query(folder, sql) == query(undisturbed, sql)


@pytest.mark.slow
def test_the_learning_rate_follows_the_schedule(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    make = job.make_optimizer
    monkeypatch.setattr(job, "make_optimizer", lambda choice, model: used.append(choice.lr) or make(choice, model))
    start("training.schedule=[{round: 2, lr: 0.005}]", "rounds=3", "processes=inline", name="inline")
    assert used == [0.02] * 8 + [0.005] * 16
    plain, changed = start("rounds=2", name="plain"), start("training.schedule=[{round: 2, lr: 1e-9}]", name="changed")
    losses = "SELECT task, loss FROM tasks WHERE round = 1 ORDER BY task"
    assert query(plain, losses) == query(changed, losses)
    ends = [load_bundle(folder / "models" / "resnet26.safetensors").tensors["fc.weight"] for folder in (plain, changed)]
    assert not ends[0].equal(ends[1])


@pytest.mark.slow
def test_batches_that_no_client_can_draw_cost_nothing(start: Start) -> None:
    """Planning, rehearsal, warm-up and features are sized by what clients have, not by what the file says."""
    peaks: list[int] = []

    class Weighing(Observer):
        def stop(self) -> None:
            for process in processes().values():
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks.append(int(status.split("VmHWM:")[1].split()[0]) << 10)

    for name in ("heteroavg", "fedin"):
        sets = ("training.batch=200000", f"algorithms=[{{name: {name}}}]", "model.variants=[resnet10]")
        folder = start(*sets, name=name, observer=Weighing())
        assert query(folder, "SELECT DISTINCT outcome FROM tasks") == [("ok",)]
        samples = query(folder, "SELECT tasks.samples, steps, clients.samples FROM tasks JOIN clients USING (client)")
        assert all(seen == steps * has for seen, steps, has in samples)
    assert len(peaks) > 10
    assert max(peaks) < 1 << 30


def test_the_folder_of_another_run_is_not_touched(start: Start) -> None:
    folder = start()
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(BadInput, match="exists"):
        start()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_refused_run_leaves_no_folder(start: Start, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="method"):
        start("algorithms=[{name: hetroavg}]")
    assert list(tmp_path.iterdir()) == []


CONNECT = """
import os, sys, zmq
os.setuid(int(sys.argv[2]))
dealer = zmq.Context().socket(zmq.DEALER)
dealer.connect(sys.argv[1])
dealer.send(b"hello")
print(dealer.poll(1000))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("user", "answered"), [(0, True), (65534, False)])
def test_the_socket_lets_no_other_user_in(user: int, answered: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        address = codec.new_address()
        codec.listen(router, address)
        command = [sys.executable, "-c", CONNECT, address, str(user)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            if router.poll(3000):
                router.send_multipart([router.recv_multipart()[0], b"you are heard"])
            assert process.communicate()[0] == (b"1\n" if answered else b"0\n")
