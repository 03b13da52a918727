"""The broker against a worker and a zygote that are played by the test, over real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from fleetbed.emulator.limits.plan import LimitPlan
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes import broker
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.processes.executor import Order, Outcome
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import (
    Exited,
    Forked,
    FromZygote,
    Hello,
    Kill,
    Measure,
    Measured,
    Spawn,
    Train,
    Trouble,
    to_worker,
    to_zygote,
)
from fleetbed.profiles.errors import FleetbedError, HostCannot

ORDER = Measure(task=7, variant="v", kind="train", part="all", samples=1, optimise=False)
ANSWER = codec.control(Measured(task=7, seconds=0.5))


class PlayedZygote:
    """The launcher's face to the broker; the test speaks from the other side."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/broker"
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.told: list[object] = []
        self.checked: list[float] = []
        self.shared = os.memfd_create("shared")

    def fileno(self) -> int:
        return self._ours.fileno()

    def tell(self, order: object) -> None:
        self.told.append(to_zygote.decode(msgspec.msgpack.encode(order)))

    def flush(self) -> None:
        pass

    def check(self, clock_s: float) -> None:
        self.checked.append(clock_s)

    def hear(self) -> FromZygote:
        from fleetbed.emulator.wire.messages import from_zygote

        heard: FromZygote = from_zygote.decode(self._ours.recv(1 << 16))
        return heard

    def say(self, message: FromZygote) -> None:
        self._theirs.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
        os.close(self.shared)


class Bed:
    def __init__(self, folder: Path) -> None:
        self.zygote = PlayedZygote(folder)
        self.passed_s = 0.0  # by which the broker's clock is ahead of the real one
        self.broker = Broker(self.zygote, capacity=2.0, one_task=True, clock=self.clock)  # type: ignore[arg-type]
        self.broker.enlist("client-001", "title", LimitPlan("client-001"))
        self.broker.submit(Order(header=ORDER, worker="client-001"))
        self.begin()

    def clock(self) -> float:
        return time.monotonic() + self.passed_s

    def begin(self) -> None:
        """Play the process that the zygote was told to fork last, until it has its order."""
        spawn = self.spawns()[-1]
        self.worker = zmq.Context.instance().socket(zmq.DEALER)
        self.worker.identity = spawn.identity.encode()
        self.worker.connect(self.zygote.address)
        self.worker.send_multipart([codec.control(Hello(()))])
        while not self.worker.poll(0):
            self.broker.pump(0.01)
        assert codec.parse_control(to_worker, self.worker.recv_multipart()[0]) == ORDER

    def spawns(self) -> list[Spawn]:
        return [order for order in self.zygote.told if isinstance(order, Spawn)]

    def lose(self, end: Exited) -> None:
        """Have the process end in this way, the broker looking on."""
        self.worker.close(linger=0)
        for _ in range(10):
            self.broker.pump(0.01)
        self.zygote.say(end)
        for _ in range(10):
            self.broker.pump(0.01)

    def outcome(self, *acts: Callable[[], object]) -> Outcome:
        """What the order comes to when these things happen one after the other, the broker looking in between."""
        for act in acts:
            act()
            self.broker.pump(0.05)
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


LOSSES = [
    (exited(-9), "crash", "ended by signal 9"),
    (exited(3), "crash", "ended by exit status 3"),
    (exited(-9, ordered=True), "hang", "its heartbeats stopped"),
    (Exited("client-001", -9, oom=False, ordered=False, stopped=True), "hang", "stopped by a signal"),
]


@pytest.mark.parametrize(("end", "kind", "detail"), LOSSES)
def test_an_order_whose_process_was_lost_is_done_by_another_one_once(
    bed: Bed, end: Exited, kind: str, detail: str
) -> None:
    bed.lose(end)
    assert len(bed.spawns()) == 2
    assert bed.spawns()[0].identity != bed.spawns()[1].identity
    assert bed.broker.outcomes == {}
    bed.begin()
    assert bed.outcome(lambda: bed.worker.send_multipart([ANSWER])).kind == "ok"


@pytest.mark.parametrize(("end", "kind", "detail"), LOSSES)
def test_the_second_loss_is_the_outcome(bed: Bed, end: Exited, kind: str, detail: str) -> None:
    bed.lose(end)
    bed.begin()
    bed.lose(end)
    outcome = bed.broker.wait(7)
    assert (outcome.kind, outcome.detail) == (kind, detail)
    assert len(bed.spawns()) == 2


