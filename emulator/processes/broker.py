"""The broker: sends orders to one process per client over one ROUTER socket, and collects their outcomes.

It knows about processes and sockets, but not about device time. Every wait has an end. A process that dies or stops is
replaced once, so that interference from outside does not change the results of a run; the second loss is the order's
outcome. The states of a worker, and its transitions, are in `worker_state.py`.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.emulator.processes.admission import Admission
from fleetbed.emulator.processes.executor import Order, Outcome, outcome_of
from fleetbed.emulator.processes.launcher import Launcher
from fleetbed.emulator.processes.worker_state import Worker, WorkerState
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import (
    Configure,
    Enrol,
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

T = TypeVar("T")
TICK_S = 0.25
LONGEST_TICK_S = 1.0  # by which the broker's clock advances: if the broker was stopped or busy, no worker is late
HELLO_S = 120.0  # how long a worker may take from its fork to its hello; a tiny share of a core makes it slow
LEAVE_S = 60.0  # how long a process may take to end
EXIT_S = 5.0  # how long the broker waits for the connection of an ended process to close
PROCESSES = 2  # how many processes an order may use: one that is lost is replaced
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.caps: dict[str, tuple[Cap, ...]] = {}
        self._launcher = launcher
        self._admission = Admission(capacity)
        self._one_task = one_task
        self._configuring = 0  # orders to configure or enrol that the zygote has not carried out yet
        self._on_tick = on_tick
        self._by_identity: dict[bytes, Worker] = {}  # workers that have a process; other senders are ignored
        self._now_s = clock
        self._looked_s = clock()  # when the broker's own clock was last moved on
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
        self._aside = ThreadPoolExecutor(1)
        self._done, self._is_done = socket.socketpair()  # by which the thread wakes the broker up
        for source in (self._router, self._monitor, self._done.fileno(), launcher.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def admit_up_to(self, capacity: float) -> None:
        """Set how much load may be under way at once, from now on."""
        self._admission.capacity = capacity

    def configure(self, setup: str) -> None:
        """Give the zygote the run's setup; services can be started from now on."""
        self._launcher.tell(Configure(setup))
        self._configuring += 1

    def enrol(self, enrolment: str) -> None:
        """Give the zygote the clients that were chosen; clients can be started from now on."""
        self._launcher.tell(Enrol(enrolment))
        self._configuring += 1

    def wait_for_zygote(self) -> None:
        """Wait until the zygote has nothing left to do, so that it does not disturb a measurement."""
        while self._configuring:
            self.pump()

    def enlist(self, name: str, title: str, plan: LimitPlan) -> None:
        """Add a worker; its process starts with its first order, or by `start`."""
        self._admission.enlist(Worker(name, title, plan))

    def dismiss(self, name: str) -> None:
        """End the process of a worker without an order; a later order starts a new one."""
        worker = self._admission.workers[name]
        if worker.state is not WorkerState.ABSENT:
            self._kill(worker, "it is no longer needed")

    def start(self, names: list[str]) -> None:
        """Start these workers now and wait for their hellos. One whose processes die starts with its first order."""
        workers = [self._admission.workers[name] for name in names]
        for _ in range(PROCESSES):
            for worker in workers:
                if worker.state is WorkerState.ABSENT:
                    self._spawn(worker)
            while any(worker.is_starting or worker.is_ending for worker in workers):
                self.pump()
        if workers and all(worker.state is WorkerState.ABSENT for worker in workers):
            raise FleetbedError(f"no client could be started, {workers[0].name}: {workers[0].lost_by}; see workers.log")

    def workers(self) -> list[Worker]:
        """All workers that were enlisted."""
        return list(self._admission.workers.values())

    def running(self) -> list[Order]:
        """The orders that have been assigned and have no outcome yet."""
        return [worker.order for worker in self._admission.assigned.values() if worker.order is not None]

    def submit(self, order: Order) -> None:
        self._admission.queue(order)
        self._admit()

    def wait(self, task: int) -> Outcome:
        while task not in self.outcomes:
            self.pump()
        return self.outcomes.pop(task)

    def cancel(self, task: int) -> None:
        self.outcomes.pop(task, None)
        worker = self._admission.drop(task)
        if worker is not None:
            self._kill(worker, "its answer is no longer needed")

    def meanwhile(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and serve the sockets until it is done."""
        future = self._aside.submit(work)
        future.add_done_callback(lambda _: self.wake())
        while not future.done():
            self.pump()
        return future.result()

    def wake(self) -> None:
        """Let `pump` return soon; for other threads."""
        self._is_done.send(b".")

    def pump(self, timeout_s: float = TICK_S) -> None:
        """Wait this long at most for messages; handle those that have come in, and the deadlines that have passed."""
        for source, _ in self._poller.poll(round(timeout_s * 1000)):
            if source is self._router:
                self._drain_router()
            elif source is self._monitor:
                self._drain_monitor()
            elif source == self._done.fileno():
                self._done.recv(1)
            else:
                self._on_zygote()
        passed_s = self._now_s() - self._looked_s
        if passed_s >= TICK_S:
            self._looked_s += passed_s
            self._clock_s += min(passed_s, LONGEST_TICK_S)
            self._launcher.check(self._clock_s)
            for worker in self._admission.workers.values():
                self._check(worker, self._clock_s - worker.since_s)
        self._launcher.flush()
        self._admit()
        self._on_tick()

    def close(self) -> None:
        self._aside.shutdown()  # after an interrupt it ends what it is doing, because nothing can stop a thread
        self._done.close()
        self._is_done.close()
        self._launcher.close()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close()
        self._context.term()

    # processes and messages

    def _admit(self) -> None:
        while (worker := self._admission.admit()) is not None:
            if worker.state is WorkerState.ABSENT:
                self._spawn(worker)
            elif worker.state is WorkerState.IDLE:
                self._send(worker)

    def _spawn(self, worker: Worker) -> None:
        identity = f"{worker.name}-{secrets.token_hex(8)}"
        worker.spawn(identity.encode(), self._clock_s)
        self._by_identity[worker.identity] = worker
        self._launcher.tell(
            Spawn(
                worker=worker.name,
                identity=identity,
                title=worker.title,
                plan=worker.plan,
                one_task=self._leaves(worker),
            )
        )

    def _leaves(self, worker: Worker) -> bool:
        """Whether the worker's process ends after one order."""
        return self._one_task and not worker.is_service

    def _send(self, worker: Worker) -> None:
        assert worker.order is not None
        worker.sent(self._now_s(), self._clock_s)
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
            self._kill(worker, "its connection was lost")  # the report of its exit will decide about the order

    def _check(self, worker: Worker, waited_s: float) -> None:
        """Act on a worker that has been in its state for too long."""
        state, order = worker.state, worker.order
        if state is WorkerState.FORKED and waited_s > HELLO_S:
            self._kill(worker, f"it did not start within {HELLO_S:.0f} s")
        elif state is WorkerState.BUSY and order is not None and waited_s > order.limit_s:
            self._end(worker, "hang", f"no answer within {order.limit_s:.0f} s")
            self._kill(worker, "it did not answer in time")
        elif state is WorkerState.LEAVING and waited_s > LEAVE_S:
            self._kill(worker, "it did not end by itself")
        elif state is WorkerState.KILLED and waited_s > LEAVE_S:
            raise FleetbedError(f"the process of {worker.name} was killed and has not ended for {LEAVE_S:.0f} s")
        elif state is WorkerState.EXITED and waited_s > EXIT_S:
            self._settle(worker)

    def _drain_router(self) -> None:
        """Handle the messages that have arrived. Reading until none is left is quicker than polling before each."""
        for _ in range(MOST_AT_ONCE):
            try:
                identity = self._router.recv(AT_ONCE)
            except zmq.Again:
                return
            self.deliver(identity, codec.receive(self._router))
            if not self._admission.assigned:
                return  # no answer is due, and a hello can wait for the next turn

    def deliver(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """Handle a message that came from this sender. One that is not valid fails its sender's order."""
        worker = self._by_identity.get(identity)
        if worker is None:
            return  # the sender is no worker of ours, or has died since
        try:
            self._on_message(worker, frames)
        except codec.WireError as error:
            self._end(worker, "crash", f"sent an invalid message: {error}")
            self._kill(worker, "it sent an invalid message")

    def _on_message(self, worker: Worker, frames: list[zmq.Frame]) -> None:
        if worker.is_starting:
            self._on_hello(worker, frames[0])
            return
        order = worker.order
        if order is None or worker.sent_s is None:
            if worker.is_ending:
                return  # its answer is no longer needed
            raise codec.WireError("an answer without an order")
        outcome = outcome_of(frames, worker.sent_s, self._now_s())
        if outcome.answer is not None and outcome.answer.task != order.task:
            raise codec.WireError(f"an answer to task {outcome.answer.task} instead of {order.task}")
        if isinstance(outcome.answer, Trained):
            whole = self._shared.answer(worker.slot, outcome.frames, outcome.answer.sizes)
            outcome = msgspec.structs.replace(outcome, frames=whole)
        self._admission.free(worker)
        self._release_slot(worker)
        worker.answered(self._clock_s, leaves=self._leaves(worker))
        self.outcomes[order.task] = outcome

    def _on_hello(self, worker: Worker, frame: zmq.Frame) -> None:
        hello = codec.parse_control(from_worker, frame)
        if not isinstance(hello, Hello):
            raise codec.WireError(f"{type(hello).__name__} before hello")
        # The kernel reuses file descriptors, so the loss of an earlier connection with this one must be handled first.
        # It has been reported by now, because it happened before this connection was accepted.
        self._drain_monitor()
        worker.greeted(frame.get(zmq.SRCFD), self._clock_s)
        self.caps[worker.name] = hello.caps
        if worker.order is not None:
            self._send(worker)

    def _drain_monitor(self) -> None:
        """Handle lost connections: the process died, or it was stopped and has to be ended."""
        while self._monitor.poll(0):
            descriptor = recv_monitor_message(self._monitor)["value"]
            for worker in self._admission.workers.values():
                if worker.socket == descriptor:
                    worker.socket = None
                    if worker.state is WorkerState.EXITED:
                        self._settle(worker)
                    elif worker.state is not WorkerState.LEAVING:
                        self._kill(worker, "its heartbeats stopped")

    def _on_zygote(self) -> None:
        message = self._launcher.hear()
        if message is None:
            return
        if isinstance(message, Exited):
            worker = self._admission.workers[message.worker]
            worker.exited(message, self._clock_s)
            if worker.socket is None:
                self._settle(worker)
        elif isinstance(message, Forked):
            self._admission.workers[message.worker].forked(self._clock_s)
        elif isinstance(message, Ready):
            self._configuring -= 1
        elif message.worker is None:
            raise FleetbedError(f"the clients cannot be started: {message.text}")
        else:
            raise HostCannot(f"{message.worker} cannot be started: {message.text}")

    def _settle(self, worker: Worker) -> None:
        """Decide what the end of a worker's process means, once its connection has ended too.

        Its last answer may still be on its way: the zygote's report can overtake it, the end of the connection cannot.
        """
        self._drain_router()
        if worker.state is not WorkerState.EXITED:
            return  # a message that was just handled had it settled
        how = worker.settled(self._clock_s)
        self._release_slot(worker)
        self._by_identity.pop(worker.identity, None)
        if how.oom:
            worker.lost_by = "killed by the kernel at its memory cap"
            self._end(worker, "oom", worker.lost_by)
        elif how.stopped:
            self._lose(worker, "hang", "stopped by a signal")
        elif how.ordered:
            self._lose(worker, "hang", worker.killed_for)
        else:
            cause = f"signal {-how.status}" if how.status < 0 else f"exit status {how.status}"
            self._lose(worker, "crash", f"ended by {cause}")

    def _lose(self, worker: Worker, kind: Literal["crash", "hang"], detail: str) -> None:
        """Replace a process that was lost with an order, unless it was the last one that the order may use."""
        worker.losses += 1
        worker.lost_by = detail
        if worker.order is not None and worker.losses < PROCESSES:
            self._spawn(worker)
        else:
            self._end(worker, kind, detail)

    def _end(self, worker: Worker, kind: Literal["oom", "crash", "hang"], detail: str) -> None:
        """Give the worker's order, if it has one, this outcome."""
        if worker.order is not None:
            self.outcomes[worker.order.task] = Outcome(
                kind=kind, detail=detail, host_start_s=worker.sent_s, host_end_s=self._now_s()
            )
            self._admission.free(worker)

    def _release_slot(self, worker: Worker) -> None:
        """Release its slot. Its process must have answered or ended: until then it may write there."""
        if worker.slot is not None:
            self._shared.release(worker.slot)
            worker.slot = None

    def _kill(self, worker: Worker, why: str) -> None:
        if not worker.is_ending:
            worker.killed(why, self._clock_s)
            self._launcher.tell(Kill(worker.name))
