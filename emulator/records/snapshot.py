"""The present state of a run: a small file beside its records, which hold only what has ended.

It is replaced about twice a second while the run goes on. Its reader learns from it whether the process is still alive.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from fleetbed.emulator.limits.owner import is_alive

FILE = "now.json"
MOST_BYTES = 4 << 20


class TaskNow(Struct, frozen=True, array_like=True):
    """A task under way or waiting for its merge; times are device seconds."""

    client: int
    variant: str
    doing: str
    dispatched_s: float
    planned_end_s: float


class Snapshot(Struct, frozen=True, kw_only=True):
    process: str  # the one that carries the run out
    said: str = ""  # the last sentence before the rounds began, such as what is being measured
    round: int = 0
    device_s: float = 0.0
    host_s: float = 0.0
    left_s: float | None = None  # estimated host seconds to the end; None: not known yet
    tasks: tuple[TaskNow, ...] = ()

    @property
    def alive(self) -> bool | None:
        """Whether its process still runs; None if that cannot be known here."""
        return is_alive(self.process)


def read_snapshot(folder: Path) -> Snapshot | None:
    """Return the last snapshot of a run; None if there is none, or none that can be read."""
    try:
        path = folder / FILE
        if not path.is_file() or path.stat().st_size > MOST_BYTES:  # reading a pipe would never end
            return None
        return msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
