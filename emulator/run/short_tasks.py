"""An executor for forecasts: two steps of each kind of task are really carried out, all other answers are copies.

So the answers have the sizes that they will have in the run, for any method, and the time of a step on this
host is measured on the way. Two tasks are of one kind if variant, stage and the shapes of what is sent and of what is
expected back are the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.executor import Order, Outcome
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Evaluate, Evaluated, Train, Trained, kept_name
from fleetbed.profiles.errors import FleetbedError

T = TypeVar("T")
#: the first step of a kind is slow, because memory and kernels are cold
STEPS = 2


@dataclass(frozen=True)
class Short:
    """The reply to two steps of a kind of task, and the host seconds of a step and of everything else."""

    frames: list[codec.Buffer]
    keep: str | None
    step_s: float
    beside_s: float


class StepClock:
    """Notes when each step ends, in place of a pacer."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def step(self) -> None:
        self.marks.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        """The seconds of the last step and the seconds after it; without any step, 0 and all seconds."""
        beside_s = time.perf_counter() - self.marks[-1]
        return (self.marks[-1] - self.marks[-2] if len(self.marks) > 1 else 0.0), beside_s


class KindsOfTasks:
    """Carries out two steps of each kind of task, once."""

    def __init__(self, runner: TaskRunner) -> None:
        self.runner = runner
        self._known: dict[tuple[object, ...], Short] = {}

    def short(self, order: Order) -> Short:
        header, message = order.header, codec.unpack(order.frames)
        assert isinstance(header, Train)
        assert self.runner.method is not None
        expected = self.runner.method.expects(self.runner.assignment(header), message)
        specs = sorted(expected.tensors.items()) if expected is not None else []
        kind = (header.variant, header.stage, header.kept is not None, *_shapes(message), *specs)
        if kind not in self._known:
            most = STEPS if header.most_steps is None else min(STEPS, header.most_steps)
            try:
                self._known[kind] = self._carry_out(replace(header, most_steps=most), message)
            except Exception as error:
                raise FleetbedError(
                    f"a trial task of {header.variant} ({header.stage}), as the run will carry it out, failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return self._known[kind]

    def _carry_out(self, asked: Train, message: Bundle) -> Short:
        clock = StepClock()
        reply, _ = self.runner.train(asked, message, clock)
        step_s, beside_s = clock.read()
        return Short(codec.pack(reply.message), self.runner.keep(asked, reply.keep), step_s, beside_s)


class ShortTasks:
    """Implements `Executor`. `tasks` is the engine's mapping of unfinished tasks by number."""

    def __init__(self, kinds: KindsOfTasks, tasks: Mapping[int, Task]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.host_s: dict[int, float] = {}  # by task: the seconds that it takes on a core
        self.evaluated: Counter[str] = Counter()  # samples by variant
        self.rates: dict[str, float] = {}  # FLOP/s of training steps, by variant
        self._kinds = kinds
        self._tasks = tasks
        self._orders: dict[int, Order] = {}

    @property
    def folder(self) -> Path:
        return self._kinds.runner.folder

    def submit(self, order: Order) -> None:
        self._orders[order.task] = order
        if isinstance(order.header, Train):
            task, short = self._tasks[order.task], self._kinds.short(order)
            steps = task.plan_s / task.paces[0].step_s if task.paces else 0.0  # as many of the first kind
            self.host_s[order.task] = steps * short.step_s + short.beside_s
            if steps and short.step_s:
                self.rates[task.variant] = task.flops / steps / short.step_s

    def wait(self, task: int) -> Outcome:
        order = self._orders.pop(task)
        header = order.header
        if not isinstance(header, Train):
            assert isinstance(header, Evaluate)  # reference times were measured before
            runner, own = self._kinds.runner, header.local_client
            self.evaluated[header.variant] += len(runner.dataset.y_test if own is None else runner.split.test[own])
            if header.recalibrate:
                self.evaluated[header.variant] += sum(map(len, runner.split.train))
            return Outcome(kind="ok", answer=Evaluated(task=task, samples=0, loss=0.0))
        short = self._kinds.short(order)
        answer = Trained(
            task=task,
            keep=self._kept(header, short),
            metrics={},
            steps=0,
            samples=0,
            seconds=header.pace_total_s,
            cpu_s=0.0,
            throttled_s=None,
            peak_bytes=None,
            anon_bytes=None,
        )
        return Outcome(kind="ok", answer=answer, frames=short.frames)

    def cancel(self, task: int) -> None:
        self._orders.pop(task, None)

    def meanwhile(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None:
        self._orders.clear()

    def _kept(self, header: Train, short: Short) -> str | None:
        """The file of what the client keeps: under its own name, with the content that the short task kept."""
        if short.keep is None:
            return None
        name = kept_name(header.client, header.task)
        folder = self._kinds.runner.folder
        own = folder / name
        if not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            own.hardlink_to(folder / short.keep)
        return name


def _shapes(message: Bundle) -> list[object]:
    tensors = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(message.tensors.items())]
    return [*tensors, *sorted(message.values)]
