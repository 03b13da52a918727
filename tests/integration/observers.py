"""Observers of runs that several tests use."""

from __future__ import annotations

from fleetbed.emulator.engine.observer import Observer


class Listener(Observer):
    """Collects what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class Stopped(BaseException):
    """As sudden as a kill, for runs in this process: no handler of the run knows it."""


class StopAfter(Listener):
    """Ends the run by this exception after so many ticks; with KeyboardInterrupt as Ctrl-C does."""

    def __init__(self, ticks: int, by: type[BaseException] = Stopped) -> None:
        super().__init__()
        self._left, self._by = ticks, by

    def tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._by
