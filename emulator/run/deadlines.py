"""Predicts before a run which clients cannot meet the deadline, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec

from fleetbed.emulator.engine.layout import Layout
from fleetbed.emulator.engine.participant import Participant
from fleetbed.emulator.method.algorithm import Assignment
from fleetbed.emulator.run.fitting import choose_variants
from fleetbed.emulator.run.preparation import Fresh
from fleetbed.emulator.timeline.network import transfer_s
from fleetbed.emulator.wire import codec
from fleetbed.models.cost.choose import round_bytes, transfer_seconds
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput


def check_deadline(layout: Layout, prepared: Fresh) -> None:
    """Refuse a deadline that is too short even for the download and the first steps of the fastest client."""
    deadline_s = _deadline_s(layout)
    if deadline_s is None:
        return
    first = _first_work(prepared)
    shortest = {
        number: _seconds(layout, prepared, who, first(who), answered=False)
        for number, who in prepared.participants.items()
    }
    fastest = min(shortest, key=lambda number: shortest[number])
    if shortest[fastest] > deadline_s:
        spec = layout.specs[fastest]
        raise BadInput(
            f"policies: deadline_s is {deadline_s:g}, but even the fastest client, {spec.name} ({spec.kind}), needs "
            f"{shortest[fastest]:.3g} s of device time before its upload begins; set deadline_s above that"
        )


def missed_deadlines(layout: Layout, prepared: Fresh) -> list[str]:
    """Return a sentence for each kind of device whose clients all miss the deadline by plan, even with idle links."""
    deadline_s = _deadline_s(layout)
    if deadline_s is None:
        return []
    first = _first_work(prepared)
    found = []
    for kind in dict.fromkeys(who.spec.kind for who in prepared.participants.values()):
        members = [who for who in prepared.participants.values() if who.spec.kind == kind]
        at_first = [_seconds(layout, prepared, who, first(who)) for who in members]
        at_most = [_seconds(layout, prepared, who, who.heaviest) for who in members]
        if min(at_most) <= deadline_s:
            continue
        when = "" if min(at_first) > deadline_s else " after the first round"
        found.append(
            f"no client on {kind} ({len(members)} of {len(prepared.participants)}) can meet deadline_s "
            f"{deadline_s:g}{when}: they need {_range(at_most)} s of device time; "
            + deadline_advice(layout, prepared, kind, max(at_most))
        )
    return found


def deadline_advice(layout: Layout, prepared: Fresh, kind: str, needed_s: float | None) -> str:
    """Suggest changes with which all clients of a kind meet the deadline.

    `needed_s` is the longest time that any of them needs; None if it never finishes.
    """
    policy = layout.config.policy
    ways = [] if needed_s is None else [f"set deadline_s to {_rounded(needed_s, math.ceil)} or more"]
    if (budget := _budget(layout, prepared, kind)) is not None:
        ways.append(budget)
    if not policy.partial:
        ways.append("set partial to true")
    return ", or ".join(ways or ["their links or devices are too slow for this deadline"])


def _budget(layout: Layout, prepared: Fresh, kind: str) -> str | None:
    """Suggest a limit on a round's time under which the clients choose variants that meet the deadline, if any."""
    deadline_s = layout.config.policy.deadline_s
    if deadline_s is None or layout.assigned:
        return None
    beside_s = 0.0  # the part of a round that the choice of a variant does not count
    for who in prepared.participants.values():
        if who.spec.kind == kind:
            plan_s = prepared.timing.modelled(who.spec.device, who.client.variant, who.heaviest).total_s
            size = prepared.choices[who.spec.number].cost.state_bytes
            sent_s = transfer_seconds(who.spec.link, *round_bytes(who.heaviest, size))
            beside_s = max(beside_s, _seconds(layout, prepared, who, who.heaviest) - plan_s - sent_s)
    if beside_s >= deadline_s:
        return None
    round_s = _rounded(deadline_s - beside_s, math.floor)
    config = layout.config
    budgets = msgspec.structs.replace(config.experiment.budgets, round_s=float(round_s), all_must_fit=False)
    experiment = msgspec.structs.replace(config.experiment, budgets=budgets)
    limited = replace(layout, config=msgspec.structs.replace(config, experiment=experiment))
    try:
        choices = choose_variants(limited, prepared.timing.budget_s)
    except BadInput:  # no client fits
        return None
    members = [number for number, who in prepared.participants.items() if who.spec.kind == kind]
    variants = [choices[number].variant for number in members]
    if None in variants:
        return None
    names = ", ".join(sorted({str(variant) for variant in variants}))
    return f"set budgets.round_s to {round_s}, with which they train {names}"


def _deadline_s(layout: Layout) -> float | None:
    """Return the deadline to compare plans with; None for a replay, whose times were measured."""
    config = layout.config
    if config.policy.kind != "deadline" or config.experiment.timing.source == "replay":
        return None
    return config.policy.deadline_s


def _first_work(prepared: Fresh) -> Callable[[Participant], Work]:
    return lambda who: prepared.method.work(prepared.state, _first(prepared, who))


def _first(prepared: Fresh, who: Participant) -> Assignment:
    return Assignment(client=who.client, stage=prepared.method.needs.stages[0])


def _seconds(layout: Layout, prepared: Fresh, who: Participant, work: Work, *, answered: bool = True) -> float:
    """What a client alone needs for a task: download, plan, and the upload that it declares, or one of nothing.

    With a bandwidth trace the rates are not known beforehand, so that only the latency counts.
    """
    plan = prepared.timing.modelled(who.spec.device, who.client.variant, work)
    compute_s = plan.first_s(1) if layout.config.policy.partial else plan.total_s
    message = prepared.method.send(prepared.state, _first(prepared, who))
    size_bytes = codec.size_of(codec.pack(message))
    up_bytes = size_bytes if work.bytes_up is None else work.bytes_up
    if layout.rates is not None:
        size_bytes = up_bytes = 0
    link, server = who.spec.link, layout.server_link
    up_s = transfer_s(link, server, up_bytes if answered else 0, up=True)
    return transfer_s(link, server, size_bytes, up=False) + compute_s + up_s


def _range(seconds: list[float]) -> str:
    least, most = f"{min(seconds):.3g}", f"{max(seconds):.3g}"
    return least if least == most else f"{least} to {most}"


def _rounded(seconds: float, towards: Callable[[float], int]) -> str:
    """Format with three digits, rounded in the direction in which the advice stays true."""
    scale = 10.0 ** (2 - math.floor(math.log10(seconds)))
    return f"{towards(seconds * scale) / scale:g}"
