"""Whoever can reach the broker's socket can neither crash it nor change a result."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq
from small_runs import query

from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Failed, Hello

RESULTS = "SELECT task, client, outcome, uploaded_s, loss, bytes_up FROM tasks ORDER BY task"


class Rogue(Observer):
    """Sends fuzzed and forged messages to the broker from the first round on."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._broker: Broker
        self._thread: threading.Thread
        self.sent = 0

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        assert isinstance(engine.executor, Broker)
        self._broker = engine.executor
        self._thread = threading.Thread(target=self._send, args=[engine.executor.address])
        self._thread.start()

    def stop(self) -> None:
        """The rounds may be over before the last message is out; the broker then goes on listening until it is."""
        while self._thread.is_alive():
            self._broker.pump(0.05)

    def _send(self, address: str) -> None:
        rng = random.Random(3)
        real = [
            codec.control(Failed(task=1, kind="crash", detail="forged")),
            *map(bytes, codec.pack(Bundle({"w": torch.ones(9)}))),
        ]
        with zmq.Context() as context:
            for name in (b"client-003", b"client-000-0000000000000000", b"service-0", b"\x00rogue"[1:]):
                with context.socket(zmq.DEALER) as socket:
                    socket.identity = name
                    socket.linger = 2000
                    socket.sndtimeo = 5000
                    socket.connect(address)
                    for _ in range(self._count // 4):
                        frames = [bytes(frame) for frame in real]
                        at = rng.randrange(len(frames))
                        frames[at] = rng.randbytes(rng.randint(0, 60))
                        if rng.random() < 0.3:
                            frames = [codec.control(Hello(()))]
                        socket.send_multipart(frames)
                        self.sent += 1


def attacked(start: Callable[..., Path], count: int) -> None:
    calm = start(name="calm")
    rogue = Rogue(count)
    folder = start(name="attacked", observer=rogue)
    assert rogue.sent == count // 4 * 4
    assert query(folder, RESULTS) == query(calm, RESULTS)


@pytest.mark.slow
def test_forged_and_fuzzed_messages_change_nothing(start: Callable[..., Path]) -> None:
    attacked(start, 4_000)


@pytest.mark.slow
def test_a_hundred_thousand_of_them_change_nothing(start: Callable[..., Path]) -> None:
    attacked(start, 100_000)
