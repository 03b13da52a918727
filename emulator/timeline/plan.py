"""The duration of work on a device: the work of each class of operations over the device's rate for it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from fleetbed.models.cost.operations import Operations, compute_seconds
from fleetbed.models.cost.predict import Cost
from fleetbed.models.work import ServerWork, Work
from fleetbed.profiles.types import Device


class Pace(Struct, frozen=True, array_like=True):
    """`steps` optimiser steps that take `step_s` seconds each."""

    steps: int
    step_s: float


class Plan(Struct, frozen=True, kw_only=True):
    """Device seconds of a task: of the optimiser steps of each phase, and `total_s` in all. A plan is a floor."""

    paces: tuple[Pace, ...]
    total_s: float
    flops: float

    @property
    def steps_s(self) -> float:
        """The seconds of all steps."""
        return sum(pace.steps * pace.step_s for pace in self.paces)

    def first_s(self, steps: int) -> float:
        """The seconds of the first `steps` steps."""
        seconds, left = 0.0, steps
        for pace in self.paces:
            seconds += min(left, pace.steps) * pace.step_s
            left -= min(left, pace.steps)
        return seconds


def plan_of(device: Device, cost: Cost, work: Work) -> Plan:
    paces = tuple(
        Pace(phase.steps, compute_seconds(device, step))
        for phase, step in zip(work.phases, cost.steps, strict=True)
        if phase.steps
    )
    total_s = compute_seconds(device, cost.operations)
    return _throttled(Plan(paces=paces, total_s=total_s, flops=cost.flops), device)


def server_seconds(device: Device, work: ServerWork, cost_of: Callable[[str, Work], Cost]) -> float:
    """The device seconds of a merge; `cost_of` gives the cost of work on a variant."""
    operations = Operations(matmul_flop=work.flops)
    for variant, each in work.models:
        operations += cost_of(variant, each).operations
    return compute_seconds(device, operations)


def _throttled(plan: Plan, device: Device) -> Plan:
    """The plan on a device that gets hot and then continues at a lower rate. It is cool again at its next task."""
    total_s = throttled_s(device, plan.total_s)
    if total_s == plan.total_s:
        return plan
    # the heat is spread evenly over the steps; only their sum is the plan's
    paces = tuple(Pace(pace.steps, pace.step_s * total_s / plan.total_s) for pace in plan.paces)
    return Plan(paces=paces, total_s=total_s, flops=plan.flops)


def throttled_s(device: Device, total_s: float) -> float:
    """The seconds of a task that would take `total_s` on a device that stays cool."""
    throttle = device.throttle
    if throttle is None or total_s <= throttle.after_s:
        return total_s
    return throttle.after_s + (total_s - throttle.after_s) / throttle.rate
