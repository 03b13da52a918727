"""The limits that the shell sets (ulimit): raised as far as this user may, and too small ones refused early.

A process that hits one later dies inside a library, or waits for a thread that never came to be.
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
OWN_FILES, FILES_PER_WORKER = 128, 1  # the command's own; a connection
OWN_THREADS, THREADS_PER_WORKER = 64, 3  # the command's and the zygote's own; a worker and ZeroMQ's two
LIBRARY_BYTES = 1 << 30  # addresses that torch and what it loads take


class Need(Struct, frozen=True):
    limit: int
    least: int
    what: str


def check(clients: int, processes: Processes) -> None:
    """Raise the soft limits to what this fleet needs. HostCannot where a hard one is below that."""
    for need in needs(clients, processes):
        soft, hard = resource.getrlimit(need.limit)
        if _covers(soft, need.least):
            continue
        if not _covers(hard, need.least):
            or_inline = "" if processes == "inline" else ", or set processes to inline"
            raise HostCannot(
                f"{need.what} needs {OPTIONS[need.limit]} {_in_units(need.limit, need.least)} or more, and the hard "
                f"limit here is {_in_units(need.limit, hard)}; raise it in limits.conf, systemd or the container's "
                f"options{or_inline}"
            )
        resource.setrlimit(need.limit, (hard, hard))


def needs(clients: int, processes: Processes) -> list[Need]:
    """What a fleet needs of each limit."""
    if processes == "inline":
        return [Need(FILES, OWN_FILES, "a run"), Need(ADDRESS_BYTES, LIBRARY_BYTES, "torch")]
    at_once = 2 * host.cores() + (clients if processes == "resident" else 0)
    fleet = f"a fleet of {clients} {processes} clients"
    shared_bytes = 2 * host.memory_bytes()  # addresses for whatever fits into memory; few of them are used
    found = [
        Need(FILES, OWN_FILES + FILES_PER_WORKER * at_once, fleet),
        Need(FILE_BYTES, shared_bytes, "memory that is shared with clients"),
        Need(ADDRESS_BYTES, shared_bytes + LIBRARY_BYTES, "memory that is shared with clients"),
    ]
    if os.getuid() != 0:  # root has no such limit
        found.append(Need(THREADS, _threads_of_user() + OWN_THREADS + THREADS_PER_WORKER * at_once, fleet))
    return found


def holds_files_down() -> bool:
    """Whether a file may not become as large as the disk allows."""
    return resource.getrlimit(FILE_BYTES)[0] != resource.RLIM_INFINITY


def _covers(limit: int, least: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least


def _in_units(limit: int, value: int) -> str:
    """As the shell counts: blocks of 1024 bytes for sizes."""
    return str(-(-value // 1024) if limit in (FILE_BYTES, ADDRESS_BYTES) else value)


def _threads_of_user() -> int:
    """How many threads this user has now, all of which count towards the limit."""
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                total += (process / "task").stat().st_nlink - 2 if process.stat().st_uid == os.getuid() else 0
            except OSError:  # it has ended meanwhile
                continue
    return total
