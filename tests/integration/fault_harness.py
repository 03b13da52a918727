"""Faults injected into a run: into its processes, its messages, its memory and its disk."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import zmq

from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.processes.worker_state import Worker, WorkerState
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import Row

MESSAGES = ("drop", "duplicate", "delay", "garble", "cut")
PROCESSES = ("kill", "stop", "oom")
DELAY_S = 0.5


class Saboteur(Observer):
    """Commits one fault at a time, each on the first client that it can be done to from its round on.

    `plan` gives the faults by round. What was done is in `done`: (fault, round, client).
    """

    def __init__(self, plan: dict[int, str]) -> None:
        self._plan = sorted(plan.items())
        self.done: list[tuple[str, int, str]] = []
        self.samples: list[tuple[int, int, int]] = []  # round, open files, resident bytes of the broker
        self._delayed: list[tuple[float, bytes, list[zmq.Frame]]] = []

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        assert isinstance(engine.executor, Broker)
        self._engine, self._broker = engine, engine.executor
        self._deliver = self._broker.deliver
        self._broker.deliver = self._on_message  # type: ignore[method-assign]

    def tick(self) -> None:
        if not hasattr(self, "_engine"):
            return
        self._sample()
        for entry in [entry for entry in self._delayed if entry[0] <= time.monotonic()]:
            self._delayed.remove(entry)
            self._deliver(*entry[1:])
        if self._due() in PROCESSES:
            self._disturb(self._due())
        elif self._due() == "slow disk":
            self._slow_disk()

    def _due(self) -> str:
        """The next fault, once its round has come."""
        if not self._plan or self._plan[0][0] > self._engine.progress.policy.round:
            return ""
        return self._plan[0][1]

    def _did(self, fault: str, client: str) -> None:
        self.done.append((fault, self._engine.progress.policy.round, client))
        del self._plan[0]

    def _on_message(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        fault, worker = self._due(), self._client_with_order(identity)
        if fault not in MESSAGES or worker is None:
            self._deliver(identity, frames)
            return
        self._did(fault, worker.name)
        if fault == "drop":
            return
        if fault == "delay":
            self._delayed.append((time.monotonic() + DELAY_S, identity, frames))
        elif fault == "duplicate":
            self._deliver(identity, frames)
            self._deliver(identity, frames)
        elif fault == "garble":
            self._deliver(identity, [zmq.Frame(b"\xc1" + frames[0].bytes[1:]), *frames[1:]])
        else:
            self._deliver(identity, frames[:-1])

    def _client_with_order(self, identity: bytes) -> Worker | None:
        for worker in self._broker.workers():
            if worker.identity == identity and not worker.is_service and worker.state is WorkerState.BUSY:
                return worker
        return None

    def _disturb(self, fault: str) -> None:
        for worker in self._broker.workers():
            if worker.is_service or worker.state is not WorkerState.BUSY:
                continue
            process = _process_of(worker)
            if process is None:
                continue
            if fault == "kill":
                process.send_signal(signal.SIGKILL)
            elif fault == "stop":
                process.suspend()
            elif not _squeeze(process):
                continue
            self._did(fault, worker.name)
            return

    def _slow_disk(self) -> None:
        """Every write of the records takes long, for one round."""
        write, until = Records.write, self._engine.progress.policy.round + 1

        def slowly(records: Records, rows: Iterable[Row]) -> None:
            time.sleep(0.05)
            write(records, rows)
            if self._engine.progress.policy.round >= until:
                Records.write = write  # type: ignore[method-assign]

        Records.write = slowly  # type: ignore[method-assign]
        self._did("slow disk", "")

    def _sample(self) -> None:
        round_ = self._engine.progress.policy.round
        if round_ % 10 == 0 and (not self.samples or self.samples[-1][0] != round_):
            broker = psutil.Process()
            self.samples.append((round_, broker.num_fds(), broker.memory_info().rss))


def _process_of(worker: Worker) -> psutil.Process | None:
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).strip() == worker.title:
                return process
        except psutil.Error:
            continue
    return None


def _squeeze(process: psutil.Process) -> bool:
    """Lower the process's real memory cap to what it has, so that its next allocation is one too many."""
    for line in Path(f"/proc/{process.pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = Path("/sys/fs/cgroup/memory") / path.strip("/")
            used = int((group / "memory.usage_in_bytes").read_text())
            try:
                (group / "memory.limit_in_bytes").write_text(str(used + (64 << 10)))
            except OSError:
                return False  # it grew meanwhile
            return True
    return False


def can_squeeze() -> bool:
    return Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
