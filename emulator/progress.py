"""Where a run stands: all that changes while it goes on, and all that a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetbed.emulator import wire
from fleetbed.emulator.availability import AnyAvailability, make_availability
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.evaluation import Moment
from fleetbed.emulator.layout import Layout
from fleetbed.emulator.network import Pipe, transfer_s
from fleetbed.emulator.policies import AnyPolicy, make_policy
from fleetbed.emulator.preparation import Fresh
from fleetbed.emulator.task import Task
from fleetbed.emulator.timeline import Timeline
from fleetbed.profiles.errors import BadInput


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
    fruitless: int = 0  # tasks in a row that came to nothing
    evaluated: Moment | None = None  # the last evaluation that was asked for


def first_progress(layout: Layout, prepared: Fresh) -> Progress:
    config, link, participants = layout.config, layout.server_link, prepared.participants
    heaviest = {number: prepared.method.heaviest(prepared.state, who.client) for number, who in participants.items()}
    planned_s = {
        number: prepared.planner.modelled_s(who.spec.device, who.client.variant, heaviest[number])
        for number, who in participants.items()
    }
    progress = Progress(
        timeline=Timeline(down=Pipe(link.up_mbit_s * 1e6), up=Pipe(link.down_mbit_s * 1e6)),
        policy=make_policy(config.experiment, config.policy, config.seed, planned_s, len(prepared.method.needs.stages)),
        availability=make_availability(
            config.experiment.availability,
            [who.spec for who in participants.values()],
            layout.presence,
            config.seed,
        ),
        state=prepared.state,
    )
    _check_deadline(layout, prepared)
    for event in progress.availability.begin(participants):
        progress.timeline.add(event)
    return progress


def _check_deadline(layout: Layout, prepared: Fresh) -> None:
    """A deadline that nobody can meet is refused: even the fastest client needs its download and its first steps."""
    config = layout.config
    deadline_s = config.policy.deadline_s
    if deadline_s is None or config.experiment.timing.source == "replay":
        return
    stage, shortest = prepared.method.needs.stages[0], {}
    for number, who in prepared.participants.items():
        work = prepared.method.work(prepared.state, who.client, stage)
        plan = prepared.planner.plan(who.spec.device, who.client.variant, work, 0)
        compute_s = plan.step_s if config.policy.partial else plan.total_s
        message = prepared.method.send(prepared.state, who.client, stage, 0)
        # what a trace allows is not known beforehand, so then only the latency counts
        size_bytes = wire.size_of(wire.pack(message)) if layout.rates is None else 0
        down_s = transfer_s(who.spec.link, layout.server_link, size_bytes, up=False)
        shortest[number] = down_s + compute_s + transfer_s(who.spec.link, layout.server_link, 0, up=True)
    fastest = min(shortest, key=lambda number: shortest[number])
    if shortest[fastest] > deadline_s:
        spec = layout.specs[fastest]
        raise BadInput(
            f"policies: deadline_s is {deadline_s:g}, but even the fastest client, {spec.name} ({spec.kind}), needs "
            f"{shortest[fastest]:.3g} s of device time before its upload begins; set deadline_s above that"
        )