@pytest.mark.parametrize(("end", "kind", "detail"), LOSSES)
def test_a_process_that_ends_before_its_hello_is_lost_too(bed: Bed, end: Exited, kind: str, detail: str) -> None:
    bed.lose(end)
    bed.lose(end)
    outcome = bed.broker.wait(7)
    assert outcome.kind == kind
    assert outcome.host_start_s is None


def test_who_dies_at_its_memory_cap_is_not_tried_again(bed: Bed) -> None:
    bed.lose(exited(-9, oom=True))
    outcome = bed.broker.wait(7)
    assert (outcome.kind, outcome.detail) == ("oom", "killed by the kernel at its memory cap")
    assert len(bed.spawns()) == 1


def pass_time(bed: Bed, seconds: float) -> None:
    """Have so many seconds pass on the broker's clock."""
    for _ in range(int(seconds / broker.LONGEST_TICK_S) + 2):
        bed.passed_s += 1000.0
        bed.broker.pump(0.0)


def kills(bed: Bed) -> int:
    return sum(isinstance(order, Kill) for order in bed.zygote.told)


def test_who_does_not_say_hello_is_killed_and_the_order_has_an_end(bed: Bed) -> None:
    ended = exited(-9, ordered=True)
    bed.lose(exited(-9))
    before = kills(bed)
    pass_time(bed, 2 * broker.HELLO_S)
    assert kills(bed) == before, "the zygote may be busy: its time begins with its fork"
    bed.zygote.say(Forked("client-001"))
    bed.broker.pump(0.05)
    pass_time(bed, broker.HELLO_S)
    assert kills(bed) == before + 1
    bed.zygote.say(ended)
    outcome = bed.broker.wait(7)
    assert (outcome.kind, outcome.detail) == ("hang", f"it did not start within {broker.HELLO_S:.0f} s")


def test_who_is_done_and_does_not_go_is_killed_and_one_that_does_not_die_ends_the_run(bed: Bed) -> None:
    assert bed.outcome(lambda: bed.worker.send_multipart([ANSWER])).kind == "ok"
    pass_time(bed, broker.LEAVE_S)
    assert kills(bed) == 1
    with pytest.raises(FleetbedError, match="client-001 was killed and has not ended"):
        pass_time(bed, broker.LEAVE_S)


def test_a_broker_that_was_stopped_itself_gives_nobody_up(bed: Bed) -> None:
    bed.passed_s += 100_000.0
    bed.broker.pump(0.05)
    assert bed.zygote.checked[-1] <= 3 * broker.LONGEST_TICK_S
    assert bed.broker.outcomes == {}
    assert bed.outcome(lambda: bed.worker.send_multipart([ANSWER])).kind == "ok"


def test_an_order_that_takes_too_long_is_not_tried_again(bed: Bed) -> None:
    pass_time(bed, Order(header=ORDER, worker="").limit_s)
    outcome = bed.broker.wait(7)
    assert (outcome.kind, outcome.detail) == ("hang", "no answer within 600 s")
    assert len(bed.spawns()) == 1


def starting(folder: Path, play: Callable[[PlayedZygote, str], None]) -> None:
    """Start two clients, every process of which does this."""
    zygote = PlayedZygote(folder)
    tell = zygote.tell

    def tell_and_play(order: object) -> None:
        tell(order)
        if isinstance(order, Spawn):
            play(zygote, order.worker)

    zygote.tell = tell_and_play  # type: ignore[method-assign]
    made = Broker(zygote, capacity=2.0, one_task=False)  # type: ignore[arg-type]
    try:
        for name in ("client-001", "client-002"):
            made.enlist(name, "title", LimitPlan(name))
        made.start(["client-001", "client-002"])
    finally:
        made.close()


def test_clients_none_of_which_starts_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(FleetbedError, match="no client could be started, client-001: ended by signal 6"):
        starting(tmp_path, lambda zygote, worker: zygote.say(Exited(worker, -6, oom=False, ordered=False)))


def test_a_host_that_cannot_fork_says_so(tmp_path: Path) -> None:
    with pytest.raises(HostCannot, match="client-001 cannot be started: its process could not be forked"):
        starting(tmp_path, lambda zygote, worker: zygote.say(Trouble(worker, "its process could not be forked: no")))


