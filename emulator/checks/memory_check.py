"""Compares the memory prediction of `models.cost` with processes that really train."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from types import TracebackType

import msgspec
import torch
import zmq
from msgspec import Struct

from fleetbed.emulator.checks.memory_meter import STEPS, Case, workplace
from fleetbed.emulator.limits import clean_leftovers
from fleetbed.emulator.machine import interpreter
from fleetbed.emulator.machine.calibration import THREAD_VARIABLES
from fleetbed.emulator.machine.host import cpu_model
from fleetbed.emulator.method.algorithm import Algorithm, Assignment
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Train, Trained, from_worker
from fleetbed.emulator.wire.shared_memory import SharedMemory
from fleetbed.models.base import InputSpec
from fleetbed.models.cost.predict import cost
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import Data, Optimizer

MIB = 1 << 20
WAIT_MS = 500
IMAGE = InputSpec((3, 32, 32), 10)
IMAGES = {"vit-layer": InputSpec((3, 64, 64), 10)}  # its patches are 16x16
TEXT = InputSpec((Data().tokens,), 2, Data().vocabulary)
WINDOW = InputSpec((3, 128), 5)
#: the methods that families are made for, where it is not plain training
METHODS = {"resnet-exit": "scalefl", "resnet-depth": "depthfl", "resnet-segment": "fedepth"}
HEADER = ("family", "variant", "method", "input", "optimiser", "batch", "predicted MiB", "measured MiB", "error")
PAGE = """# Memory: prediction against measurement

Made by `fleetbed models check-memory --out docs/memory-prediction.md`.

Predicted is the peak of the memory that a client's process adds after its fork while it trains, as computed by
`models/cost/predict.py`.
Measured is the most that the kernel charged to the memory group of a client's process, forked from a warmed-up one,
while it trained {steps} steps on weights that it received as in a run. A negative error means that the prediction was
too low.

{summary}.

Host: {host}.

{table}
"""


class MemoryResult(Struct, frozen=True):
    case: Case
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Relative error; above 0 the prediction was too high."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def cells(self) -> tuple[str, ...]:
        case = self.case
        sizes = (f"{size / MIB:.1f}" for size in (self.predicted_bytes, self.measured_bytes))
        return (
            case.family,
            case.variant,
            case.method,
            "x".join(map(str, case.spec.shape)),
            case.optimizer.name,
            str(case.batch),
            *sizes,
            f"{self.error:+.1%}",
        )


class MemorySummary(Struct, frozen=True):
    """Absolute values of the relative errors."""

    cases: int
    median: float
    worst: float
    worst_case: Case

    @property
    def sentence(self) -> str:
        case = self.worst_case
        return (
            f"{self.cases} cases: the median error is {self.median:.1%}, the worst {self.worst:.1%} "
            f"({case.family} {case.variant}, {case.optimizer.name}, batch {case.batch})"
        )


def summarise_memory(results: Sequence[MemoryResult]) -> MemorySummary:
    worst = max(results, key=lambda result: abs(result.error))
    median = statistics.median(abs(result.error) for result in results)
    return MemorySummary(len(results), median, abs(worst.error), worst.case)


def standard_cases(families: Sequence[str], batches: Sequence[int], *, every: bool) -> Iterator[Case]:
    """Yield cases for each family at a usual input: its smallest, middle and largest variant, or all variants.

    A family that is made for a method is trained by it, others as FedAvg does.
    """
    for name in families:
        chosen = family(name)
        usual = {"text": TEXT, "values": WINDOW, "images": IMAGES.get(name, IMAGE)}
        spec = usual[chosen.reads]
        variants = chosen.variants
        if not every:
            variants = tuple(dict.fromkeys((variants[0], variants[len(variants) // 2], variants[-1])))
        for variant in variants:
            for optimizer in ("sgd", "adam"):
                for batch in batches:
                    yield Case(name, variant, spec, batch, Optimizer(name=optimizer), METHODS.get(name, "fedavg"))


def compare_memory(case: Case, meter: Meter) -> MemoryResult:
    return MemoryResult(case, predict(case), meter.measure(case))


def predict(case: Case) -> int:
    method, task = _method_and_task(case)
    work = method.heaviest(method.setup(), task.client)
    return cost(family(case.family), case.variant, case.spec, work, case.optimizer).memory_bytes


def _method_and_task(case: Case) -> tuple[Algorithm, Assignment]:
    method = workplace(case).method
    assert method is not None
    return method, Assignment(client=method.context.clients[0])


def to_markdown(results: Sequence[MemoryResult], backend: str) -> str:
    rows = [HEADER, tuple("---" if name in HEADER[:5] else "---:" for name in HEADER)]
    rows += [result.cells for result in results]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return PAGE.format(
        summary=summarise_memory(results).sentence,
        host=f"{cpu_model()}, torch {torch.__version__}, {' '.join(platform.libc_ver())}, {backend}",
        steps=STEPS,
        table=table,
    )


class Meter:
    """Measures the memory of cases, one at a time."""

    def __init__(self) -> None:
        clean_leftovers()
        address = codec.new_address()
        self._fd = os.memfd_create("fleetbed-shared")
        self._shared = SharedMemory(self._fd)
        self._process = subprocess.Popen(
            interpreter.module_command("fleetbed.emulator.checks.memory_meter", address, self._fd),
            pass_fds=[self._fd],
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        codec.listen(self._socket, address)
        self.backend = self._process.stdout.readline().decode().strip()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()  # its child dies with it
        self._process.communicate()  # closes its input, which ends it
        self._context.destroy(linger=0)
        os.close(self._fd)
        clean_leftovers()

    def measure(self, case: Case) -> int:
        """Return the peak of a client's memory in bytes."""
        self._stdin.write(msgspec.json.encode(case) + b"\n")
        self._stdin.flush()
        client, _ = self._receive()
        order = Train(task=0, client=0, variant=case.variant, stage="train", kept=None)
        method, task = _method_and_task(case)
        frames = codec.pack(method.send(method.setup(), task))
        slot = self._shared.take(frames)
        sent = frames if slot is None else frames[:1]
        order = msgspec.structs.replace(order, slot=slot)
        self._socket.send_multipart([client, codec.control(order), *sent], copy=False)
        answer = codec.parse_control(from_worker, self._receive()[1])
        if slot is not None:
            self._shared.release(slot)
        if not isinstance(answer, Trained) or answer.peak_bytes is None:
            raise FleetbedError(f"{case.family} {case.variant} at batch {case.batch} was not trained: {answer}")
        return answer.peak_bytes

    def _receive(self) -> list[zmq.Frame]:
        while not self._socket.poll(WAIT_MS):
            if self._process.poll() is not None:
                raise FleetbedError("the process to be measured has died; see its output above")
        frames: list[zmq.Frame] = self._socket.recv_multipart(copy=False)
        return frames
