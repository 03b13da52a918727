"""The broker: one ROUTER socket, one process per client; orders go out, answers, losses and deaths come in.

It knows processes and sockets, nothing of device time. Every wait has an end: a process that dies or stops is replaced
once, so that what others do to this host's processes does not change a run's results; the second loss is the outcome.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.emulator.processes.admission import Admission, Worker
from fleetbed.emulator.processes.executor import Order, Outcome, outcome_of
from fleetbed.emulator.processes.launcher import Launcher
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import (
    Configure,
    Exited,
    Forked,
    Hello,
    Kill,
    Measure,
    Ready,
    Spawn,
    Trained,
    from_worker,
)
from fleetbed.emulator.wire.shared_memory import SharedMemory
from fleetbed.profiles.errors import FleetbedError, HostCannot

TICK_S = 0.25
LONGEST_TICK_S = 1.0  # of the clock for what follows: who stops the broker, or keeps it busy, costs nobody a deadline
HELLO_S = 120.0  # how long a worker may take from its fork to its hello; a tiny share of a core makes it slow
LEAVE_S = 60.0  # how long a process may take to end
EXIT_S = 5.0  # how long the end of a dead worker's connection is waited for
PROCESSES = 2  # how many an order may take: one that is lost is replaced
MOST_AT_ONCE = 1000  # messages handled before anything else gets its turn
AT_ONCE = int(zmq.NOBLOCK)


class Broker:
    def __init__(
        self,
        launcher: Launcher,
        *,
        capacity: float,
        one_task: bool,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.caps: dict[str, tuple[Cap, ...]] = {}
        self._launcher = launcher
        self._admission = Admission(capacity)
        self._one_task = one_task
        self._configuring = 0
        self._on_tick = on_tick
        self._speakers: dict[bytes, Worker] = {}  # by identity: those who are alive, nobody else is listened to
        self._looked_s = time.monotonic()  # when the clock was looked at last
        self._clock_s = 0.0
        self._shared = SharedMemory(launcher.shared)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.HEARTBEAT_IVL, codec.HEARTBEAT_MS)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, codec.HEARTBEAT_TIMEOUT_MS)
        codec.tune(self._router)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.address = launcher.address
        codec.listen(self._router, self.address)
        self._poller = zmq.Poller()
        for source in (self._router, self._monitor, launcher.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def admit_up_to(self, capacity: float) -> None:
        """Have orders of so much load under way at once, from now on."""
        self._admission.capacity = capacity

    def configure(self, setup: str) -> None:
        """Tell the zygote what the run is. It does so before any worker that is started from here on."""
        self._launcher.tell(Configure(setup))
        self._configuring += 1

    def wait_for_zygote(self) -> None:
        """Wait until the zygote has nothing left to configure, and so leaves the host alone."""
        while self._configuring:
            self._pump(TICK_S)

    def enlist(self, name: str, title: str, plan: LimitPlan) -> None:
        """Make a worker known; its process starts with its first order, or by `start`."""
        self._admission.enlist(Worker(name, title, plan))

    def dismiss(self, name: str) -> None:
        """End an idle worker; an order that comes later starts it anew."""
        worker = self._admission.workers[name]
        if worker.alive:
            self._kill(worker, "nobody needs it any more")

    def start(self, names: list[str]) -> None:
        """Start these workers now and wait for their hellos. One whose processes die starts with its first order."""
        workers = [self._admission.workers[name] for name in names]
        for _ in range(PROCESSES):
            for worker in workers:
                if not worker.greeted:
                    self._spawn(worker)
            while any(worker.alive and not worker.greeted for worker in workers):
                self._pump(TICK_S)
        if workers and not any(worker.greeted for worker in workers):
            raise FleetbedError(f"no client could be started, {workers[0].name}: {workers[0].lost_by}; see workers.log")

    def running(self) -> list[Order]:
        return [worker.order for worker in self._admission.busy.values() if worker.order is not None]

    def submit(self, order: Order) -> None:
        self._admission.queue(order)
        self._admit()

    def wait(self, task: int) -> Outcome:
        while task not in self.outcomes:
            self._pump(TICK_S)
        return self.outcomes.pop(task)

    def cancel(self, task: int) -> None:
        self.outcomes.pop(task, None)
        worker = self._admission.drop(task)
        if worker is not None:
            self._kill(worker, "nobody waits for its answer any more")

    def close(self) -> None:
        self._launcher.close()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close()
        self._context.term()

    # the host's side: processes, messages, deaths

    def _admit(self) -> None:
        while (worker := self._admission.admit()) is not None:
            if not worker.alive:
                self._spawn(worker)
            elif worker.greeted:
                self._send(worker)

    def _spawn(self, worker: Worker) -> None:
        worker.alive, worker.forked, worker.greeted, worker.leaving = True, False, False, False
        worker.socket, worker.killed_for, worker.since_s = None, "", self._clock_s
        worker.identity = f"{worker.name}-{secrets.token_hex(8)}".encode()
        self._speakers[worker.identity] = worker
        one_task = self._one_task and not worker.is_service
        self._launcher.tell(
            Spawn(
                worker=worker.name,
                identity=worker.identity.decode(),
                title=worker.title,
                plan=worker.plan,
                one_task=one_task,
            )
        )

    def _send(self, worker: Worker) -> None:
        assert worker.order is not None
        worker.sent_s, worker.since_s = time.monotonic(), self._clock_s
        header, frames = worker.order.header, worker.order.frames
        if not isinstance(header, Measure):
            worker.slot = self._shared.take(frames)
            if worker.slot is not None:
                header, frames = msgspec.structs.replace(header, slot=worker.slot), frames[:1]
        try:
            codec.send(self._router, [worker.identity, codec.control(header), *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._kill(worker, "its connection was lost")  # its exit will be reported and decides about the order

    def _pump(self, timeout_s: float) -> None:
        """Handle what has come in, or what the clock says."""
        for source, _ in self._poller.poll(round(timeout_s * 1000)):
            if source is self._router:
                self._drain_router()
            elif source is self._monitor:
                self._drain_monitor()
            else:
                self._on_zygote()
        passed_s = time.monotonic() - self._looked_s
        if passed_s >= TICK_S:
            self._looked_s += passed_s
            self._clock_s += min(passed_s, LONGEST_TICK_S)
            self._launcher.check(self._clock_s)
            for worker in self._admission.workers.values():
                self._check(worker, self._clock_s - worker.since_s)
        self._launcher.flush()
        self._admit()
        self._on_tick()

    def _check(self, worker: Worker, waited_s: float) -> None:
        """Give up what has taken too long."""
        order = worker.order
        if worker.exit is not None:
            if waited_s > EXIT_S:
                self._settle(worker)
        elif worker.leaving:
            if waited_s > LEAVE_S and worker.killed_for:
                raise FleetbedError(f"the process of {worker.name} was killed and has not ended for {LEAVE_S:.0f} s")
            if waited_s > LEAVE_S:
                self._kill(worker, "it did not end by itself")
        elif worker.forked and not worker.greeted and waited_s > HELLO_S:
            self._kill(worker, f"it did not start within {HELLO_S:.0f} s")
        elif worker.greeted and order is not None and waited_s > order.limit_s:
            self._end(worker, "hang", f"no answer within {order.limit_s:.0f} s")
            self._kill(worker, "it did not answer in time")

    def _drain_router(self) -> None:
        """Take the messages that are there. To ask for one more is quicker than to ask before each whether it is."""
        for _ in range(MOST_AT_ONCE):
            try:
                identity = self._router.recv(AT_ONCE)
            except zmq.Again:
                return
            self._hear(identity)
            if not self._admission.busy:
                return  # nobody owes an answer; who says hello now is heard in the next turn

    def _hear(self, identity: bytes) -> None:
        """Take the rest of a message."""
        worker = self._speakers.get(identity)
        frames = codec.receive(self._router)
        if worker is None:
            return  # nobody we started, or one that has died since: its messages lead nowhere
        try:
            self._on_message(worker, frames)
        except codec.WireError as error:
            self._end(worker, "crash", f"sent an invalid message: {error}")
            self._kill(worker, "it sent an invalid message")

    def _on_message(self, worker: Worker, frames: list[zmq.Frame]) -> None:
        if not worker.greeted:
            hello = codec.parse_control(from_worker, frames[0])
            if not isinstance(hello, Hello):
                raise codec.WireError(f"{type(hello).__name__} before hello")
            # the kernel gives descriptors out again: the end of whoever had this one before must be heard first, and
            # it has been said, for it came before this connection was accepted
            self._drain_monitor()
            worker.greeted, worker.socket = True, frames[0].get(zmq.SRCFD)
            self.caps[worker.name] = hello.caps
            if worker.order is not None:
                self._send(worker)
            return
        order = worker.order
        if order is None or worker.sent_s is None:
            raise codec.WireError("an answer that nobody asked for")
        outcome = outcome_of(frames, worker.sent_s, time.monotonic())
        if outcome.answer is not None and outcome.answer.task != order.task:
            raise codec.WireError(f"an answer to task {outcome.answer.task} instead of {order.task}")
        if isinstance(outcome.answer, Trained):
            whole = self._shared.answer(worker.slot, outcome.frames, outcome.answer.sizes)
            outcome = msgspec.structs.replace(outcome, frames=whole)
        self._admission.free(worker)
        self._release_slot(worker)
        worker.leaving, worker.since_s = self._one_task and not worker.is_service, self._clock_s
        self.outcomes[order.task] = outcome

    def _drain_monitor(self) -> None:
        """Whose heartbeats stopped or whose process died. A stopped process is alive, so it must be ended."""
        while self._monitor.poll(0):
            descriptor = recv_monitor_message(self._monitor)["value"]
            for worker in self._admission.workers.values():
                if worker.socket == descriptor:
                    worker.socket = None
                    if worker.exit is not None:
                        self._settle(worker)
                    elif worker.alive and not worker.leaving:
                        self._kill(worker, "its heartbeats stopped")

    def _on_zygote(self) -> None:
        message = self._launcher.hear()
        if message is None:
            return
        if isinstance(message, Exited):
            worker = self._admission.workers[message.worker]
            worker.exit, worker.since_s, worker.leaving = message, self._clock_s, True
            if worker.socket is None:
                self._settle(worker)
        elif isinstance(message, Forked):
            worker = self._admission.workers[message.worker]
            worker.forked = True
            if not worker.greeted:
                worker.since_s = self._clock_s
        elif isinstance(message, Ready):
            self._configuring -= 1
        elif message.worker is None:
            raise FleetbedError(f"the clients cannot be started: {message.text}")
        else:
            raise HostCannot(f"{message.worker} cannot be started: {message.text}")

    def _settle(self, worker: Worker) -> None:
        """Decide what a worker's end means, once its connection has ended too: its last answer may still be on its way,
        for the zygote's word can overtake it, but the end of the connection cannot."""
        self._drain_router()
        exit_, worker.exit = worker.exit, None
        assert exit_ is not None
        worker.alive, worker.leaving, worker.socket = False, False, None
        self._release_slot(worker)
        self._speakers.pop(worker.identity, None)
        if exit_.oom:
            worker.lost_by = "killed by the kernel at its memory cap"
            self._end(worker, "oom", worker.lost_by)
        elif exit_.stopped:
            self._lose(worker, "hang", "stopped by a signal")
        elif exit_.ordered:
            self._lose(worker, "hang", worker.killed_for)
        else:
            how = f"signal {-exit_.status}" if exit_.status < 0 else f"exit status {exit_.status}"
            self._lose(worker, "crash", f"ended by {how}")

    def _lose(self, worker: Worker, kind: Literal["crash", "hang"], detail: str) -> None:
        """Have another process do the order of one that was lost, unless it was the last that the order may take."""
        worker.losses += 1
        worker.lost_by = detail
        if worker.order is not None and worker.losses < PROCESSES:
            worker.sent_s = None
            self._spawn(worker)
        else:
            self._end(worker, kind, detail)

    def _end(self, worker: Worker, kind: Literal["oom", "crash", "hang"], detail: str) -> None:
        if worker.order is not None:
            self.outcomes[worker.order.task] = Outcome(
                kind=kind, detail=detail, host_start_s=worker.sent_s, host_end_s=time.monotonic()
            )
            self._admission.free(worker)

    def _release_slot(self, worker: Worker) -> None:
        """Once it has answered or ended: until then it may write there."""
        if worker.slot is not None:
            self._shared.release(worker.slot)
            worker.slot = None

    def _kill(self, worker: Worker, why: str) -> None:
        worker.leaving, worker.killed_for, worker.since_s = True, why, self._clock_s
        self._launcher.tell(Kill(worker.name))
