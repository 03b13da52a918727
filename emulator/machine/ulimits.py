"""The limits of the shell (ulimit): raised as far as this user may, and refused early if they are too low.

A process that hits one later dies inside a library, or waits for a thread that was never started.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from msgspec import Struct

from fleetbed.emulator.machine import host
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.experiment import Processes

FILES, THREADS, FILE_BYTES, ADDRESS_BYTES = (
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_AS,
)
OPTIONS = {FILES: "ulimit -n", THREADS: "ulimit -u", FILE_BYTES: "ulimit -f", ADDRESS_BYTES: "ulimit -v"}
OWN_FILES, FILES_PER_WORKER = 128, 1  # of the command; a connection for each worker
OWN_THREADS, THREADS_PER_WORKER = 64, 3  # of command and zygote; a worker and ZeroMQ's two
LIBRARY_BYTES = 1 << 30  # addresses for torch and its libraries


class Need(Struct, frozen=True):
    limit: int
    least: int
    what: str


def check(clients: int, processes: Processes) -> None:
    """Raise the soft limits to what this fleet needs. Raises HostCannot where a hard limit is lower."""
    for need in needs(clients, processes):
        soft, hard = resource.getrlimit(need.limit)
        if _covers(soft, need.least):
            continue
        if not _covers(hard, need.least):
            or_inline = "" if processes in ("inline", "ray") else ", or set processes to inline"
            raise HostCannot(
                f"{need.what} needs {OPTIONS[need.limit]} {_in_units(need.limit, need.least)} or more, and the hard "
                f"limit here is {_in_units(need.limit, hard)}; raise it in limits.conf, systemd or the container's "
                f"options{or_inline}"
            )
        resource.setrlimit(need.limit, (hard, hard))


def needs(clients: int, processes: Processes) -> list[Need]:
    """The least value of each limit that a fleet needs."""
    if processes in ("inline", "ray"):  # then clients are processes of other hosts
        return [Need(FILES, OWN_FILES, "a run"), Need(ADDRESS_BYTES, LIBRARY_BYTES, "torch")]
    at_once = 2 * host.cores() + (clients if processes == "resident" else 0)
    fleet = f"a fleet of {clients} {processes} clients"
    shared_bytes = 2 * host.memory_bytes()  # addresses for all of the memory, most of which are never used
    found = [
        Need(FILES, OWN_FILES + FILES_PER_WORKER * at_once, fleet),
        Need(FILE_BYTES, shared_bytes, "memory that is shared with clients"),
        Need(ADDRESS_BYTES, shared_bytes + LIBRARY_BYTES, "memory that is shared with clients"),
    ]
    if os.getuid() != 0:  # root has no such limit
        found.append(Need(THREADS, _threads_of_user() + OWN_THREADS + THREADS_PER_WORKER * at_once, fleet))
    return found


def holds_files_down() -> bool:
    """Whether the shell limits the size of files."""
    return resource.getrlimit(FILE_BYTES)[0] != resource.RLIM_INFINITY


def _covers(limit: int, least: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least


def _in_units(limit: int, value: int) -> str:
    """A limit in the shell's units: blocks of 1024 bytes for sizes."""
    return str(-(-value // 1024) if limit in (FILE_BYTES, ADDRESS_BYTES) else value)


def _threads_of_user() -> int:
    """The number of threads that this user has, all of which count towards the limit."""
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                total += (process / "task").stat().st_nlink - 2 if process.stat().st_uid == os.getuid() else 0
            except OSError:  # it ended meanwhile
                continue
    return total
