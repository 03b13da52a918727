"""The zygote's process, exec'd before it is needed: it imports torch while the command does, on another core.

Nothing here imports torch, so that the command can start it first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

from fleetbed.emulator.calibration import THREAD_VARIABLES

#: one compute thread for every client; OpenBLAS starts its threads at import, so these must stand before exec
ONE_THREAD = dict.fromkeys(THREAD_VARIABLES, "1")
#: malloc is to keep nothing back of what is freed: a heap can end only where nothing lies above
TUNABLES = "glibc.malloc.tcache_count=0"
#: imports leave no garbage, and looking for it takes a fifth of their time
ZYGOTE = "import gc; gc.disable(); from fleetbed.emulator.zygote import main; main()"


class ZygoteProcess:
    """An exec'd zygote, our end of its socket and the shelf that its workers inherit.

    Until it is told what to do it has nothing that outlives it.
    """

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.shelf = os.memfd_create("fleetbed-shelf")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", ZYGOTE, str(theirs.fileno()), str(self.shelf)],
                env={**os.environ, **ONE_THREAD, "GLIBC_TUNABLES": _tunables()},
                pass_fds=[theirs.fileno(), self.shelf],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal reaches the broker alone
            )

    def close(self) -> None:
        """Closing our end tells the zygote to clean up; wait until it has."""
        self.control.close()
        self._process.wait()
        os.close(self.shelf)

    def discard(self) -> None:
        """End one that was told nothing, without waiting for its imports."""
        self._process.kill()
        self.close()


def _tunables() -> str:
    """Those of the user, and ours."""
    return ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), TUNABLES)))


_spare: list[ZygoteProcess] = []


@contextlib.contextmanager
def started_ahead() -> Iterator[None]:
    """Within this, the first run finds its zygote on its way."""
    _spare.append(ZygoteProcess())
    try:
        yield
    finally:
        while _spare:
            _spare.pop().discard()


def take() -> ZygoteProcess:
    """The one that was started ahead, or a new one."""
    return _spare.pop() if _spare else ZygoteProcess()
