"""The executor of a fleet over Ray: sends orders to the nodes of a cluster, and collects their outcomes.

A node has one actor (`node.py`), which fills all of its cores. An order is on one node at a time. If a node is lost,
its orders are queued again: they have no outcome yet, so each gets exactly one, with the same bits as anywhere else.
"""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from msgspec.structs import replace

from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.emulator.processes.executor import Order, Outcome
from fleetbed.emulator.remote.joining import Joining
from fleetbed.emulator.remote.node import Delivery, Errand, decode_delivery, encode
from fleetbed.emulator.remote.parcels import Parcels
from fleetbed.emulator.remote.pool import FleetNode, Pool
from fleetbed.emulator.wire.messages import Enrolment, Evaluate, Setup, Train, Trained, kept_name
from fleetbed.emulator.wire.storage import read_run_file, write_atomically

T = TypeVar("T")
TICK_S = 0.25
LONGEST_TICK_S = 1.0  # by which the clock moves on: a process that was stopped or busy makes no node late
OR = " or "  # between the backends of a cap that differs from node to node
OTHERS_S = 60.0  # how long the start of a run waits for further nodes once one is ready


class RayFleet:
    """Begins with the actors of all nodes, which start in the background; `start` has them take up the run."""

    def __init__(self, setup: Setup, *, on_tick: Callable[[], None], on_notice: Callable[[str], None]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.caps: dict[str, tuple[Cap, ...]] = {}  # by worker, as they were read back on the nodes
        self._setup = setup
        self._folder = Path(setup.folder)
        self._on_tick = on_tick
        self._workers: Mapping[str, tuple[str, LimitPlan]] = {}  # the title and limits of each
        self._waiting: list[tuple[float, float, int, Order]] = []  # a heap of the orders that no node has
        self._parcels = Parcels()
        self._aside = ThreadPoolExecutor(1)
        self._moved_s, self._clock_s = time.monotonic(), 0.0
        self._heard: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pool = Pool(setup.config.name, self._heard, on_lost=self._queue_again, on_notice=on_notice)

    def start(self, enrolment: Enrolment, workers: Mapping[str, tuple[str, LimitPlan]]) -> None:
        """Have the nodes take up the run with these clients, and wait for them.

        `workers` has the title and the limits of each client's process. A node that takes much longer than the first
        one joins later.
        """
        self._workers = workers
        self._pool.start(Joining(self._setup, enrolment))
        while not self._pool.ready:
            self.pump()
        first_s = self._clock_s
        while len(self._pool.ready) < len(self._pool.members) and self._clock_s - first_s < OTHERS_S:
            self.pump()

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that have taken part so far, for the records."""
        return [member.facts() for member in self._pool.seen]

    def submit(self, order: Order) -> None:
        heapq.heappush(self._waiting, (order.start_s, -order.expected_s, order.task, order))
        self._place()

    def wait(self, task: int) -> Outcome:
        while task not in self.outcomes:
            self.pump()
        return self.outcomes.pop(task)

    def cancel(self, task: int) -> None:
        self.outcomes.pop(task, None)
        self._waiting = [entry for entry in self._waiting if entry[-1].task != task]
        heapq.heapify(self._waiting)
        for member in self._pool.members.values():
            if member.orders.pop(task, None) is not None:
                member.actor.cancel.remote(task)

    def meanwhile(self, work: Callable[[], T]) -> T:
        """Do this in a thread of its own, and serve the nodes until it is done."""
        future = self._aside.submit(work)
        future.add_done_callback(lambda _: self._heard.put(lambda: None))
        while not future.done():
            self.pump()
        return future.result()

    def pump(self) -> None:
        """Wait for news of the nodes, a short time at most; handle what has come in, and tend the nodes."""
        try:
            self._heard.get(timeout=TICK_S)()
            while True:
                self._heard.get_nowait()()
        except queue.Empty:
            pass
        passed_s = time.monotonic() - self._moved_s
        if passed_s >= TICK_S:
            self._moved_s += passed_s
            self._clock_s += min(passed_s, LONGEST_TICK_S)
            self._pool.tend(self._clock_s)
        self._place()
        self._on_tick()

    def close(self) -> None:
        """End the processes on the nodes, and add what they have written to the log of the run."""
        self._aside.shutdown()  # after an interrupt it ends what it is doing, because nothing can stop a thread
        written = self._pool.close()
        with (self._folder / "workers.log").open("ab") as log:
            log.write(written)

    def _place(self) -> None:
        """Give orders to the nodes that have room: ahead of free cores, too, as long as there is one for every core.

        An order that waits on a node begins at once when a core is free there; but it cannot go elsewhere any more.
        """
        ready = self._pool.ready
        cores = sum(member.about.cores for member in ready)
        while self._waiting:
            order = self._waiting[0][-1]
            ahead = len(self._waiting) + sum(member.ahead for member in ready) >= cores
            free = [
                (_has_kept(member, order), member.room(ahead=ahead) / member.about.cores, -number)
                for number, member in enumerate(ready)
                if member.room(ahead=ahead) > 0
            ]
            if not free:
                return
            heapq.heappop(self._waiting)
            self._send(ready[-max(free)[-1]], order)

    def _send(self, member: FleetNode, order: Order) -> None:
        header = order.header
        assert isinstance(header, (Train, Evaluate))  # sources of time that measure this host are refused
        title, plan = self._workers.get(order.worker, ("", None))
        manifest, *rest = order.frames
        errand = Errand(
            header=header,
            worker=order.worker,
            title=title,
            plan=plan,
            load=order.load,
            start_s=order.start_s,
            expected_s=order.expected_s,
            limit_s=order.limit_s,
            sizes=[len(frame) for frame in rest],
        )
        kept = b""
        if header.kept is not None and not _has_kept(member, order):
            kept = read_run_file(self._folder / header.kept)
            member.kept[PurePath(header.kept).parent] = header.kept
        frames = self._parcels.of(bytes(manifest)), self._parcels.of(b"".join(rest))
        member.orders[order.task] = order
        said = member.actor.carry_out.remote(encode(errand), *frames, kept)
        self._pool.when_done(said, partial(self._on_answer, member, member.actor, order))

    def _on_answer(self, member: FleetNode, actor: Any, order: Order, said: Future[bytes]) -> None:
        if member.actor is not actor or order.task not in member.orders:
            return  # the actor was given up, or the order is not needed any more
        try:
            delivery = decode_delivery(said.result())
        except Exception as error:  # noqa: BLE001 - Ray has many kinds, and each means that there is no answer
            self._pool.lose(member, error)
            return
        del member.orders[order.task]
        if delivery.outcome is None:
            member.kept.clear()  # so that it is sent with the next try
            self.submit(order)
            return
        member.outcomes, member.losses = member.outcomes + 1, 0
        self.caps[order.worker] = _merged(self.caps.get(order.worker, ()), delivery.caps)
        self._store_kept(member, order.header, delivery)
        now_s, detail = time.monotonic(), delivery.outcome.detail
        self.outcomes[order.task] = replace(
            delivery.outcome,
            detail=f"on node {member.about.name}: {detail}" if delivery.outcome.kind == "host" else detail,
            frames=delivery.frames,
            host_start_s=now_s - delivery.seconds,
            host_end_s=now_s,
        )

    def _store_kept(self, member: FleetNode, header: object, delivery: Delivery) -> None:
        """Write what a client keeps to the folder of the run, before its outcome is known to anybody."""
        answer, content = delivery.outcome and delivery.outcome.answer, delivery.kept
        if isinstance(header, Train) and isinstance(answer, Trained) and content is not None:
            name = kept_name(header.client, header.task)
            if answer.keep == name:  # else the engine refuses the reply
                write_atomically(self._folder / name, lambda part: part.write_bytes(content))
                member.kept[PurePath(name).parent] = name

    def _queue_again(self, member: FleetNode) -> None:
        for order in member.orders.values():
            heapq.heappush(self._waiting, (order.start_s, -order.expected_s, order.task, order))
        member.orders.clear()


def _has_kept(member: FleetNode, order: Order) -> bool:
    """Whether the node should have the file that the client keeps; False if it keeps none."""
    kept = getattr(order.header, "kept", None)
    return kept is not None and member.kept.get(PurePath(kept).parent) == kept


def _merged(before: tuple[Cap, ...], now: tuple[Cap, ...]) -> tuple[Cap, ...]:
    """The caps of a client that has run on several nodes; one that differs is labelled with all that it was."""
    found = {cap.knob: cap for cap in before}
    for cap in now:
        known = found.get(cap.knob, cap)
        if cap.backend not in known.backend.split(OR):
            # the weaker one is what holds everywhere
            weaker = cap if known.status == "enforced" else known
            note = f"{known.backend} on some nodes, {cap.backend} on others; {weaker.note}".removesuffix("; ")
            cap = replace(weaker, backend=f"{known.backend}{OR}{cap.backend}", note=note)
        elif cap.knob in found:
            cap = known
        found[cap.knob] = cap
    return tuple(found.values())
