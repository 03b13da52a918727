"""Checks, before anything is started, whether a fleet's processes fit on this host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetbed.emulator.machine import host, ulimits
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.experiment import Processes

if TYPE_CHECKING:  # it imports torch, which the command does later
    from fleetbed.models.base import Family, InputSpec

#: the memory of an idle resident client that has trained, and the memory that the host needs for itself
IDLE_BYTES, RESERVE_BYTES = 12 << 20, 2 << 30


def check_processes_fit(clients: int, processes: Processes) -> None:
    """Refuse a fleet whose processes cannot all exist at once."""
    needed = RESERVE_BYTES + IDLE_BYTES * clients
    available = host.available_bytes()
    if processes == "resident" and needed > available:
        fitting = max(0, (available - RESERVE_BYTES) // IDLE_BYTES)
        raise HostCannot(
            f"{clients} resident clients need {needed >> 20} MiB and {available >> 20} MiB are free: about {fitting} "
            "would fit; set processes to on-demand, so that only clients with a task have a process"
        )
    ulimits.check(clients, processes)


def can_start_zygote() -> bool:
    """Whether the limits of the shell allow the process that forks clients to start."""
    try:
        ulimits.check(0, "on-demand")
    except HostCannot:
        return False
    return True


def check_model(family: Family, spec: InputSpec) -> None:
    """Refuse a family whose models do not fit into the server's memory, before any is made."""
    needed = len(family.variants) * _model_bytes(family, family.variants[-1], spec)
    available = host.available_bytes()
    if needed > available:
        raise HostCannot(
            f"model: the {len(family.variants)} variants of {family.name} up to {family.variants[-1]} take "
            f"{needed >> 20} MiB at images or texts of shape {spec.shape} and {spec.classes} classes, but "
            f"{available >> 20} MiB of memory are free; lower the widths in model.options or data.image_size"
        )


def _model_bytes(family: Family, variant: str, spec: InputSpec) -> int:
    net = family.outline(variant, spec)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*net.parameters(), *net.buffers()))
