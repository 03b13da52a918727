"""A worker's process: a client, or a service such as the evaluator, which receives orders over ZeroMQ."""

from __future__ import annotations

import resource
import time

import zmq

from fleetbed.emulator.limits import Group
from fleetbed.emulator.machine import heap
from fleetbed.emulator.processes.forking import one_thread
from fleetbed.emulator.processes.runner import Runner
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.timeline.pacing import Pacer
from fleetbed.emulator.wire import codec, shared_memory
from fleetbed.emulator.wire.messages import (
    Evaluate,
    Failed,
    Failure,
    Hello,
    Measure,
    Train,
    Trained,
    to_worker,
)
from fleetbed.emulator.wire.storage import Damaged
from fleetbed.models.plug_ins import place_of

#: what torch says when an allocation fails under RLIMIT_DATA, where the kernel does not kill
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")

Frames = list[codec.Buffer]


def serve(runner: Runner, identity: str, address: str, shared: int, group: Group, *, one_task: bool) -> None:
    """Carry out orders until the process is killed or, with `one_task`, just one.

    It holds nothing but its socket between two orders. `shared` is the file descriptor of the shared memory.
    """
    one_thread()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.identity = identity.encode()
    socket.linger = -1
    codec.tune(socket)
    socket.connect(address)
    socket.send_multipart([codec.control(Hello(tuple(group.caps())))])
    while True:
        frames = codec.receive(socket)
        order = codec.parse_control(to_worker, frames[0])
        codec.send(socket, answer(runner, order, frames[1:], group, shared))
        del frames
        if not runner.keep_heap:
            heap.give_back()
        if one_task:
            break
    socket.close()
    context.term()


def answer(
    runner: Runner, order: Train | Evaluate | Measure, frames: Frames, group: Group | None, shared: int = -1
) -> Frames:
    """Carry out an order; an error inside it becomes an answer too and does not end the process."""
    try:
        if isinstance(order, Train):
            return _train(runner, order, frames, group, shared)
        assert isinstance(runner, TaskRunner), "only a run of our own methods asks for this"
        if isinstance(order, Evaluate):
            message = codec.unpack(shared_memory.received(shared, order.slot, frames))
            return [codec.control(runner.evaluate(order, message))]
        return [codec.control(runner.measure(order))]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded as the task's outcome by the broker
        kind, detail = _kind(error), f"{type(error).__name__}: {error}".removesuffix(": ")  # some errors have no text
        if kind == "crash":
            detail += place_of(error.__cause__ or error)
        return [codec.control(Failed(task=order.task, kind=kind, detail=detail))]


def _kind(error: BaseException) -> Failure:
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return "oom"
    # the files that a client keeps are on the host: its device is not to blame for a full disk
    return "host" if isinstance(error, (OSError, Damaged)) else "crash"


def _train(runner: Runner, order: Train, frames: Frames, group: Group | None, shared: int) -> Frames:
    """Carry out a training task and read its meters: wall time, CPU time, the kernel's own peak of memory."""
    if order.pace_total_s and isinstance(runner, TaskRunner):
        # where the zygote could not do it for all: a device that trains all day has its kernels compiled already
        runner.rehearse(order.variant)
    if group is not None:
        group.reset_peak()
    message = codec.unpack(shared_memory.received(shared, order.slot, frames))
    throttled_before = group.usage().throttled_s if group is not None else None
    cpu_before, start = _cpu_s(), time.monotonic()
    pacer = Pacer(order.paces) if order.pace_total_s else None
    reply, job = runner.train(order, message, pacer, group.device if group is not None else "cpu")
    if pacer is not None:
        pacer.finish(order.pace_total_s)
    seconds, cpu_s = time.monotonic() - start, _cpu_s() - cpu_before
    keep = runner.keep(order, reply.keep)
    usage = group.usage() if group is not None else None
    throttled_s = None
    if usage is not None and usage.throttled_s is not None and throttled_before is not None:
        throttled_s = usage.throttled_s - throttled_before
    said = codec.pack(reply.message)
    sizes, sent = shared_memory.hand_in(shared, order.slot, said)
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
        counted=job.counted,
        sizes=sizes,
    )
    return [codec.control(trained), *sent]


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended, such as those that load data."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
