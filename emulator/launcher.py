"""Starting the zygote and talking to it: how processes are made, apart from how one talks to them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fleetbed.emulator.calibration import THREAD_VARIABLES
from fleetbed.emulator.limits import clean_leftovers
from fleetbed.emulator.limits.owner import folder_name, is_leftover
from fleetbed.emulator.messages import FromZygote, ToZygote, from_zygote
from fleetbed.profiles.errors import FleetbedError

MAX_CONTROL_BYTES = 1 << 16
#: one compute thread for every client; OpenBLAS starts its threads at import, so these must stand before exec
ONE_THREAD = dict.fromkeys(THREAD_VARIABLES, "1")


class Launcher:
    """The broker's end of the zygote. Its folder holds the sockets and lets no other user in."""

    def __init__(self, run: str, log: Path) -> None:
        clean_leftovers()
        _clean_folders()
        self.folder = Path(tempfile.gettempdir()) / folder_name(run)
        self.folder.mkdir(mode=0o700)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fleetbed.emulator.zygote",
                    str(theirs.fileno()),
                    str(self.folder),
                    run,
                ],
                env={**os.environ, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C in the terminal reaches the broker alone
            )
        theirs.close()
        self._log = log
        try:
            self.hear()  # that it is ready
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"ipc://{self.folder}/broker"

    def fileno(self) -> int:
        return self._control.fileno()

    def tell(self, order: ToZygote) -> None:
        self._control.send(msgspec.msgpack.encode(order))

    def hear(self) -> FromZygote:
        """The next message; blocks. Raises FleetbedError when the zygote has gone."""
        message = self._control.recv(MAX_CONTROL_BYTES)
        if not message:
            raise FleetbedError(f"the process that forks the clients has ended; {self._log} says why")
        heard: FromZygote = from_zygote.decode(message)
        return heard

    def close(self) -> None:
        """Closing our end tells the zygote to clean up; wait until it has."""
        self._control.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _clean_folders() -> None:
    """Remove the sockets of runs whose zygote was killed together with its broker."""
    for folder in Path(tempfile.gettempdir()).glob("fleetbed-*"):
        if is_leftover(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
