"""The progress of a run: everything that changes from event to event. Checkpoints hold it as it is."""

from __future__ import annotations

from msgspec import Struct

from fleetbed.emulator.engine.evaluation import Moment
from fleetbed.emulator.engine.participant import ClientProgress
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.timeline.availability import AnyAvailability
from fleetbed.emulator.timeline.events import Timeline
from fleetbed.emulator.timeline.policies import AnyPolicy


class Progress(Struct, kw_only=True):
    timeline: Timeline
    policy: AnyPolicy
    availability: AnyAvailability
    clients: dict[int, ClientProgress]  # also held by the participants
    state: Bundle  # of the server
    version: int = 0  # how many merges there were
    next_task: int = 0
    tasks: dict[int, Task] = {}  # in flight or arrived, not merged yet
    sent: dict[int, Bundle] = {}  # to those tasks
    merging: list[tuple[int, ...]] = []  # the tasks of each merge; the server is working on the first
    round_start_s: float = 0.0
    round_host_s: float = 0.0
    free_since: dict[int, float] = {}  # by client: the end of its last task, or when it became available
    failed_in_a_row: int = 0  # tasks that have failed since the last merge
    evaluated: Moment | None = None  # the last evaluation that was asked for
