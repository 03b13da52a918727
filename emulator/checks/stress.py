"""Stress-tests the limits with clients that misbehave or work like real ones; run as a module.

It runs as a separate process in place of the zygote: one thread, torch imported, no tensor touched. It reads a
`StressOrder` from its input, forks every hog under its limits, and prints one `Finding` per line.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import NoReturn

import msgspec
import torch
from torch import nn

from fleetbed.emulator.checks.verify import Finding, LimitKnob, StressOrder, Subject
from fleetbed.emulator.limits import Group, LimitPlan, Limits, best_limits
from fleetbed.emulator.machine import host
from fleetbed.emulator.method.optimizers import SGD
from fleetbed.emulator.timeline.pacing import Pacer, capacity, ceiling_cores, share
from fleetbed.emulator.timeline.plan import Pace
from fleetbed.profiles.errors import FleetbedError

Begin = Callable[[], None]  # a hog calls it when it is ready; it returns when the hog may start
Body = Callable[[Begin], float]
WARM_STEPS = 5
REFERENCE_S = 2.0
SPIN_S = 3.0
PIECE_BYTES = 64 * 1024


class Hog:
    """A forked child in its group: it gets ready, waits for `go`, works, and reports its result."""

    def __init__(self, group: Group, body: Body) -> None:
        self._near, far = Pipe()
        self._ended = False
        self._pid = os.fork()
        if self._pid == 0:
            _live(group, body, far)
        far.close()

    def ready(self) -> None:
        self._near.recv_bytes()

    def go(self) -> None:
        self._near.send_bytes(b"go")

    def result(self) -> float:
        found = float(self._near.recv_bytes())
        self.wait()
        return found

    def wait(self) -> None:
        """Wait until it ends by itself, or the kernel kills it because of its memory."""
        _, status = os.waitpid(self._pid, 0)
        self._ended = True
        if status not in (0, signal.SIGKILL):
            raise FleetbedError(f"a stress test ended with status {status}; see its output above")

    def kill(self) -> None:
        if not self._ended:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()


def _live(group: Group, body: Body, far: Connection) -> NoReturn:
    def begin() -> None:
        far.send_bytes(b"ready")
        far.recv_bytes()

    try:
        group.join()
        far.send_bytes(str(body(begin)).encode())
    except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def training_step() -> Callable[[], None]:
    """Return a real training step of a few milliseconds: forward, backward and SGD on a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 10),
    )
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0)
    x, y = torch.rand(16, 1, 28, 28), torch.randint(10, (16,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(WARM_STEPS):
        step()
    return step


def reference(begin: Begin) -> float:
    """Return the seconds of one step, warmed up and alone."""
    step = training_step()
    begin()
    end, samples = time.monotonic() + REFERENCE_S, []
    while (start := time.monotonic()) < end:
        step()
        samples.append(time.monotonic() - start)
    return statistics.median(samples[len(samples) // 4 :])


def paced(step_s: float, steps: int) -> Body:
    """Return a client that trains at a pace; its result is the seconds that `steps` steps took."""

    def body(begin: Begin) -> float:
        step = training_step()
        begin()
        pacer = Pacer([Pace(steps, step_s)])
        for _ in range(steps):
            step()
            pacer.step()
        return pacer.finish(steps * step_s)

    return body


def spinner(begin: Begin) -> float:
    """Act as a client that does not pace itself; return the part of a core that it got."""
    begin()
    start, spent = time.monotonic(), time.process_time()
    while time.monotonic() - start < SPIN_S:
        pass
    return (time.process_time() - spent) / (time.monotonic() - start)


def glutton(group: Group, touched: mmap.mmap) -> Body:
    """Return a client that allocates and touches memory piece by piece, and records the total, until it is killed."""

    def body(_begin: Begin) -> float:
        total, pieces = group.usage().anon_bytes, []
        try:
            while True:
                piece = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for page in range(0, PIECE_BYTES, mmap.PAGESIZE):
                    piece[page] = 1
                pieces.append(piece)
                total += PIECE_BYTES
                struct.pack_into("q", touched, 0, total)
        except (MemoryError, OSError):
            return total  # under RLIMIT_DATA the allocation fails; a cgroup kills the process

    return body


def prove(order: StressOrder, limits: Limits) -> Iterator[Finding]:
    (step_s,), _ = _run(limits, [(LimitPlan("reference"), reference)])
    for subject in order.rate:
        yield from _rates("rate alone", limits, order, step_s, [subject])
    for batch in fill(order.rate, order.time_scale, capacity(host.cores())):
        yield from _rates("rate together", limits, order, step_s, batch)
    for subject in order.rate:
        cores = ceiling_cores(share(subject.slowdown, order.time_scale))
        if limits.has_ceiling and cores < 1:  # the spinner has one thread
            (got,), others = _run(limits, [(LimitPlan("spinner", cpu_cores=cores), spinner)])
            yield Finding("ceiling", subject.name, cores, got, limits.cpu_backend, other_cores=others)
    for subject in order.memory:
        died_at = _death(limits, subject.cap_bytes)
        yield Finding("memory", subject.name, subject.cap_bytes, died_at, limits.memory_backend)


def fill(subjects: tuple[Subject, ...], time_scale: float, max_load: float) -> list[list[Subject]]:
    """Arrange all subjects in batches of at most the admitted load, largest first; some appear more than once."""
    by_share = sorted(subjects, key=lambda subject: subject.slowdown)
    waiting, batches = by_share.copy(), []
    while waiting:
        batch = [waiting.pop(0)]
        left = max_load - share(batch[0].slowdown, time_scale)
        while fitting := [s for s in [*waiting, *by_share] if share(s.slowdown, time_scale) <= left + 1e-9]:
            batch.append(fitting[0])
            left -= share(fitting[0].slowdown, time_scale)
            if fitting[0] in waiting:
                waiting.remove(fitting[0])
        batches.append(batch)
    return batches


def _rates(
    knob: LimitKnob, limits: Limits, order: StressOrder, step_s: float, batch: list[Subject]
) -> Iterator[Finding]:
    """Run the whole batch at the same time, for the same time, each subject at the rate of its device."""
    trials, planned = [], []
    for number, subject in enumerate(batch):
        device_s = step_s * subject.slowdown
        steps = max(1, round(order.task_s / device_s))
        cores = ceiling_cores(share(subject.slowdown, order.time_scale))
        plan = LimitPlan(f"client-{number:03d}", subject.cap_bytes, cores)
        trials.append((plan, paced(device_s * order.time_scale, steps)))
        planned.append(steps * device_s)
    load = sum(share(subject.slowdown, order.time_scale) for subject in batch)
    walls, others = _run(limits, trials)
    for subject, asked, wall in zip(batch, planned, walls, strict=True):
        yield Finding(knob, subject.name, asked, wall / order.time_scale, limits.cpu_backend, load, others)


def _run(limits: Limits, trials: list[tuple[LimitPlan, Body]]) -> tuple[list[float], float]:
    """Start the trials together once all are warmed up; return their results and the cores that others used."""
    groups = [limits.create(plan) for plan, _ in trials]
    hogs: list[Hog] = []
    try:
        for group, (_, body) in zip(groups, trials, strict=True):
            hogs.append(Hog(group, body))
        for hog in hogs:
            hog.ready()
        meter = host.LoadMeter()
        for hog in hogs:
            hog.go()
        results = [hog.result() for hog in hogs]
        return results, meter.other_cores()
    finally:
        for hog in hogs:
            hog.kill()
        for group in groups:
            group.remove()


def _death(limits: Limits, cap_bytes: int) -> int:
    """Return how much memory a client had added when its memory cap killed it."""
    group = limits.create(LimitPlan("glutton", memory_bytes=cap_bytes))
    touched = mmap.mmap(-1, mmap.PAGESIZE)
    hog = Hog(group, glutton(group, touched))
    try:
        hog.wait()
        return int.from_bytes(touched[:8], sys.byteorder)
    finally:
        hog.kill()
        group.remove()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a clean exit, so that nothing is left behind
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=StressOrder)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # otherwise the first collection in each hog would copy the whole heap into its own memory
    limits = best_limits("verify")
    try:
        for finding in prove(order, limits):
            print(msgspec.json.encode(finding).decode(), flush=True)
    finally:
        limits.close()


if __name__ == "__main__":
    main()