@pytest.mark.parametrize(
    "invalid", [b"", b"\xc1", codec.control(Hello(())), codec.control(Measured(task=8, seconds=1.0))]
)
def test_an_invalid_message_costs_its_sender_the_task(bed: Bed, invalid: bytes) -> None:
    outcome = bed.outcome(lambda: bed.worker.send_multipart([invalid]))
    assert outcome.kind == "crash"
    assert "sent an invalid message" in outcome.detail


class Played:
    """A client's process, played by the test."""

    def __init__(self, zygote: PlayedZygote, made: Broker, name: str) -> None:
        (spawn,) = [each for each in zygote.told if isinstance(each, Spawn) and each.worker == name]
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.identity = spawn.identity.encode()
        self.socket.connect(zygote.address)
        self.socket.send_multipart([codec.control(Hello(()))])
        while not self.socket.poll(0):
            made.pump(0.01)

    def offset(self) -> int:
        """Where in the shared memory the tensors of its order lie."""
        order = codec.parse_control(to_worker, self.socket.recv_multipart()[0])
        assert isinstance(order, Train)
        assert order.slot is not None
        return order.slot.offset


def test_a_slot_is_not_given_to_another_before_its_worker_has_ended(tmp_path: Path) -> None:
    """A cancelled worker may still be writing its answer."""
    zygote = PlayedZygote(tmp_path)
    made = Broker(zygote, capacity=9.0, one_task=False)  # type: ignore[arg-type]
    frames = codec.pack(Bundle({"w": torch.zeros(100_000)}))
    players = []

    def offset(number: int) -> int:
        name = f"client-{number:03d}"
        made.enlist(name, "title", LimitPlan(name))
        header = Train(task=number, client=number, variant="v", stage="train", kept=None)
        made.submit(Order(header=header, worker=name, frames=frames))
        players.append(Played(zygote, made, name))
        return players[-1].offset()

    first = offset(1)
    made.cancel(1)
    assert first not in {offset(2), offset(3)}
    players[0].socket.close(linger=0)
    zygote.say(exited(-9, ordered=True))
    for _ in range(20):
        made.pump(0.01)
    assert offset(4) == first
    for player in players:
        player.socket.close(linger=0)
    made.close()


def test_an_answer_that_is_not_needed_any_more_is_ignored(bed: Bed) -> None:
    bed.broker.cancel(7)
    bed.worker.send_multipart([ANSWER])
    for _ in range(10):
        bed.broker.pump(0.01)
    assert bed.broker.outcomes == {}
    assert kills(bed) == 1


def test_a_killed_worker_gets_its_next_order_in_a_new_process(bed: Bed) -> None:
    bed.broker.cancel(7)
    bed.broker.submit(Order(header=ORDER, worker="client-001"))
    bed.broker.pump(0.01)
    assert len(bed.spawns()) == 1
    bed.lose(exited(-9, ordered=True))
    assert len(bed.spawns()) == 2
    bed.begin()
    assert bed.outcome(lambda: bed.worker.send_multipart([ANSWER])).kind == "ok"


def test_messages_are_handled_while_something_else_is_done(bed: Bed) -> None:
    """An answer that comes during long work is an outcome before that work ends, and the next order is sent."""
    bed.broker.enlist("client-002", "title", LimitPlan("client-002"))
    seen: list[bool] = []

    def work() -> str:
        assert threading.current_thread() is not threading.main_thread()
        bed.worker.send_multipart([ANSWER])
        end_s = time.monotonic() + 20
        while 7 not in bed.broker.outcomes and time.monotonic() < end_s:
            time.sleep(0.005)
        seen.append(7 in bed.broker.outcomes)
        return "done"

    assert bed.broker.meanwhile(work) == "done"
    assert seen == [True]
    start_s = time.monotonic()
    assert [bed.broker.meanwhile(lambda n=n: n) for n in range(20)] == [*range(20)]
    assert (
        time.monotonic() - start_s < 20 * broker.TICK_S / 2
    )  # its end wakes the broker, which does not wait for a tick


def test_an_error_in_the_meantime_is_raised_where_it_was_asked_for(bed: Bed) -> None:
    def work() -> None:
        raise FleetbedError("the merge failed")

    with pytest.raises(FleetbedError, match="the merge failed"):
        bed.broker.meanwhile(work)
    assert bed.broker.meanwhile(lambda: 1) == 1
