"""The duration of work on a device: the work of each class of operations over the device's rate for it."""

from __future__ import annotations

from msgspec import Struct

from fleetbed.models.cost.operations import Operations, compute_seconds
from fleetbed.models.cost.predict import Cost
from fleetbed.models.work import Work
from fleetbed.profiles.types import Device


class Plan(Struct, frozen=True, kw_only=True):
    """Device seconds of a task: `step_s` per optimiser step, `total_s` in all. A task is never shorter than that."""

    step_s: float
    total_s: float
    flops: float


def plan_of(device: Device, cost: Cost, steps: int) -> Plan:
    step_s = compute_seconds(device, cost.step) if steps else 0.0
    total_s = compute_seconds(device, cost.operations)
    return _throttled(Plan(step_s=step_s, total_s=total_s, flops=cost.flops), device)


def server_seconds(device: Device, work: Work) -> float:
    """The device seconds of the server's own work."""
    return compute_seconds(device, Operations(matmul_flop=work.server_flops))


def _throttled(plan: Plan, device: Device) -> Plan:
    """The plan on a device that gets hot and then continues at a lower rate. It is cool again at its next task."""
    throttle = device.throttle
    if throttle is None or plan.total_s <= throttle.after_s:
        return plan
    total_s = throttle.after_s + (plan.total_s - throttle.after_s) / throttle.rate
    # the steps are paced evenly; only their sum is the plan's
    return Plan(step_s=plan.step_s * total_s / plan.total_s, total_s=total_s, flops=plan.flops)
