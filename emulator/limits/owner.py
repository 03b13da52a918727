"""Names of cgroups: a run's folder is named after its owner, to tell leftovers from live runs.

A name is `fleetbed-<boot>-<pid>-<start time>.<run>`. Pid and start time identify a process
within one boot and one pid namespace, and <boot> is a hash of these two: a folder with another hash was made
from inside another container, and is not ours to judge.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

PROC = Path("/proc")
LONGEST_NAME = 24  # of a run, in the folder's name
_PROCESS = re.compile(r"([0-9a-f]{8})-(\d+)-(\d+)")
_NAME = re.compile(r"fleetbed-([0-9a-f]{8}-\d+-\d+)\..+")


def this_process(proc: Path = PROC) -> str:
    """Name this process so that no other ever has the same name, on this boot of the host."""
    pid = os.getpid()
    return f"{_boot(proc)}-{pid}-{_start_time(pid, proc)}"


def is_alive(process: str, proc: Path = PROC) -> bool | None:
    """Whether a process of this name still runs; None if it cannot be known here: another boot, another container."""
    match = _PROCESS.fullmatch(process)
    if match is None or match[1] != _boot(proc):
        return None
    return _start_time(int(match[2]), proc) == int(match[3])


def folder_name(run: str, proc: Path = PROC) -> str:
    safe = re.sub(r"[^\w-]", "_", run, flags=re.ASCII)[:LONGEST_NAME] or "run"
    return f"fleetbed-{this_process(proc)}.{safe}"


def is_leftover(name: str, proc: Path = PROC) -> bool:
    """Whether this is the folder of a run of this boot whose owner has died."""
    match = _NAME.fullmatch(name)
    return match is not None and is_alive(match[1], proc) is False


def _boot(proc: Path) -> str:
    boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink(proc / "self/ns/pid")
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=4).hexdigest()


def _start_time(pid: int, proc: Path) -> int | None:
    """The start of a process in clock ticks since boot; None if there is none, or only a zombie."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the command name may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])
