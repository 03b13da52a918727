"""Where a run stands: all that changes while it goes on, and all that a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetbed.emulator.engine.evaluation import Moment
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.timeline.availability import AnyAvailability
from fleetbed.emulator.timeline.events import Timeline
from fleetbed.emulator.timeline.policies import AnyPolicy


@dataclass
class Progress:
    timeline: Timeline
    policy: AnyPolicy
    availability: AnyAvailability
    state: Bundle
    version: int = 0
    next_task: int = 0
    tasks: dict[int, Task] = field(default_factory=dict)  # in flight or arrived, not merged yet
    sent: dict[int, Bundle] = field(default_factory=dict)
    merging: list[tuple[int, ...]] = field(default_factory=list)  # the head is being merged by the server
    round_start_s: float = 0.0
    round_host_s: float = 0.0
    free_since: dict[int, float] = field(default_factory=dict)  # by client: the end of its last task, or when it came
    failed_in_a_row: int = 0  # tasks in a row that came to nothing
    evaluated: Moment | None = None  # the last evaluation that was asked for
