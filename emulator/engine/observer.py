"""Observers show the progress of a run. This one shows nothing; that of the command line draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the preparation of the engine reports to observers too
    from fleetbed.emulator.engine.engine import Engine
    from fleetbed.emulator.engine.evaluation import Evaluations


class Observer:
    def say(self, text: str) -> None:
        """Show a sentence: what is being prepared before the rounds begin, or something that the user should know."""

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        """Called when the loop begins."""

    def tick(self) -> None:
        """Called often, so it must be cheap when there is nothing new to show."""

    def stop(self) -> None:
        """Called when the loop has ended, however it ended."""
