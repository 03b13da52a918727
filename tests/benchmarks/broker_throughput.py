"""How fast is the broker? Messages through it against the same messages through bare pyzmq, and against memcpy.

    python tests/benchmarks/broker_throughput.py [--sizes 1K,100K,20M] [--clients 1,10,100] [--repetitions 3]

Both sides run in turn, in one go, on the same ipc transport, each with a process of its own for every client, and each
client has one message under way at a time. `fleetbed` is the broker itself (admission, ROUTER socket, checks, event
loop, decoded tensors) and the loop that clients run, with a method that sends back what it was sent; in `broker alone`
clients read the header only and pass the tensors' frames back as they are. `bare` is a pyzmq ROUTER with DEALERs that
pass the same frames back without looking at them. `memcpy` copies the message within a process. A round trip counts
as two messages. Figures are medians over the repetitions; `of bare` is the median of the ratios, each taken within one
repetition, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
import zmq

from fleetbed.emulator.limits.plan import LimitPlan, Usage
from fleetbed.emulator.method.algorithm import Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.processes.executor import Order
from fleetbed.emulator.processes.worker import serve
from fleetbed.emulator.wire import codec, shared_memory
from fleetbed.emulator.wire.messages import FromZygote, Hello, Spawn, ToZygote, Train, Trained, to_worker, to_zygote

UNITS = {"K": 1000, "M": 1000_000}
FLOAT_BYTES = 4
COPY_BELOW_BYTES = 1 << 16  # pyzmq's own threshold: smaller messages are quicker when copied


class EchoPlace:
    """A workplace whose method sends back what it was sent."""

    def train(self, order: Train, message: Bundle, pacer: object, device: str) -> tuple[Reply, Any]:
        del order, pacer, device
        return Reply(message=message), SimpleNamespace(steps=0, samples=0)

    def keep(self, order: Train, keep: Bundle | None) -> None:
        del order, keep


class NoLimits:
    """A client without caps; the kernel's meters are the task's cost, not the message's."""

    device = "cpu"

    def caps(self) -> tuple[()]:
        return ()

    def reset_peak(self) -> None: ...

    def usage(self) -> Usage:
        return Usage(0.0, 0.0, 0, 0)


def run_client(identity: str, address: str, shared: int) -> None:
    """The loop that clients run."""
    serve(EchoPlace(), identity, address, shared, NoLimits(), one_task=False)  # type: ignore[arg-type]


def pass_back(identity: str, address: str, shared: int) -> None:
    """A client that costs next to nothing, so that what is measured is the broker."""
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.identity = identity.encode()
    codec.tune(dealer)
    dealer.connect(address)
    dealer.send(codec.control(Hello(())))
    answer = Trained(
        task=0,
        keep=None,
        metrics={},
        steps=0,
        samples=0,
        seconds=0.0,
        cpu_s=0.0,
        throttled_s=None,
        peak_bytes=None,
        anon_bytes=None,
    )
    while True:
        control, *frames = codec.receive(dealer)
        order = codec.parse_control(to_worker, control)
        assert isinstance(order, Train)
        frames = shared_memory.received(shared, order.slot, frames)
        sizes, sent = shared_memory.hand_in(shared, order.slot, frames)
        said = msgspec.structs.replace(answer, task=order.task, sizes=sizes)
        codec.send(dealer, [codec.control(said), *sent])


class Forks:
    """What the broker knows as its launcher: forks a client for every `Spawn`, from a process that has no sockets."""

    def __init__(self, folder: Path, client: Callable[[str, str, int], None]) -> None:
        self._client = client
        self.shared = os.memfd_create("shared")
        self.address = f"ipc://{folder}/broker"
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            self._fork_clients(theirs)
        theirs.close()

    def _fork_clients(self, control: socket.socket) -> NoReturn:
        gc.collect()
        gc.freeze()
        children = []
        while message := control.recv(1 << 16):
            spawn = to_zygote.decode(message)
            assert isinstance(spawn, Spawn)
            child = os.fork()
            if child == 0:
                control.close()
                self._client(spawn.identity, self.address, self.shared)
            children.append(child)
        end(children)

    def fileno(self) -> int:
        return self._ours.fileno()

    def tell(self, order: ToZygote) -> None:
        self._ours.send(msgspec.msgpack.encode(order))

    def flush(self) -> None:
        """Nothing waits: `tell` blocks."""

    def check(self, clock_s: float) -> None:
        """It is never stopped."""

    def hear(self) -> FromZygote:
        raise RuntimeError("a client has ended")

    def close(self) -> None:
        self._ours.close()
        os.waitpid(self._pid, 0)
        os.close(self.shared)


def end(children: list[int]) -> NoReturn:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os._exit(0)


