"""Whether a fleet's processes find room on this host. Asked before anything is started."""

from __future__ import annotations

from fleetbed.emulator import host
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.experiment import Processes

#: what a resident client has of its own while it is idle, once it has trained, and what the host needs for itself
IDLE_BYTES, RESERVE_BYTES = 12 << 20, 2 << 30


def check_room(clients: int, processes: Processes) -> None:
    """Refuse a fleet whose processes cannot all be there at once."""
    needed = RESERVE_BYTES + IDLE_BYTES * clients
    available = host.available_bytes()
    if processes == "resident" and needed > available:
        fitting = max(0, (available - RESERVE_BYTES) // IDLE_BYTES)
        raise HostCannot(
            f"{clients} resident clients need {needed >> 20} MiB and {available >> 20} MiB are free: about {fitting} "
            "would fit; set processes to on-demand, where only those who take part have a process"
        )
