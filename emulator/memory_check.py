"""How good the prediction of memory is: `models.cost` against processes that really train."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from types import TracebackType

import msgspec
import torch
import zmq
from msgspec import Struct

from fleetbed.emulator import wire
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.launcher import ONE_THREAD
from fleetbed.emulator.memory_meter import Case
from fleetbed.models.cost import cost
from fleetbed.models.families import family
from fleetbed.models.work import Work
from fleetbed.profiles.errors import FleetbedError

WAIT_MS = 500


class Result(Struct, frozen=True):
    case: Case
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Above 0 too much was predicted."""
        return self.predicted_bytes / self.measured_bytes - 1


def predict(case: Case) -> int:
    work = Work(steps=1, batch=case.batch, held_models=1)  # the weights as they were received
    return cost(family(case.family), case.variant, case.spec, work, case.optimizer).memory_bytes


class Meter:
    """Measures cases, one at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fleetbed-memory-")
        address = f"ipc://{self._folder.name}/meter"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fleetbed.emulator.memory_meter", address],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self.backend = self._process.stdout.readline().decode().strip()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its input, which ends it
        self._context.destroy()
        self._folder.cleanup()

    def measure(self, case: Case) -> int:
        """The peak of a client's memory in bytes."""
        self._stdin.write(msgspec.json.encode(case) + b"\n")
        self._stdin.flush()
        client, _ = self._receive()
        torch.manual_seed(0)
        weights = family(case.family).build(case.variant, case.spec).state_dict()
        self._socket.send_multipart([client, *wire.pack(Bundle(dict(weights)))], copy=False)
        self._receive()  # the weights
        return int(self._receive()[1].bytes)

    def _receive(self) -> list[zmq.Frame]:
        while not self._socket.poll(WAIT_MS):
            if self._process.poll() is not None:
                raise FleetbedError("the process that was to be measured has died: what it said stands above")
        frames: list[zmq.Frame] = self._socket.recv_multipart(copy=False)
        return frames
