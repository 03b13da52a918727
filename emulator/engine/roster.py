"""The roster of a run: which clients can be invited now, and which can still take part at all."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.method.algorithm import Client
from fleetbed.emulator.wire.messages import kept_name
from fleetbed.emulator.wire.storage import load_bundle, save_bundle
from fleetbed.profiles.errors import FleetbedError


class Roster:
    def __init__(self, prepared: Prepared, progress: Progress, folder: Path) -> None:
        self._participants = prepared.participants
        self._method = prepared.method
        self._on_oom = prepared.timing.on_oom
        self._progress = progress
        self._folder = folder  # of the run, with what clients keep

    def is_away(self, client: int) -> bool:
        return client in self._progress.availability.away

    def idle(self) -> list[int]:
        """The clients that can be invited: available, with no task under way and no result that waits for a merge."""
        return self._fit_without(self._busy().union(self._progress.availability.away))

    def away(self) -> list[int]:
        """The clients that could be invited if they were available."""
        away = frozenset(self._progress.availability.away)
        return [number for number in self._fit_without(self._busy()) if number in away]

    def _busy(self) -> set[int]:
        return {task.client for task in self._progress.tasks.values()}

    def _fit_without(self, others: Set[int]) -> list[int]:
        """The clients that can take part at all, but for these; the fleet may be large, and each task asks for them."""
        return [number for number, client in self._progress.clients.items() if client.fit and number not in others]

    def step_down(self, task: Task, detail: str) -> tuple[str, str]:
        """Give a client that ran out of memory in a task the next smaller variant, or strike it off.

        Returns the kind and the text of the notice to record. A client whose code chooses no variant just goes on.
        """
        who = self._participants[task.client]
        kept = who.progress.kept
        failed = f"client {who.spec.name} ({who.spec.kind}) ran out of memory with {who.client.variant}"
        if self._on_oom == "end":
            raise FleetbedError(
                f"{failed}, which should fit: {detail}; raise budgets.memory_margin, or use timing.source enforced, "
                f"which tries it out first"
            )
        if self._on_oom == "go-on":
            return "oom", f"{failed} in round {task.round}"
        if not who.step_down(self._method.context.family.variants):
            return "unfit", f"{failed} and leaves the run"
        self._method.reassign([each.client for each in self._participants.values()])
        who.progress.kept = self._saved(kept, who.client, task)
        return "step-down", f"{failed}, now {who.client.variant}"

    def _saved(self, kept: str | None, client: Client, task: Task) -> str | None:
        """Store the part of what a client kept that still serves it with a smaller variant; returns its file."""
        saved = None if kept is None else self._method.step_down(load_bundle(self._folder / kept), client)
        if saved is None:
            return None
        name = kept_name(task.client, task.number)
        save_bundle(self._folder / name, saved)
        return name

    def check_enough(self) -> None:
        """End a run in which no further merge is possible; otherwise the timeline might go on for ever."""
        fit, needed = sum(client.fit for client in self._progress.clients.values()), self._progress.policy.min_clients
        if fit < needed:
            raise FleetbedError(
                f"clients that can still take part: {fit}, needed for a merge: {needed}; the others ran out of memory "
                f"with the smallest variant"
            )
