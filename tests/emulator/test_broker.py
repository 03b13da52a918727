"""The broker against a worker and a zygote that are played by the test, over real sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from fleetbed.emulator import wire
from fleetbed.emulator.broker import Broker
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.executor import Order, Outcome
from fleetbed.emulator.limits.plan import LimitPlan
from fleetbed.emulator.messages import Exited, FromZygote, Hello, Measure, Measured, Spawn, Train, to_worker, to_zygote

ORDER = Measure(task=7, variant="v", kind="train", part="all", samples=1, optimise=False)
ANSWER = wire.control(Measured(task=7, seconds=0.5))


class PlayedZygote:
    """The launcher's face to the broker; the test speaks from the other side."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/broker"
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.told: list[object] = []
        self.shelf = os.memfd_create("shelf")

    def fileno(self) -> int:
        return self._ours.fileno()

    def tell(self, order: object) -> None:
        self.told.append(to_zygote.decode(msgspec.msgpack.encode(order)))

    def hear(self) -> FromZygote:
        from fleetbed.emulator.messages import from_zygote

        heard: FromZygote = from_zygote.decode(self._ours.recv(1 << 16))
        return heard

    def say(self, message: FromZygote) -> None:
        self._theirs.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
        os.close(self.shelf)


class Bed:
    def __init__(self, folder: Path) -> None:
        self.zygote = PlayedZygote(folder)
        self.broker = Broker(self.zygote, capacity=2.0, one_task=True)  # type: ignore[arg-type]
        self.broker.enlist("client-001", "title", LimitPlan("client-001"))
        self.broker.submit(Order(header=ORDER, worker="client-001"))
        (spawn,) = self.zygote.told
        assert isinstance(spawn, Spawn)
        self.worker = zmq.Context.instance().socket(zmq.DEALER)
        self.worker.identity = spawn.identity.encode()
        self.worker.connect(self.zygote.address)
        self.worker.send_multipart([wire.control(Hello(()))])
        while not self.worker.poll(0):
            self.broker._pump(0.01)
        assert wire.parse_control(to_worker, self.worker.recv_multipart()[0]) == ORDER

    def outcome(self, *acts: Callable[[], object]) -> Outcome:
        """What the order comes to when these things happen one after the other, the broker looking in between."""
        for act in acts:
            act()
            self.broker._pump(0.05)
        return self.broker.wait(7)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    made.worker.close(linger=0)
    made.broker.close()


def exited(status: int, *, oom: bool = False, ordered: bool = False) -> Exited:
    return Exited("client-001", status, oom, ordered)


def test_an_answer_that_its_worker_s_end_overtook_still_counts(bed: Bed) -> None:
    outcome = bed.outcome(
        lambda: bed.zygote.say(exited(0)), lambda: bed.worker.send_multipart([ANSWER]), lambda: bed.worker.close()
    )
    assert outcome.kind == "ok"
    assert outcome.answer == Measured(task=7, seconds=0.5)


def test_an_answer_that_comes_with_the_end_of_the_connection_counts(bed: Bed) -> None:
    def answer_and_go() -> None:
        bed.worker.send_multipart([ANSWER])
        bed.worker.close()

    assert bed.outcome(answer_and_go, lambda: bed.zygote.say(exited(0))).kind == "ok"


@pytest.mark.parametrize(
    ("end", "kind", "detail"),
    [
        (exited(-9), "crash", "ended by signal 9"),
        (exited(3), "crash", "ended by exit status 3"),
        (exited(-9, oom=True), "oom", "killed by the kernel at its memory cap"),
        (exited(-9, ordered=True), "hang", "its heartbeats stopped"),
    ],
)
def test_an_end_without_an_answer_is_what_the_zygote_says(bed: Bed, end: Exited, kind: str, detail: str) -> None:
    outcome = bed.outcome(lambda: bed.worker.close(linger=0), lambda: bed.zygote.say(end))
    assert (outcome.kind, outcome.detail) == (kind, detail)


@pytest.mark.parametrize(
    "rubbish", [b"", b"\xc1", wire.control(Hello(())), wire.control(Measured(task=8, seconds=1.0))]
)
def test_rubbish_costs_its_sender_the_task(bed: Bed, rubbish: bytes) -> None:
    outcome = bed.outcome(lambda: bed.worker.send_multipart([rubbish]))
    assert outcome.kind == "crash"
    assert "it sent rubbish" in outcome.detail


def test_room_and_bench_are_not_given_to_another_before_their_worker_has_ended(tmp_path: Path) -> None:
    """A cancelled worker may still be training, or writing its answer."""
    zygote = PlayedZygote(tmp_path)
    broker = Broker(zygote, capacity=2.0, one_task=False)  # type: ignore[arg-type]
    header = Train(task=1, client=1, variant="v", stage="train", kept=None)
    broker.enlist("client-001", "title", LimitPlan("client-001", lent_bytes=4 << 20))
    broker.furnish(1, 4 << 20)
    assert broker._benches is not None
    broker._benches._thread.join()
    broker.submit(Order(header=header, worker="client-001", frames=wire.pack(Bundle({"w": torch.zeros(100_000)}))))
    worker = broker._crew.workers["client-001"]
    worker.greeted = True
    broker._send(worker)  # to nobody: its connection has gone, or is yet to come
    assert worker.room is not None
    assert worker.bench is not None
    offset = worker.room.offset
    broker.cancel(1)
    assert broker._benches.lend(4 << 20) is None
    taken = [broker._shelf.take(400_000) for _ in range(3)]
    assert offset not in {space.offset for space in taken}
    worker.exit = exited(-9, ordered=True)
    broker._settle(worker)
    assert broker._shelf.take(400_000).offset == offset
    assert broker._benches.lend(4 << 20) is not None
    broker.close()
