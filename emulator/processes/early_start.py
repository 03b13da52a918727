"""Starts the zygote's process before it is needed, so that it imports torch while the command does, on another core.

Nothing here imports torch, so that the command can start it first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

from fleetbed.emulator.machine import interpreter
from fleetbed.emulator.machine.calibration import THREAD_VARIABLES
from fleetbed.profiles.errors import HostCannot

#: one compute thread for every client; OpenBLAS starts its threads at import, so these must be set before exec
ONE_THREAD = dict.fromkeys(THREAD_VARIABLES, "1")
#: malloc must not cache freed memory: the heap can shrink only down to the last block in use
TUNABLES = "glibc.malloc.tcache_count=0"
#: imports leave no garbage, and looking for it takes a fifth of their time
ZYGOTE = "import gc; gc.disable(); from fleetbed.emulator.processes.zygote import main; main()"
ENDING_S = 2.0  # how long a zygote may take to end after it has closed its socket
CLOSE_S = 60.0  # how long a zygote may take to clean up


class ZygoteProcess:
    """An exec'd zygote, our end of its socket and the memory that its workers share.

    Until it gets its first order it owns nothing that outlives it.
    """

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.shared = os.memfd_create("fleetbed-shared")
        with theirs:
            try:
                self._process = subprocess.Popen(
                    interpreter.command(ZYGOTE, theirs.fileno(), self.shared),
                    env={**os.environ, **ONE_THREAD, "GLIBC_TUNABLES": _tunables()},
                    pass_fds=[theirs.fileno(), self.shared],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal reaches the broker alone
                )
            except OSError as error:
                raise HostCannot(f"the process that forks the clients cannot be started: {error.strerror}") from error

    @property
    def session(self) -> int:
        """The session of the zygote and of all processes that it forks."""
        return self._process.pid

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal; it may be continued."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    def how_it_ended(self) -> str:
        """Describe how it ended; call this once it has closed its end of the socket."""
        try:
            status = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"

    def close(self) -> bool:
        """Close our end, which makes the zygote clean up, and wait for it; returns False if it could not."""
        self.control.close()
        end_s = time.monotonic() + CLOSE_S
        while self._process.poll() is None and time.monotonic() < end_s:
            if self.is_stopped():
                self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
        self._process.kill()
        os.close(self.shared)
        return self._process.wait() == 0

    def discard(self) -> None:
        """End a zygote that got no order, without waiting for its imports."""
        self._process.kill()
        self.close()


def _tunables() -> str:
    """The tunables of the user, and ours."""
    return ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), TUNABLES)))


_spare: list[ZygoteProcess] = []


@contextlib.contextmanager
def zygote_started_early() -> Iterator[ZygoteProcess]:
    """Start a zygote now, unless one is waiting; the first run inside this context uses it."""
    if not _spare:
        _spare.append(ZygoteProcess())
    try:
        yield _spare[0]
    finally:
        while _spare:
            _spare.pop().discard()


def take() -> ZygoteProcess:
    """Return the zygote that was started early, or start one."""
    return _spare.pop() if _spare else ZygoteProcess()
