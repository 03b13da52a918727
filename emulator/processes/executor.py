"""Executors carry out orders on the host, in any order; the engine asks for the outcome that it needs next."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from msgspec import Struct

from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.processes.worker import answer
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import (
    Evaluate,
    Evaluated,
    Failed,
    Failure,
    Measure,
    Measured,
    Train,
    Trained,
    from_worker,
)

T = TypeVar("T")
#: the worker of orders that belong to no client: evaluation and reference times
SERVICE = "service"


class Order(Struct, frozen=True, kw_only=True):
    """One piece of work for a worker. Orders are admitted by `start_s`, in device time, the longest first."""

    header: Train | Evaluate | Measure
    worker: str
    frames: list[codec.Buffer] = []
    load: float = 1.0  # the part of a core that it takes
    start_s: float = 0.0
    expected_s: float = 0.0  # host seconds, or a figure proportional to them
    limit_s: float = 600.0  # host seconds after which the worker counts as hung

    @property
    def task(self) -> int:
        return self.header.task


class Outcome(Struct, frozen=True, kw_only=True):
    """How an order ended. Times are host seconds on the monotonic clock."""

    kind: Literal["ok", "hang"] | Failure
    detail: str = ""
    answer: Trained | Evaluated | Measured | None = None
    frames: list[codec.Buffer] = []
    host_start_s: float | None = None
    host_end_s: float | None = None


class Executor(Protocol):
    outcomes: dict[int, Outcome]  # of orders that have ended, until `wait` returns them

    def submit(self, order: Order) -> None: ...

    def wait(self, task: int) -> Outcome:
        """Block until this order has ended; returns its outcome, once."""
        ...

    def cancel(self, task: int) -> None:
        """Give up an order whose outcome is no longer needed."""
        ...

    def meanwhile(self, work: Callable[[], T]) -> T:
        """Run `work` in this process while orders are carried out."""
        ...

    def close(self) -> None: ...


class InlineExecutor:
    """Carries out each order in this process, without limits, when its outcome is requested, so that debuggers work."""

    def __init__(self, runner: TaskRunner) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.runner = runner
        self._orders: dict[int, Order] = {}

    def submit(self, order: Order) -> None:
        self._orders[order.task] = order

    def wait(self, task: int) -> Outcome:
        order = self._orders.pop(task)
        start_s = time.monotonic()
        frames = answer(self.runner, order.header, order.frames, None)
        end_s = time.monotonic()
        try:
            return outcome_of(frames, start_s, end_s)
        except codec.WireError as error:  # the same outcome as from the broker
            detail = f"sent an invalid message: {error}"
            return Outcome(kind="crash", detail=detail, host_start_s=start_s, host_end_s=end_s)

    def cancel(self, task: int) -> None:
        self._orders.pop(task, None)

    def meanwhile(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None:
        self._orders.clear()


def outcome_of(frames: list[codec.Buffer], start_s: float, end_s: float) -> Outcome:
    """Return the outcome in a worker's answer. Raises WireError if the message is not an answer."""
    message = codec.parse_control(from_worker, frames[0])
    if isinstance(message, Failed):
        return Outcome(kind=message.kind, detail=message.detail, host_start_s=start_s, host_end_s=end_s)
    if not isinstance(message, (Trained, Evaluated, Measured)):
        raise codec.WireError(f"{type(message).__name__} where an answer was due")
    return Outcome(kind="ok", answer=message, frames=frames[1:], host_start_s=start_s, host_end_s=end_s)
