"""A node of a fleet over Ray: an actor with the broker, the zygote and the client processes of a run on one machine.

So a task on a node runs as it does on one machine: in a process of its own, inside its limits, with one thread. What
travels is bytes: an `Errand` and its frames to the node, a `Delivery` back. The folder of the run on the head is the
truth; a node has a folder of its own with what its tasks need, and nothing is lost with it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fleetbed.emulator.cluster.guardian import guarded_folder
from fleetbed.emulator.data import store
from fleetbed.emulator.limits.plan import Cap, LimitPlan
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.processes.executor import SERVICE, Order, Outcome
from fleetbed.emulator.processes.launcher import Launcher
from fleetbed.emulator.remote.kept_files import KeptFiles
from fleetbed.emulator.wire.messages import Evaluate, Setup, Train, Trained

PREFIX = "fleetbed-node-"  # of a node's folder; the id of its process follows
LOG = "workers.log"
MOST_LOG_BYTES = 1 << 20


class Errand(Struct, frozen=True, kw_only=True):
    """An order on its way to a node, without its frames; the fields that `Order` has too mean the same."""

    header: Train | Evaluate
    worker: str
    title: str  # of the worker's process
    plan: LimitPlan | None  # the worker's limits; None: a service
    load: float
    start_s: float
    expected_s: float
    limit_s: float
    sizes: list[int]  # of the frames after the manifest, which travel as one


class Delivery(Struct, frozen=True, kw_only=True):
    """An outcome on its way back. Clocks of nodes differ, so it has a duration instead of times."""

    outcome: Outcome | None  # None: the node lacks what the client keeps
    seconds: float = 0.0
    frames: list[memoryview] = []
    kept: memoryview | None = None  # the file that the client keeps from now on
    caps: tuple[Cap, ...] = ()  # of the client's process


encode = msgspec.msgpack.Encoder().encode
decode_errand = msgspec.msgpack.Decoder(Errand).decode
decode_delivery = msgspec.msgpack.Decoder(Delivery).decode


class RayNode:
    """The actor. Its methods run in an event loop; a thread owns the broker and does what they ask for."""

    def __init__(self, run: str, cores: int) -> None:
        self._cores = cores
        self._guarded = ExitStack()
        self._folder = self._guarded.enter_context(guarded_folder(PREFIX))
        self._kept = KeptFiles(self._folder)
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        self._answers: dict[int, Future[Outcome | None]] = {}  # of the orders that the broker has, by task
        self._known: set[str] = set()  # the clients that have had a task here
        self._closing = False
        self._ended: BaseException | None = None  # why the broker has ended
        launcher = Launcher(run, self._folder / LOG)  # its zygote imports torch from now on
        self._broker = Broker(launcher, capacity=cores, one_task=True, on_tick=self._exchange)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    async def lacks_data(self, name: str) -> bool:
        return not store.is_whole(store.prepared_folder(name))

    async def take_data(self, name: str, file: str, offset: int, content: bytes) -> None:
        """Write a part of a file of a data set, beside the place of the whole set."""
        folder = _unfinished(name)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / file).open("r+b" if offset else "wb") as out:
            out.seek(offset)
            out.write(content)

    async def open(self, setup: bytes, partition: bytes, enrolment: bytes) -> None:
        """Take up the run: everything that its tasks need but messages and what clients keep."""
        asked = msgspec.json.decode(setup, type=Setup)
        data = store.prepared_folder(Path(asked.dataset).name)
        if _unfinished(data.name).exists():
            store.put_whole(_unfinished(data.name), data)
        here = msgspec.structs.replace(asked, folder=str(self._folder), dataset=str(data))
        for name, content in (
            ("partition.json", partition),
            ("setup.json", msgspec.json.encode(here)),
            ("clients.json", enrolment),
        ):
            (self._folder / name).write_bytes(content)
        ready: Future[None] = Future()
        await self._ask(lambda: self._configure(ready), ready)

    async def carry_out(self, errand: bytes, manifest: bytes, rest: bytes, kept: bytes) -> bytes:
        """Carry out an order. `kept` is the file that the client keeps; empty if there is none or it should be here."""
        asked = decode_errand(errand)
        with self._kept.in_use(asked.header.kept, kept) as is_here:
            if not is_here:
                return encode(Delivery(outcome=None))
            order = Order(
                header=asked.header,
                worker=asked.worker,
                frames=[manifest, *_cut(rest, asked.sizes)],
                load=asked.load,
                start_s=asked.start_s,
                expected_s=asked.expected_s,
                limit_s=asked.limit_s,
            )
            answer: Future[Outcome | None] = Future()
            outcome = await self._ask(lambda: self._submit(order, asked, answer), answer)
            if outcome is None:
                return b""  # it was cancelled, and nobody waits for it
            new = outcome.answer.keep if isinstance(outcome.answer, Trained) else None
            start_s, end_s = outcome.host_start_s, outcome.host_end_s
            return encode(
                Delivery(
                    outcome=msgspec.structs.replace(outcome, frames=[], host_start_s=None, host_end_s=None),
                    seconds=0.0 if start_s is None or end_s is None else end_s - start_s,
                    frames=[memoryview(frame) for frame in outcome.frames],
                    kept=None if new is None else memoryview(self._kept.read_new(new)),
                    caps=self._broker.caps.get(asked.worker, ()),
                )
            )

    async def cancel(self, task: int) -> None:
        done: Future[None] = Future()
        await self._ask(lambda: self._cancel(task, done), done)

    async def ping(self) -> None:
        """Answer, which shows that the process is not stopped."""

    async def close(self) -> bytes:
        """End all processes and remove the folder; returns the end of what the processes have written."""
        self._closing = True
        self._broker.wake()
        await asyncio.to_thread(self._thread.join)
        log = self._folder / LOG
        written = log.read_bytes()[-MOST_LOG_BYTES:] if log.exists() else b""
        self._guarded.close()
        return written

    async def _ask(self, work: Callable[[], None], answer: Future[Any]) -> Any:
        """Have the broker's thread do this work, and wait for the answer."""
        self._asked.put((work, answer))
        if self._ended is not None:
            self._refuse()
        else:
            self._broker.wake()
        return await asyncio.wrap_future(answer)

    # in the broker's thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._broker.pump()
            ended: BaseException = RuntimeError("the node was closed")
        except BaseException as error:  # noqa: BLE001 - whoever waits is told, and the head starts another actor
            ended = error
        self._broker.close()
        self._ended = ended
        self._refuse()

    def _refuse(self) -> None:
        """Tell all who wait why there will be no answer."""
        assert self._ended is not None
        waiting = [answer for task in list(self._answers) if (answer := self._answers.pop(task, None)) is not None]
        while not self._asked.empty():
            waiting.append(self._asked.get()[1])
        for answer in waiting:
            if not answer.done():
                answer.set_exception(RuntimeError(str(self._ended) or type(self._ended).__name__))

    def _exchange(self) -> None:
        """Do what was asked for, and hand over the outcomes that are there."""
        while not self._asked.empty():
            self._asked.get()[0]()
        for task in [task for task in self._broker.outcomes if task in self._answers]:
            self._answers.pop(task).set_result(self._broker.outcomes.pop(task))

    def _configure(self, ready: Future[None]) -> None:
        self._broker.configure(str(self._folder / "setup.json"))
        self._broker.enrol(str(self._folder / "clients.json"))
        for number in range(self._cores):
            name = f"{SERVICE}-{number}"
            self._broker.enlist(name, f"fleetbed: {name}", LimitPlan(name))
        try:
            self._broker.wait_for_zygote()
        except BaseException as error:
            ready.set_exception(RuntimeError(str(error)))
            raise
        ready.set_result(None)

    def _submit(self, order: Order, asked: Errand, answer: Future[Outcome | None]) -> None:
        self._answers[order.task] = answer
        if asked.plan is not None and asked.worker not in self._known:
            self._known.add(asked.worker)
            self._broker.enlist(asked.worker, asked.title, asked.plan)
        self._broker.submit(order)

    def _cancel(self, task: int, done: Future[None]) -> None:
        self._broker.cancel(task)
        if (answer := self._answers.pop(task, None)) is not None:
            answer.set_result(None)
        done.set_result(None)


def _cut(rest: bytes, sizes: list[int]) -> list[memoryview]:
    """The frames that travelled as one."""
    view, frames = memoryview(rest), []
    for size in sizes:
        frames.append(view[:size])
        view = view[size:]
    return frames


def _unfinished(name: str) -> Path:
    """Where this process puts a data set together."""
    return store.prepared_folder(f".making-{os.getpid()}-{name}")
