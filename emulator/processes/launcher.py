"""The broker's side of the zygote: how processes are made, apart from how the broker talks to them."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec

from fleetbed.emulator.limits import clean_leftovers
from fleetbed.emulator.processes import early_start
from fleetbed.emulator.processes.janitor import end_session
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Configure, Enrol, Exited, FromZygote, Open, Spawn, ToZygote, from_zygote
from fleetbed.profiles.errors import FleetbedError

MAX_CONTROL_BYTES = 1 << 16
STOPPED_S = 10.0  # how long the zygote may be stopped by a signal
SILENT_S = 1800.0  # how long it may take for one order; configuring it means training a step of each model
RESUME = "nothing that was merged is lost; continue with --resume"


class Launcher:
    """Sends orders to the zygote and receives its reports. It never blocks: orders that cannot be sent yet wait."""

    def __init__(self, run: str, log: Path) -> None:
        clean_leftovers()
        self.address = codec.new_address()
        self._log = log
        self._waiting: deque[bytes] = deque()
        self._owed = 0  # orders that the zygote has yet to report on
        self._spoke = False  # since the last check
        self._silent_since_s = 0.0
        self._zygote = early_start.take()
        self._zygote.control.setblocking(False)
        try:
            self.tell(Open(run=run, address=self.address, log=str(log.absolute())))
        except BaseException:
            self.close()
            raise

    @property
    def shared(self) -> int:
        """The file descriptor of the memory that is shared with the workers; valid until `close`."""
        return self._zygote.shared

    @property
    def session(self) -> int:
        """The session of the zygote and of all processes that it forks."""
        return self._zygote.session

    def fileno(self) -> int:
        return self._zygote.control.fileno()

    def tell(self, order: ToZygote) -> None:
        """Give an order. It is carried out after the orders before it; failures are reported later, by `hear`."""
        self._waiting.append(msgspec.msgpack.encode(order))
        self._owed += isinstance(order, (Configure, Enrol, Spawn))
        self.flush()

    def flush(self) -> None:
        """Send waiting orders, as many as the socket accepts."""
        while self._waiting:
            try:
                self._zygote.control.send(self._waiting[0])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError) as error:
                raise self._gone() from error
            self._waiting.popleft()

    def hear(self) -> FromZygote | None:
        """Return the next message, if there is one. Raises FleetbedError when the zygote is gone."""
        try:
            message = self._zygote.control.recv(MAX_CONTROL_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            message = b""
        if not message:
            raise self._gone()
        heard: FromZygote = from_zygote.decode(message)
        self._spoke = True
        self._owed -= not isinstance(heard, Exited)
        return heard

    def check(self, clock_s: float) -> None:
        """Raise FleetbedError if the zygote has been stopped, or silent when asked, for too long by this clock."""
        stopped = self._zygote.is_stopped()
        if self._spoke or not (stopped or self._owed):
            self._spoke, self._silent_since_s = False, clock_s
        limit_s = STOPPED_S if stopped else SILENT_S
        if clock_s - self._silent_since_s > limit_s:
            what = "has been stopped by a signal" if stopped else "has not answered"
            raise FleetbedError(f"the process that forks the clients {what} for {limit_s:.0f} s; {RESUME}")

    def close(self) -> None:
        if not self._zygote.close():  # it may have been killed before it could clean up
            end_session(self.session)
            clean_leftovers()

    def _gone(self) -> FleetbedError:
        how = self._zygote.how_it_ended()
        return FleetbedError(f"the process that forks the clients {how}, see {self._log}; {RESUME}")
