"""Telling the zygote what to do: how processes are made, apart from how one talks to them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from fleetbed.emulator import ahead
from fleetbed.emulator.limits import clean_leftovers
from fleetbed.emulator.limits.owner import folder_name, is_leftover
from fleetbed.emulator.messages import FromZygote, Open, ToZygote, from_zygote
from fleetbed.profiles.errors import FleetbedError

MAX_CONTROL_BYTES = 1 << 16


class Launcher:
    """The broker's end of the zygote. Its folder holds the sockets and lets no other user in."""

    def __init__(self, run: str, log: Path) -> None:
        clean_leftovers()
        _clean_folders()
        self.folder = Path(tempfile.gettempdir()) / folder_name(run)
        self.folder.mkdir(mode=0o700)
        self._log = log
        self._zygote = ahead.take()
        try:
            self.tell(Open(run=run, folder=str(self.folder), log=str(log.absolute())))
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"ipc://{self.folder}/broker"

    @property
    def shelf(self) -> int:
        """The file descriptor of the memory that is shared with the workers; it lives as long as this."""
        return self._zygote.shelf

    def fileno(self) -> int:
        return self._zygote.control.fileno()

    def tell(self, order: ToZygote) -> None:
        """Give an order; it is carried out after those before it, and what goes wrong is heard later."""
        try:
            self._zygote.control.send(msgspec.msgpack.encode(order))
        except BrokenPipeError as error:
            raise self._gone() from error

    def hear(self) -> FromZygote:
        """The next message; blocks. Raises FleetbedError when the zygote has gone."""
        message = self._zygote.control.recv(MAX_CONTROL_BYTES)
        if not message:
            raise self._gone()
        heard: FromZygote = from_zygote.decode(message)
        return heard

    def close(self) -> None:
        self._zygote.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _gone(self) -> FleetbedError:
        return FleetbedError(
            f"the process that forks the clients has ended; {self._log}, or what stands above, says why"
        )


def _clean_folders() -> None:
    """Remove the sockets of runs whose zygote was killed together with its broker."""
    for folder in Path(tempfile.gettempdir()).glob("fleetbed-*"):
        if is_leftover(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
