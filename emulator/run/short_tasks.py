"""An executor for forecasts: it runs two steps of each kind of task and reuses their result for all tasks of that kind.

So the answers have the same sizes as in the run, whatever the method sends, and the host time of a step is measured at
the same time. Two tasks are of one kind if their variant, their stage and the shapes of their messages are the same.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from msgspec.structs import replace

from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.processes.executor import Order, Outcome
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Evaluate, Evaluated, Train, Trained, kept_name
from fleetbed.profiles.errors import FleetbedError

#: the first step of a kind is slow, because memory and kernels are cold
STEPS = 2


@dataclass(frozen=True)
class Short:
    """The result of two steps of a kind of task, and the host seconds of a step and of everything else."""

    frames: list[codec.Buffer]
    keep: str | None
    step_s: float
    beside_s: float


class StepClock:
    """Records when each step ends; used instead of a pacer."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def step(self) -> None:
        self.marks.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        """Return the seconds of the last step, and those after it; if there was no step, all count as the latter."""
        beside_s = time.perf_counter() - self.marks[-1]
        return (self.marks[-1] - self.marks[-2] if len(self.marks) > 1 else 0.0), beside_s


class ShortTasks:
    """Implements `Executor`. `tasks` is the engine's mapping of unfinished tasks by number."""

    def __init__(self, workplace: TaskRunner) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.tasks: dict[int, Task] = {}
        self.host_s: dict[int, float] = {}  # by task: the seconds that it takes on a core
        self.evaluated: Counter[str] = Counter()  # test samples by variant
        self.rates: dict[str, float] = {}  # FLOP/s of training steps, by variant
        self._workplace = workplace
        self._orders: dict[int, Order] = {}
        self._known: dict[tuple[object, ...], Short] = {}

    @classmethod
    def sharing(cls, other: ShortTasks) -> ShortTasks:
        """Return an executor for another loop over the same method that shares the results known so far."""
        made = cls(other._workplace)
        made._known = other._known
        return made

    def submit(self, order: Order) -> None:
        self._orders[order.task] = order
        if isinstance(order.header, Train):
            task, short = self.tasks[order.task], self._short(order.header, order)
            steps = task.plan_s / task.step_s if task.step_s else 0.0
            self.host_s[order.task] = steps * short.step_s + short.beside_s
            if steps and short.step_s:
                self.rates[task.variant] = task.flops / steps / short.step_s

    def wait(self, task: int) -> Outcome:
        order = self._orders.pop(task)
        header = order.header
        if not isinstance(header, Train):
            assert isinstance(header, Evaluate)  # measurements were made before
            own, split = header.local_client, self._workplace.split
            self.evaluated[header.variant] += len(self._workplace.dataset.y_test if own is None else split.test[own])
            return Outcome(kind="ok", answer=Evaluated(task=task, samples=0, accuracy=0.0, loss=0.0))
        short = self._short(header, order)
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

    def close(self) -> None:
        self._orders.clear()

    def _kept(self, header: Train, short: Short) -> str | None:
        """Create the client's state file under its own name, with the content that the short task left; return it."""
        if short.keep is None:
            return None
        name = kept_name(header.client, header.task)
        own = self._workplace.folder / name
        if not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            own.hardlink_to(self._workplace.folder / short.keep)
        return name

    def _short(self, header: Train, order: Order) -> Short:
        message = codec.unpack(order.frames)
        kind = (header.variant, header.stage, header.kept is not None, *_shapes(message))
        if kind not in self._known:
            most = STEPS if header.most_steps is None else min(STEPS, header.most_steps)
            asked = replace(header, most_steps=most)
            try:
                self._known[kind] = self._carry_out(asked, message)
            except Exception as error:
                raise FleetbedError(
                    f"a trial task of {header.variant} ({header.stage}), as the run will carry it out, failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return self._known[kind]

    def _carry_out(self, asked: Train, message: Bundle) -> Short:
        clock = StepClock()
        reply, _ = self._workplace.train(asked, message, clock)
        step_s, beside_s = clock.read()
        return Short(codec.pack(reply.message), self._workplace.keep(asked, reply.keep), step_s, beside_s)


def _shapes(message: Bundle) -> list[object]:
    tensors = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(message.tensors.items())]
    return [*tensors, *sorted(message.values)]
