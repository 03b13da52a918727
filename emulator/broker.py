"""The broker: one ROUTER socket, one process per client; orders go out, answers, losses and deaths come in.

It knows processes and sockets, nothing of device time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from fleetbed.emulator import wire
from fleetbed.emulator.bench import Benches
from fleetbed.emulator.crew import Crew, Worker
from fleetbed.emulator.executor import Order, Outcome, outcome_of
from fleetbed.emulator.launcher import Launcher
from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.emulator.messages import (
    Configure,
    Exited,
    Hello,
    Kill,
    Measure,
    Ready,
    Spawn,
    Train,
    Trained,
    from_worker,
)
from fleetbed.emulator.shelf import Shelf, carried
from fleetbed.profiles.errors import FleetbedError

TICK_S = 0.25
EXIT_S = 5.0  # how long the end of a dead worker's connection is waited for
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
        self._crew = Crew(capacity)
        self._one_task = one_task
        self._configuring = 0
        self._on_tick = on_tick
        self._speakers: dict[bytes, Worker] = {}  # by identity: those who are alive, nobody else is listened to
        self._look_s = 0.0  # when the clock is looked at next
        self._shelf = Shelf(launcher.shelf)
        self._benches: Benches | None = None
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        wire.tune(self._router)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.address = launcher.address
        self._router.bind(self.address)
        self._poller = zmq.Poller()
        for source in (self._router, self._monitor, launcher.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def configure(self, setup: str) -> None:
        """Tell the zygote what the run is. It does so before any worker that is started from here on."""
        self._launcher.tell(Configure(setup))
        self._configuring += 1

    def wait_for_zygote(self) -> None:
        """Wait until the zygote has nothing left to configure, and so leaves the host alone."""
        while self._configuring:
            self._on_zygote()

    def furnish(self, benches: int, size: int) -> None:
        """Have so many benches of this size made, for clients at full speed."""
        if benches:
            self._benches = Benches(self._launcher.shelf, benches, size)

    def enlist(self, name: str, title: str, plan: LimitPlan) -> None:
        """Make a worker known; its process starts with its first order, or by `start`."""
        self._crew.enlist(Worker(name, title, plan))

    def dismiss(self, name: str) -> None:
        """End an idle worker; an order that comes later starts it anew."""
        worker = self._crew.workers[name]
        if worker.alive:
            self._kill(worker)

    def start(self, names: list[str]) -> None:
        """Start these workers now and wait until each has said hello."""
        workers = [self._crew.workers[name] for name in names]
        for worker in workers:
            self._spawn(worker)
        while not all(worker.greeted for worker in workers):
            self._pump(TICK_S)

    def running(self) -> list[Order]:
        return [worker.order for worker in self._crew.busy.values() if worker.order is not None]

    def submit(self, order: Order) -> None:
        places = self._shelf.lay_down(order.frames) if len(order.frames) > 1 else []
        self._crew.queue(order, places)
        self._admit()

    def wait(self, task: int) -> Outcome:
        while task not in self.outcomes:
            self._pump(TICK_S)
        return self.outcomes.pop(task)

    def cancel(self, task: int) -> None:
        self.outcomes.pop(task, None)
        worker = self._crew.drop(task)
        if worker is not None:
            self._kill(worker)

    def close(self) -> None:
        if self._benches is not None:
            self._benches.close()
        self._launcher.close()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close()
        self._context.term()

    # the host's side: processes, messages, deaths

    def _admit(self) -> None:
        while (worker := self._crew.admit()) is not None:
            if not worker.alive:
                self._spawn(worker)
            elif worker.greeted:
                self._send(worker)

    def _spawn(self, worker: Worker) -> None:
        worker.alive, worker.greeted, worker.leaving, worker.socket = True, False, False, None
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
        worker.sent_s = time.monotonic()
        header, frames = worker.order.begun(), worker.order.frames
        if isinstance(header, Train):
            worker.room = self._shelf.room_after(worker.places)
            if self._benches is not None:
                worker.bench = self._benches.lend(worker.plan.lent_bytes)
                if worker.bench is not None:
                    header = msgspec.structs.replace(header, bench=worker.bench.place)
        if worker.places or worker.room is not None:
            assert not isinstance(header, Measure)  # for it has no tensors
            header = msgspec.structs.replace(header, ticket=self._shelf.ticket(frames, worker.places, worker.room))
        try:
            wire.send(self._router, [worker.identity, wire.control(header), *carried(frames, worker.places)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._kill(worker)  # its connection has gone; its exit will be reported and ends the order

    def _pump(self, timeout_s: float) -> None:
        """Handle what has come in, or what the clock says."""
        for source, _ in self._poller.poll(round(timeout_s * 1000)):
            if source is self._router:
                self._drain_router()
            elif source is self._monitor:
                self._drain_monitor()
            else:
                self._on_zygote()
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + TICK_S
            self._look_at_clock(now_s)
        self._admit()
        self._on_tick()

    def _look_at_clock(self, now_s: float) -> None:
        """Give up what has taken too long."""
        for worker in self._crew.workers.values():
            if worker.exit is not None and now_s > worker.exit_s + EXIT_S:
                self._settle(worker)
            order = worker.order
            if order is not None and worker.sent_s is not None and now_s > worker.sent_s + order.limit_s:
                self._end(worker, "hang", f"no answer within {order.limit_s:.0f} s")
                self._kill(worker)

    def _drain_router(self) -> None:
        """Take the messages that are there. To ask for one more is quicker than to ask before each whether it is."""
        for _ in range(MOST_AT_ONCE):
            try:
                identity = self._router.recv(AT_ONCE)
            except zmq.Again:
                return
            self._hear(identity)
            if not self._crew.busy:
                return  # nobody owes an answer; who says hello now is heard in the next turn

    def _hear(self, identity: bytes) -> None:
        """Take the rest of a message."""
        worker = self._speakers.get(identity)
        frames = wire.receive(self._router)
        if worker is None:
            return  # nobody we started, or one that has died since: its messages lead nowhere
        try:
            self._on_message(worker, frames)
        except wire.WireError as error:
            self._end(worker, "crash", f"it sent rubbish: {error}")
            self._kill(worker)

    def _on_message(self, worker: Worker, frames: list[zmq.Frame]) -> None:
        if not worker.greeted:
            hello = wire.parse_control(from_worker, frames[0])
            if not isinstance(hello, Hello):
                raise wire.WireError(f"{type(hello).__name__} before hello")
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
            raise wire.WireError("an answer that nobody asked for")
        outcome = outcome_of(frames, worker.sent_s, time.monotonic())
        if outcome.answer is not None and outcome.answer.task != order.task:
            raise wire.WireError(f"an answer to task {outcome.answer.task} instead of {order.task}")
        if isinstance(outcome.answer, Trained) and (outcome.answer.places or len(outcome.frames) > 1):
            whole = self._shelf.answer(outcome.frames, outcome.answer.places, worker.room)
            outcome = msgspec.structs.replace(outcome, frames=whole)
        self._crew.free(worker)
        worker.room = worker.bench = None
        worker.leaving = self._one_task and not worker.is_service
        self.outcomes[order.task] = outcome

    def _drain_monitor(self) -> None:
        """Whose heartbeats stopped or whose process died. A stopped process is alive, so it must be ended."""
        while self._monitor.poll(0):
            descriptor = recv_monitor_message(self._monitor)["value"]
            for worker in self._crew.workers.values():
                if worker.socket == descriptor:
                    worker.socket = None
                    if worker.exit is not None:
                        self._settle(worker)
                    elif worker.alive:
                        self._kill(worker)

    def _on_zygote(self) -> None:
        message = self._launcher.hear()
        if isinstance(message, Exited):
            worker = self._crew.workers[message.worker]
            worker.exit, worker.exit_s, worker.leaving = message, time.monotonic(), True
            if worker.socket is None:
                self._settle(worker)
        elif isinstance(message, Ready):
            self._configuring -= 1
        else:
            who = "the clients" if message.worker is None else message.worker
            raise FleetbedError(f"{who} cannot be started: {message.text}")

    def _settle(self, worker: Worker) -> None:
        """Decide what a worker's end means, once its connection has ended too: its last answer may still be on its way,
        for the zygote's word can overtake it, but the end of the connection cannot."""
        self._drain_router()
        exit_, worker.exit = worker.exit, None
        assert exit_ is not None
        worker.alive, worker.leaving, worker.socket, worker.room, worker.bench = False, False, None, None, None
        self._speakers.pop(worker.identity, None)
        if exit_.oom:
            self._end(worker, "oom", "killed by the kernel at its memory cap")
        elif exit_.ordered:
            self._end(worker, "hang", "its heartbeats stopped")
        else:
            how = f"signal {-exit_.status}" if exit_.status < 0 else f"exit status {exit_.status}"
            self._end(worker, "crash", f"ended by {how}")

    def _end(self, worker: Worker, kind: Literal["oom", "crash", "hang"], detail: str) -> None:
        if worker.order is not None:
            self.outcomes[worker.order.task] = Outcome(
                kind=kind, detail=detail, host_start_s=worker.sent_s, host_end_s=time.monotonic()
            )
            self._crew.free(worker)

    def _kill(self, worker: Worker) -> None:
        worker.leaving = True
        self._launcher.tell(Kill(worker.name))
