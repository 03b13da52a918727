"""Signals that stop a command cleanly: Ctrl-C and SIGTERM raise KeyboardInterrupt, wherever they arrive."""

from __future__ import annotations

import signal
import sys

AGAIN_S = 0.2  # long enough to be out of the callback on a busy host too


def stop_cleanly() -> None:
    """Let SIGTERM raise KeyboardInterrupt as SIGINT does, and let no interrupt get lost.

    Python drops an exception raised inside a finalizer or a weakref callback, and prints it with a traceback. A signal
    that arrives just then would stop nothing, so it is raised again a moment later, outside of that callback.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    others = sys.unraisablehook

    def raise_again(dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            others(dropped)

    sys.unraisablehook = raise_again
