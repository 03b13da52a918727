"""The fleet of a run: its processes and limits behind one executor, whichever value `processes` has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.emulator.cluster.connection import connected
from fleetbed.emulator.engine.layout import Layout
from fleetbed.emulator.engine.participant import Participant
from fleetbed.emulator.engine.timing import Timing
from fleetbed.emulator.limits.plan import Cap, GpuPlan, LimitPlan
from fleetbed.emulator.machine import heap, host
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.processes.executor import SERVICE, Executor, InlineExecutor, Order
from fleetbed.emulator.processes.forking import one_thread
from fleetbed.emulator.processes.launcher import Launcher
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.records.tables import CapRow
from fleetbed.emulator.remote.fleet import RayFleet
from fleetbed.emulator.wire.messages import Enrolment, Measure, Setup
from fleetbed.emulator.wire.storage import write_atomically
from fleetbed.models.plug_ins import code_files


def setup_of(layout: Layout, folder: Path) -> Setup:
    """The setup of a run in this folder."""
    return Setup(
        config=layout.config,
        folder=str(folder.absolute()),
        dataset=str(layout.folder),
        files=code_files(layout.config.code),
    )


class FleetProcesses:
    """Begins with service processes only; `start` adds the clients."""

    def __init__(
        self, setup: Setup, on_tick: Callable[[], None], on_notice: Callable[[str], None] = lambda _: None
    ) -> None:
        """`on_notice` is called with sentences about nodes that join or are lost."""
        self._folder = folder = Path(setup.folder)
        self._source = setup.config.experiment.timing.source
        self._mode = setup.config.experiment.processes
        self._broker: Broker | None = None
        self._inline: InlineExecutor | None = None
        self._ray: RayFleet | None = None
        self._connection = ExitStack()
        self._trials = 0
        self.executor: Executor
        path = self._write("setup.json", setup)
        # As in a client's process: other thread counts give other bits. And threads of the broker's own would spin for
        # the cores that the clients train on.
        one_thread()
        heap.keep()
        if self._mode == "inline":
            self.executor = self._inline = InlineExecutor(TaskRunner.open(setup))
            return
        if self._mode == "ray":
            self._connection.enter_context(connected(None))  # unless the command is connected already
            try:
                self.executor = self._ray = RayFleet(setup, on_tick=on_tick, on_notice=on_notice)
            except BaseException:
                self._connection.close()
                raise
            return
        launcher = Launcher(setup.config.name, folder / "workers.log")
        self.executor = self._broker = Broker(
            launcher, capacity=host.cores(), one_task=self._mode == "on-demand", on_tick=on_tick
        )
        self._broker.configure(path)
        for number in range(host.cores()):
            name = f"{SERVICE}-{number}"
            self._broker.enlist(name, f"fleetbed: {name}", LimitPlan(name))

    def settle(self) -> None:
        """Wait until the started processes are idle, so that the host can be measured."""
        if self._broker is not None:
            self._broker.wait_for_zygote()

    def try_out(self, name: str, variant: str, samples: int, cap_bytes: int) -> str | None:
        """Run one step in a separate process under this cap; return the problem, None if there was none."""
        if self._broker is None:
            return None
        self._broker.enlist(name, f"fleetbed: {name}", LimitPlan(name, memory_bytes=cap_bytes))
        self._trials += 1
        header = Measure(
            task=-(1 << 50) - self._trials,
            variant=variant,
            kind="train",
            part="all",
            samples=samples,
            optimise=True,
            once=True,
        )
        self._broker.submit(Order(header=header, worker=name))
        outcome = self._broker.wait(header.task)
        self._broker.dismiss(name)
        return None if outcome.kind == "ok" else outcome.detail

    def start(self, participants: Mapping[int, Participant], timing: Timing, *, keep_heap: bool) -> None:
        """Start the clients, each process inside its limits before it touches data."""
        enrolment = Enrolment(clients=tuple(who.client for who in participants.values()), keep_heap=keep_heap)
        path = self._write("clients.json", enrolment)
        workers = {who.worker: (_title(who), _limits(who, timing)) for who in participants.values()}
        if self._inline is not None:
            self._inline.runner = self._inline.runner.enrol(enrolment)
        if self._ray is not None:
            self._ray.start(enrolment, workers)
        if self._broker is None:
            return
        self._broker.enrol(path)
        self._broker.admit_up_to(timing.capacity(host.cores()))
        for name, (title, plan) in workers.items():
            self._broker.enlist(name, title, plan)
        if self._mode == "resident":
            self._broker.start([who.worker for who in participants.values()])

    def cap_rows(self, participants: Mapping[int, Participant]) -> list[CapRow]:
        """The limits of every client as they are in effect: enforced by the kernel or modelled by the timeline."""
        reader = self._broker or self._ray
        found = reader.caps if reader is not None else {}
        rows = []
        for number, who in participants.items():
            caps = {cap.knob: cap for cap in found.get(who.worker, ())}
            caps.setdefault("cpu", self._cpu_without_cap(who))
            if "memory" not in caps:
                note = "the choice of the variant respects it, nothing enforces it"
                caps["memory"] = Cap("memory", "modelled", "prediction", who.cap_bytes, None, "bytes", note)
            rate = who.spec.link.down_mbit_s
            caps["link"] = Cap("link", "modelled", "timeline", rate, None, "Mbit/s", "transfers take device time")
            rows += [CapRow(client=number, **msgspec.structs.asdict(cap)) for cap in caps.values()]
        return rows

    def nodes(self) -> list[dict[str, Any]] | None:
        """The nodes that carry out the tasks, for the records; None: this host does."""
        return None if self._ray is None else self._ray.nodes()

    def close(self) -> None:
        with self._connection:
            self.executor.close()

    def _cpu_without_cap(self, who: Participant) -> Cap:
        return Cap(
            "cpu",
            "modelled",
            f"timeline: {self._source}",
            who.spec.device.rate_gflops,
            None,
            "GFLOPS",
            "full speed",
        )

    def _write(self, name: str, content: Setup | Enrolment) -> str:
        """Write a file for the workers to the run's folder; returns its path."""
        text, path = msgspec.json.encode(content), self._folder / name
        write_atomically(path, lambda part: part.write_bytes(text))
        return str(path)


def _title(who: Participant) -> str:
    return f"fleetbed: client {who.spec.name} {who.spec.kind}"


def _limits(who: Participant, timing: Timing) -> LimitPlan:
    gpu = None
    if who.spec.device.trains_on == "gpu":
        gpu = GpuPlan(share=min(1.0, who.share), memory_bytes=who.cap_bytes)
    return LimitPlan(
        who.worker,
        memory_bytes=who.cap_bytes if who.capped else None,
        cpu_cores=timing.ceiling_cores(who.share),
        gpu=gpu,
    )
