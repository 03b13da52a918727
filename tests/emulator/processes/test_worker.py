"""What becomes of an order that went wrong: whose fault it is."""

from __future__ import annotations

import errno

import pytest

from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.processes.worker import answer
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Failed, Measure, Measured, from_worker
from fleetbed.emulator.wire.storage import Damaged

ORDER = Measure(task=7, variant="v", kind="train", part="all", samples=1, optimise=True)


class Broken(TaskRunner):
    def __init__(self, error: Exception) -> None:
        object.__setattr__(self, "error", error)  # it is frozen

    def measure(self, order: Measure) -> Measured:
        raise self.error  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "oom"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom"),
        (Damaged("task-1: not a whole safetensors file (Cannot allocate memory (os error 12))"), "oom"),
        (OSError(errno.ENOSPC, "No space left on device", "task-1"), "host"),
        (Damaged("task-1: the file is missing"), "host"),
        (ValueError("a mistake in a method"), "crash"),
    ],
)
def test_a_failure_is_the_memory_caps_or_the_hosts_or_the_clients_own(error: Exception, kind: str) -> None:
    (frame,) = answer(Broken(error), ORDER, [], None)
    said = codec.parse_control(from_worker, frame)
    assert isinstance(said, Failed)
    assert (said.task, said.kind) == (7, kind)
    detail, place, _ = said.detail.partition(f" ({__file__}, line ")
    assert detail == (f"{type(error).__name__}: {error}" if str(error) else "MemoryError")
    assert bool(place) == (kind == "crash")  # where the author of a method can change something
