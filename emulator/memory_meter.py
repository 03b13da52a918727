"""Measuring what a client's memory grows to: `python -m fleetbed.emulator.memory_meter ADDRESS`, one case per line.

A process as warm as the zygote (torch and the models imported, one compute thread, no tensor operation, no ZeroMQ
context) forks a child per case into a memory group of its own. The child does what a client does: it receives the
weights over ZeroMQ, copies them into a model, trains some steps and sends the weights back. What the kernel has seen at
most until then is the measurement.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch._dynamo  # as in the zygote
import zmq
from msgspec import Struct
from torch import Tensor
from torch.nn import functional as F

from fleetbed.emulator import wire
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.job import loaded_model, make_optimizer
from fleetbed.emulator.limits import Group, LimitPlan, best_limits
from fleetbed.models.base import InputSpec, Tensors
from fleetbed.models.families import family
from fleetbed.profiles.experiment import Optimizer

STEPS = 4  # the optimiser's state is there from the second on, and the allocator has settled


class Case(Struct, frozen=True):
    """A variant that is trained as plain averaging of weights does it."""

    family: str
    variant: str
    spec: InputSpec
    batch: int
    optimizer: Optimizer


def train(case: Case, received: Tensors, steps: int) -> Tensors:
    """What a client does with its weights."""
    torch.set_num_threads(1)
    model = loaded_model(family(case.family), case.variant, case.spec, received).train()
    optimizer = make_optimizer(case.optimizer, model)
    for x, y in _batches(case, steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return dict(model.state_dict())


def _batches(case: Case, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    spec = case.spec
    for _ in range(steps):
        if spec.vocabulary:
            x = torch.randint(spec.vocabulary, (case.batch, *spec.shape))
        else:
            x = torch.randn(case.batch, *spec.shape)
        yield x, torch.randint(spec.classes, (case.batch,))


def _client(case: Case, address: str, group: Group) -> None:
    group.join()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"ready")
    received = wire.unpack(socket.recv_multipart(copy=False))
    socket.send_multipart(wire.pack(Bundle(train(case, received.tensors, STEPS))), copy=False)
    socket.send(str(group.usage().peak_bytes).encode())
    socket.close()
    context.term()


def _warm_up(case: Case) -> None:
    """In a child that stays in this process's own group: pages of libraries are charged to who touches them first."""
    weights = family(case.family).build(case.variant, case.spec).state_dict()
    train(msgspec.structs.replace(case, batch=2), dict(weights), steps=1)


def main() -> None:
    address = sys.argv[1]
    limits = best_limits("memory-check")
    print(limits.backend, flush=True)
    warm: set[str] = set()
    try:
        for number, line in enumerate(sys.stdin):
            case = msgspec.json.decode(line, type=Case)
            family(case.family)  # imports its module here, once for all children
            gc.collect()
            gc.freeze()
            if case.family not in warm:
                warm.add(case.family)
                _fork(_warm_up, case)
            group = limits.create(LimitPlan(f"case-{number}"))
            _fork(_client, case, address, group)
            group.remove()
    finally:
        limits.close()


def _fork(work: Callable[..., None], *given: object) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(*given)
            status = 0
        except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's stack
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"a measured process ended with exit code {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
