"""Ends the processes of a zygote that was killed before it could do so itself.

Its workers die with it, except one that was stopped before it could ask the kernel for that. All share its session.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

TRIES, PAUSE_S = 200, 0.01


def end_session(session: int) -> None:
    """Kill all processes of a session and wait for them, for a limited time: a process may hang in the kernel."""
    for _ in range(TRIES):
        alive = [pid for pid in psutil.pids() if _is_alive_in(session, pid)]
        if not alive:
            return
        for pid in alive:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


def _is_alive_in(session: int, pid: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        return False
