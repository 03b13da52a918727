"""The interface of the object that carries out the tasks of a client's process.

The emulator's own is `TaskRunner`, which also evaluates, measures and rehearses. The `Setup` of a run can name the
module of another one, so that the emulator does not depend on foreign code that runs in its clients.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from fleetbed.emulator.method.algorithm import Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.job import StepPacer
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.wire.messages import Enrolment, Setup, Train
from fleetbed.models.cost.opaque import Counted


class Counts(Protocol):
    """The work that a task has done so far."""

    @property
    def steps(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def counted(self) -> Counted | None:
        """The operators of code that does not declare its work."""
        ...


class Runner(Protocol):
    """Made once in the zygote, and inherited by every fork."""

    @property
    def keep_heap(self) -> bool:
        """Whether clients keep their heap between tasks."""
        ...

    @property
    def enrolled(self) -> bool:
        """Whether it knows the clients, so that it can train."""
        ...

    def enrol(self, enrolment: Enrolment) -> Runner: ...

    def warm_up(self) -> None:
        """Do, before any fork, what every fork would have to do."""
        ...

    def train(
        self, order: Train, message: Bundle, pacer: StepPacer | None, device: str = "cpu"
    ) -> tuple[Reply, Counts]: ...

    def keep(self, order: Train, keep: Bundle | None) -> str | None: ...


def open_runner(setup: Setup) -> Runner:
    """The runner of a run: the emulator's own, or what the function of this name in the setup's module makes."""
    if setup.runner is None:
        return TaskRunner.open(setup)
    made: Runner = import_module(setup.runner).open_runner(setup)
    return made
