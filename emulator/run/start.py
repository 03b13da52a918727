"""Creates the progress of a new run."""

from __future__ import annotations

from fleetbed.emulator.engine.layout import Layout
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.run.deadlines import check_deadline
from fleetbed.emulator.run.magnitude import check_events
from fleetbed.emulator.run.preparation import Fresh
from fleetbed.emulator.timeline.availability import make_availability
from fleetbed.emulator.timeline.events import Timeline
from fleetbed.emulator.timeline.making_policies import make_policy
from fleetbed.emulator.timeline.network import Pipe


def first_progress(layout: Layout, prepared: Fresh) -> Progress:
    config, link, participants = layout.config, layout.server_link, prepared.participants
    planned_s = {
        number: prepared.timing.modelled(who.spec.device, who.client.variant, who.heaviest).total_s
        for number, who in participants.items()
    }
    check_events(layout, prepared, planned_s)
    progress = Progress(
        timeline=Timeline(down=Pipe(link.up_mbit_s * 1e6), up=Pipe(link.down_mbit_s * 1e6)),
        policy=make_policy(config.experiment, config.policy, config.seed, planned_s, len(prepared.method.needs.stages)),
        availability=make_availability(
            config.experiment.availability,
            [who.spec for who in participants.values()],
            layout.presence,
            config.seed,
        ),
        clients={number: who.progress for number, who in participants.items()},
        state=prepared.state,
        free_since=dict.fromkeys(participants, 0.0),
    )
    check_deadline(layout, prepared)
    for event in progress.availability.begin(participants):
        progress.timeline.add(event)
    return progress
