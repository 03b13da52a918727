"""Compares the memory prediction of `models.cost` with processes that really train."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import TracebackType

import msgspec
import torch
import zmq
from msgspec import Struct

from fleetbed.emulator.algorithms import load_method, names
from fleetbed.emulator.checks.memory_meter import PARAMS, STEPS, Case, public_samples, workplace
from fleetbed.emulator.limits import clean_leftovers
from fleetbed.emulator.machine import interpreter
from fleetbed.emulator.machine.calibration import THREAD_VARIABLES
from fleetbed.emulator.machine.host import cpu_model
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client, Context
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Train, Trained, from_worker
from fleetbed.emulator.wire.shared_memory import SharedMemory
from fleetbed.models.base import Family, InputSpec
from fleetbed.models.cost.predict import cost
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.experiment import AlgorithmChoice, Data, Optimizer, Training

MIB = 1 << 20
WAIT_MS = 500
IMAGE = InputSpec((3, 32, 32), 10)
METHOD_FAMILIES = ("resnet-stage", "resnet-width")  # a method is checked on the first that it can use
IMAGES = {"vit-layer": InputSpec((3, 64, 64), 10)}  # its patches are 16x16
TEXT = InputSpec((Data().tokens,), 2, Data().vocabulary)
WINDOW = InputSpec((3, 128), 5)
#: the methods that families are made for, where it is not plain training
METHODS = {"resnet-exit": "scalefl", "resnet-depth": "depthfl", "resnet-segment": "fedepth"}
HEADER = ("family", "variant", "method", "input", "optimiser", "batch", "predicted MiB", "measured MiB", "error")
PAGE = """# Memory: prediction against measurement

Made by `fleetbed models check-memory --out docs/memory-prediction.md`.

Predicted is the peak of the memory that a client's process adds after its fork while it trains, as computed by
`models/cost/predict.py` from the work that the method declares.
Measured is the most that the kernel charged to the memory group of a client's process, forked from a warmed-up one,
while it carried out a task of {steps} steps as in a run. With a method other than FedAvg it is the largest in the
client's first two rounds: from the second one on, a client may have kept something. A negative error means that the
prediction was too low.

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
            _title(case.optimizer),
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
            f"({case.method} on {case.family} {case.variant}, {_title(case.optimizer)}, batch {case.batch})"
        )


def _title(optimizer: Optimizer) -> str:
    return "plain sgd" if optimizer.name == "sgd" and not optimizer.momentum else optimizer.name


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


def checked_methods() -> list[str]:
    """The methods to check besides FedAvg. InCo changes nothing on clients."""
    return [name for name in names() if name not in ("fedavg", "inco")]


def method_cases(methods: Sequence[str], batches: Sequence[int]) -> Iterator[Case]:
    """Yield cases for each method: the middle variant of a family that it goes with, at the middle batch.

    Plain SGD has no state, so that what a method holds matters most; Adam has the largest state.
    """
    batch = sorted(batches)[len(batches) // 2]
    for method in methods:
        if method not in checked_methods():
            raise BadInput(
                f"--method is {method}, which is not checked by itself; possible are {', '.join(checked_methods())}."
            )
        chosen = _family_for(method)
        variant = chosen.variants[len(chosen.variants) // 2]
        for optimizer in (Optimizer(momentum=0.0), Optimizer(name="adam")):
            yield Case(chosen.name, variant, IMAGE, batch, optimizer, method)


def _family_for(method: str) -> Family:
    """The first family that the method can use, with all variants or else with one; one made for it comes first."""
    names = (*(name for name, made_for in METHODS.items() if made_for == method), *METHOD_FAMILIES)
    for chosen, together in product(map(family, names), (True, False)):
        variants = chosen.variants if together else chosen.variants[:1]
        context = Context(
            seed=0,
            spec=IMAGE,
            family=chosen,
            clients=tuple(Client(number, variant, 1) for number, variant in enumerate(variants)),
            training=Training(),
            rounds=1,
            public=public_samples(IMAGE),
        )
        choice = AlgorithmChoice(name=method, params=PARAMS.get(method, {}))
        with contextlib.suppress(BadInput):
            load_method(choice, context, "--method").check()
            return chosen
    raise AssertionError(f"{method} can use none of these families")


def compare_memory(case: Case, meter: Meter) -> MemoryResult:
    return MemoryResult(case, predict(case), meter.measure(case))


def predict(case: Case) -> int:
    """The memory by which a run chooses a variant."""
    method = workplace(case, Path()).method
    assert method is not None
    work = method.heaviest(method.setup(), case.clients[0])
    return cost(family(case.family), case.variant, case.spec, work, case.optimizer).memory_bytes


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
        self._folder = tempfile.TemporaryDirectory(prefix="fleetbed-memory-")  # of what clients keep
        self._shared = SharedMemory(self._fd)
        self._process = subprocess.Popen(
            interpreter.module_command("fleetbed.emulator.checks.memory_meter", address, self._fd, self._folder.name),
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
        self._folder.cleanup()
        clean_leftovers()

    def measure(self, case: Case) -> int:
        """Return the peak of a client's memory in bytes."""
        method = workplace(case, Path(self._folder.name)).method
        assert method is not None
        state, kept, peak = method.setup(), None, 0
        rounds = 1 if case.method == "fedavg" else 2
        for number, stage in enumerate(method.needs.stages * rounds):
            first, *others = (
                Assignment(client=client, task=number, stage=stage, round=1 + number // len(method.needs.stages))
                for client in case.clients
            )
            sent = method.send(state, first)
            order = Train(task=number, client=0, variant=case.variant, stage=stage, kept=kept, round=first.round)
            answer, message = self._carry_out(case, order, sent)
            assert answer.peak_bytes is not None
            kept, peak = answer.keep or kept, max(peak, answer.peak_bytes)
            # the others answer as the first one did
            arrivals = [Arrival(assignment=each, sent=sent, message=message) for each in (first, *others)]
            state = method.foresee(state, arrivals)
        return peak

    def _carry_out(self, case: Case, order: Train, sent: Bundle) -> tuple[Trained, Bundle]:
        """Have a new process carry out a task."""
        self._stdin.write(msgspec.json.encode(case) + b"\n")
        self._stdin.flush()
        client, _ = self._receive()
        frames = codec.pack(sent)
        slot = self._shared.take(frames)
        inline = frames if slot is None else frames[:1]
        order = msgspec.structs.replace(order, slot=slot)
        self._socket.send_multipart([client, codec.control(order), *inline], copy=False)
        _, head, *rest = self._receive()
        answer = codec.parse_control(from_worker, head)
        if not isinstance(answer, Trained) or answer.peak_bytes is None:
            raise FleetbedError(
                f"{case.method} on {case.family} {case.variant} at batch {case.batch} was not trained: {answer}"
            )
        message = codec.unpack(self._shared.answer(slot, rest, answer.sizes))
        if slot is not None:
            self._shared.release(slot)
        return answer, message

    def _receive(self) -> list[zmq.Frame]:
        while not self._socket.poll(WAIT_MS):
            if self._process.poll() is not None:
                raise FleetbedError("the process to be measured has died; see its output above")
        frames: list[zmq.Frame] = self._socket.recv_multipart(copy=False)
        return frames
