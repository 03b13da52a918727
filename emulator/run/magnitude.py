"""Estimates the events of a round before it begins, and refuses a run that would be far too slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleetbed.emulator.engine.layout import Layout
from fleetbed.emulator.run.preparation import Fresh
from fleetbed.models.cost.choose import round_bytes
from fleetbed.profiles.errors import BadInput

#: events in one round; the timeline handles some ten thousand a second
MOST_EVENTS = 5_000_000


def check_events(layout: Layout, prepared: Fresh, planned_s: Mapping[int, float]) -> None:
    """Refuse links that change, or clients that come and go, far too often within one round.

    `planned_s` is the compute time of each client. Messages are assumed to be as large as the model.
    """
    experiment = layout.config.experiment
    transfer_s = {number: _transfer_s(layout, number, prepared) for number in planned_s}
    longest_s = max(planned_s[number] + transfer_s[number] for number in planned_s)
    limits_s = (layout.config.policy.deadline_s, experiment.device_time_limit_s)
    round_s = min(longest_s, *(limit_s for limit_s in limits_s if limit_s is not None), longest_s)
    if layout.rates is not None:
        changes = sum(seconds / layout.rates.spacing_s(number) for number, seconds in transfer_s.items())
        _check(changes, "availability.bandwidth: the links would change", "put its lines further apart", round_s)
    for key, changes_s in _availability_changes(layout):
        _check(changes_s * round_s, f"availability.{key}: clients would come and go", "make them stay longer", round_s)


def _check(events: float, what: str, fix: str, round_s: float) -> None:
    if events > MOST_EVENTS:
        raise BadInput(
            f"{what} about {events:.1g} times in a round of {round_s:.3g} s, but at most {MOST_EVENTS} times are "
            f"possible; {fix}, or use faster devices and links or a smaller model."
        )


def _availability_changes(layout: Layout) -> Iterator[tuple[str, float]]:
    """Yield how often per second clients arrive or leave, summed over all clients."""
    choice, clients = layout.config.experiment.availability, len(layout.specs)
    if choice.kind == "on-off":
        yield "mean_on_s", 2 * clients / (choice.mean_on_s + choice.mean_off_s)
    elif choice.kind == "charging":
        yield "day_s", 2 * clients / choice.day_s
    elif layout.presence is not None:
        yield "trace", 2 * sum(map(len, layout.presence.stays)) / layout.presence.end_s


def _transfer_s(layout: Layout, number: int, prepared: Fresh) -> float:
    """How long a task's messages take down and up again, at the trace's mean rate or the link's own."""
    down, up = round_bytes(prepared.participants[number].heaviest, prepared.choices[number].cost.state_bytes)
    if layout.rates is not None:
        return 8.0 * (down + up) / layout.rates.mean_bit_s(number)
    link = layout.specs[number].link
    return 8.0 * down / (1e6 * link.down_mbit_s) + 8.0 * up / (1e6 * link.up_mbit_s)
