"""Ties a process to its parent: the kernel signals it when the parent ends, however that ends."""

from __future__ import annotations

import os
import signal

from fleetbed.emulator.machine import heap

PR_SET_PDEATHSIG = 1


def signal_when_parent_ends(signal_: signal.Signals) -> None:
    """Ask the kernel to send this process a signal as soon as its parent ends, or the thread that started it."""
    heap.LIBC.prctl(PR_SET_PDEATHSIG, signal_)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask for this signal when the parent, given by its process id, ends."""
    signal_when_parent_ends(by)
    if os.getppid() != parent:  # it had ended before the line above
        os._exit(1)
