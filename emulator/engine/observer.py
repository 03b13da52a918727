"""Whoever looks on while a run goes on. This one says nothing; the command line has one that draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine's own preparation speaks to whoever watches
    from fleetbed.emulator.engine.engine import Engine
    from fleetbed.emulator.engine.evaluation import Evaluations


class Observer:
    def say(self, text: str) -> None:
        """What is being done before the rounds begin, or what a person should know."""

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        """The loop begins."""

    def tick(self) -> None:
        """Called often, so it must be cheap when there is nothing new to show."""

    def stop(self) -> None:
        """The loop has ended, however it ended."""
