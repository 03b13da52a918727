"""A worker's process: a client, or a service such as the evaluator, that takes orders over ZeroMQ."""

from __future__ import annotations

import mmap
import time

import zmq

from fleetbed.emulator import heap, shelf, wire
from fleetbed.emulator.bench import Seat
from fleetbed.emulator.forks import one_thread
from fleetbed.emulator.limits import Group
from fleetbed.emulator.messages import (
    Evaluate,
    Failed,
    Failure,
    Hello,
    Measure,
    Train,
    Trained,
    to_worker,
)
from fleetbed.emulator.pacing import Pacer
from fleetbed.emulator.storage import Damaged
from fleetbed.emulator.workplace import Workplace

#: what torch says when an allocation fails under RLIMIT_DATA, where the kernel does not kill
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")

Frames = list[wire.Buffer]


def serve(workplace: Workplace, identity: str, address: str, shared: int, group: Group, *, one_task: bool) -> None:
    """The loop of a worker, until it is killed. It holds nothing between two orders but its socket.

    `shared` is the file descriptor of the shelf.
    """
    one_thread()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.identity = identity.encode()
    socket.linger = -1
    wire.tune(socket)
    socket.connect(address)
    seat = Seat(shared)
    socket.send_multipart([wire.control(Hello(tuple(group.caps())))])
    while True:
        frames = wire.receive(socket)
        order = wire.parse_control(to_worker, frames[0])
        place = order.bench if isinstance(order, Train) else None
        if place is None:
            wire.send(socket, answer(workplace, order, frames[1:], group, shared))
            del frames
            heap.let_go()
        else:
            with seat.at(place):
                said = _outside(answer(workplace, order, frames[1:], group, shared))
            wire.send(socket, said)
            del frames, said
        if one_task:
            break
    socket.close()
    context.term()


def _outside(frames: Frames) -> Frames:
    """These in memory of their own, outside the heap, which is to end below them."""
    block = memoryview(mmap.mmap(-1, wire.size_of(frames)))
    parts, start = [], 0
    for frame in frames:
        parts.append(block[start : start + len(frame)])
        parts[-1][:] = memoryview(frame)
        start += len(frame)
    return parts


def answer(
    workplace: Workplace, order: Train | Evaluate | Measure, frames: Frames, group: Group | None, shared: int = -1
) -> Frames:
    """Carry out an order; what goes wrong inside it is an answer too, not the end of the process."""
    try:
        if isinstance(order, Train):
            return _train(workplace, order, frames, group, shared)
        if isinstance(order, Evaluate):
            return [wire.control(workplace.evaluate(order, wire.unpack(shelf.look_at(shared, order.ticket, frames))))]
        return [wire.control(workplace.measure(order))]
    except Exception as error:  # noqa: BLE001 - recorded as the task's outcome by the broker
        detail = f"{type(error).__name__}: {error}".removesuffix(": ")  # where there is nothing to add
        return [wire.control(Failed(task=order.task, kind=_kind(error), detail=detail))]


def _kind(error: Exception) -> Failure:
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return "oom"
    # the files that a client keeps are the host's: a full disk is nothing that its device did
    return "host" if isinstance(error, (OSError, Damaged)) else "crash"


def _train(workplace: Workplace, order: Train, frames: Frames, group: Group | None, shared: int) -> Frames:
    """A training task with its meters: wall time of the compute phase, CPU time, the kernel's own peak of memory."""
    if order.pace_total_s:
        # where the zygote could not do so for all: a device that trains all day has its kernels, so nobody is charged
        workplace.rehearse(order.variant)
    if group is not None:
        group.reset_peak()
    # who trains in lent memory need not be charged for what it has received: all that it shares counts as its own
    received = shelf.fetch if order.bench is None else shelf.look_at
    message = wire.unpack(received(shared, order.ticket, frames))
    throttled_before = group.usage().throttled_s if group is not None else None
    cpu_before, start = time.process_time(), time.monotonic()
    pacer = Pacer(order.pace_step_s) if order.pace_total_s else None
    reply, job = workplace.train(order, message, pacer, group.device if group is not None else "cpu")
    if pacer is not None:
        pacer.finish(order.pace_total_s)
    seconds, cpu_s = time.monotonic() - start, time.process_time() - cpu_before
    keep = workplace.keep(order, reply.keep)
    usage = group.usage() if group is not None else None
    throttled_s = None
    if usage is not None and usage.throttled_s is not None and throttled_before is not None:
        throttled_s = usage.throttled_s - throttled_before
    said = wire.pack(reply.message)
    places = shelf.hand_in(shared, order.ticket, said)
    trained = Trained(
        task=order.task,
        keep=keep,
        metrics=reply.metrics,
        steps=job.steps,
        samples=job.samples,
        seconds=seconds,
        cpu_s=cpu_s,
        throttled_s=throttled_s,
        peak_bytes=usage.peak_bytes if usage is not None else None,
        anon_bytes=usage.anon_bytes if usage is not None else None,
        gpu_peak_bytes=usage.gpu_bytes if usage is not None else None,
        gpu_w=usage.gpu_w if usage is not None else None,
        # here, where all cores share in looking through the replies, and not by the broker, for whom all would wait
        not_finite=reply.message.first_not_finite(),
        places=places,
    )
    return [wire.control(trained), *shelf.carried(said, places)]