def fleetbed_side(
    bundle: Bundle, clients: int, seconds: float, client: Callable[[str, str, int], None] = run_client
) -> float:
    """Round trips a second through the broker: orders packed, sent, answered, and the answers decoded."""
    names = [f"client-{number:03d}" for number in range(clients)]
    with tempfile.TemporaryDirectory() as folder:
        broker = Broker(Forks(Path(folder), client), capacity=float(clients), one_task=False)  # type: ignore[arg-type]
        for name in names:
            broker.enlist(name, name, LimitPlan(name))
        broker.start(names)
        next_task = 0

        def submit() -> None:
            nonlocal next_task
            header = Train(task=next_task, client=next_task % clients, variant="v", stage="train", kept=None)
            broker.submit(Order(header=header, worker=names[next_task % clients], frames=codec.pack(bundle)))
            next_task += 1

        def take() -> None:
            outcome = broker.wait(next_task - clients)
            if outcome.kind != "ok" or len(codec.unpack(outcome.frames).tensors) != len(bundle.tensors):
                raise RuntimeError(f"a message was lost: {outcome.detail}")

        try:
            return closed_loop(submit, take, clients, seconds)
        finally:
            broker.close()


def bare_side(frames: list[bytes], clients: int, seconds: float) -> float:
    """Round trips a second of the same frames through bare pyzmq: nothing is decoded or checked."""
    copy = sum(map(len, frames)) < COPY_BELOW_BYTES
    with (
        tempfile.TemporaryDirectory() as folder,
        bare_clients(f"ipc://{folder}/bare", clients, copy),
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
    ):
        router.linger = 0
        router.bind(f"ipc://{folder}/bare")
        idle = [router.recv_multipart()[0] for _ in range(clients)]

        def submit() -> None:
            router.send_multipart([idle.pop(), *frames], copy=copy)

        def take() -> None:
            identity, *answer = router.recv_multipart(copy=copy)
            if len(answer) != len(frames):
                raise RuntimeError("a message was lost")
            idle.append(identity)

        return closed_loop(submit, take, clients, seconds)


@contextlib.contextmanager
def bare_clients(address: str, clients: int, copy: bool) -> Iterator[None]:
    children = []
    for number in range(clients):
        child = os.fork()
        if child == 0:
            dealer = zmq.Context().socket(zmq.DEALER)
            dealer.identity = f"client-{number:03d}".encode()
            dealer.connect(address)
            dealer.send(b"hello")
            while True:
                dealer.send_multipart(dealer.recv_multipart(copy=copy), copy=copy)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def closed_loop(submit: Callable[[], None], take: Callable[[], None], clients: int, seconds: float) -> float:
    """Every client has a message under way all the time; the first round of messages is not timed."""
    for _ in range(clients):
        submit()
    for _ in range(clients):
        take()
        submit()
    trips, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or trips < clients:
        take()
        submit()
        trips += 1
    return trips / elapsed


def memcpy_rate(size: int, seconds: float) -> float:
    """Copies a second of so many bytes into memory that is there already."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    copies, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        np.copyto(target, source)
        copies += 1
    return copies / elapsed


def size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]]


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def cell(size: str, clients: int, args: argparse.Namespace) -> list[str]:
    count = size_of(size) // FLOAT_BYTES
    bundle = Bundle({f"layer{i}.weight": part for i, part in enumerate(torch.randn(count).chunk(args.tensors))})
    header = codec.control(Train(task=0, client=0, variant="v", stage="train", kept=None))
    frames = [header, *(bytes(frame) for frame in codec.pack(bundle))]
    megabytes = sum(map(len, frames)) / 1e6
    ours, alone, bare = [], [], []
    for _ in range(args.repetitions):
        ours.append(fleetbed_side(bundle, clients, args.seconds))
        bare.append(bare_side(frames, clients, args.seconds))
        alone.append(fleetbed_side(bundle, clients, args.seconds, pass_back))
    copies = memcpy_rate(4 * count, args.seconds / 4)
    return [
        size,
        f"{clients}",
        f"{2 * statistics.median(ours):,.0f}",
        f"{2 * statistics.median(bare):,.0f}",
        f"{2 * statistics.median(ours) * megabytes:,.0f}",
        f"{2 * statistics.median(bare) * megabytes:,.0f}",
        f"{copies * megabytes:,.0f}",
        spread([o / b for o, b in zip(ours, bare, strict=True)], ".2f"),
        spread([a / b for a, b in zip(alone, bare, strict=True)], ".2f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1K,100K,20M", help="message sizes, in K or M bytes")
    parser.add_argument("--clients", default="1,10,100", help="numbers of clients")
    parser.add_argument("--tensors", type=int, default=1, help="tensors that a message is made of")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each side of each repetition")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = ["message", "clients", "fleetbed msg/s", "bare msg/s", "fleetbed MB/s", "bare MB/s", "memcpy MB/s"]
    head += ["of bare", "broker alone, of bare"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for size in args.sizes.split(","):
        for clients in args.clients.split(","):
            print("| " + " | ".join(cell(size, int(clients), args)) + " |", flush=True)


if __name__ == "__main__":
    main()
