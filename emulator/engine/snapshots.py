"""Writes the present state of a run into its folder, for programs that watch it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.limits.owner import this_process
from fleetbed.emulator.records.snapshot import FILE, Snapshot, TaskNow

if TYPE_CHECKING:
    from fleetbed.emulator.engine.engine import Engine
    from fleetbed.emulator.engine.evaluation import Evaluations

EVERY_S = 0.5  # host seconds between two snapshots


class SnapshotWriter(Observer):
    """Passes everything on to another observer, and writes a snapshot now and then."""

    def __init__(self, observer: Observer, folder: Path) -> None:
        self._observer = observer
        self._path = folder / FILE
        self._process = this_process()
        self._engine: Engine | None = None
        self._said = ""
        self._first = (0, 0.0)
        self._written_s = 0.0

    def say(self, text: str) -> None:
        self._said = text
        self._observer.say(text)
        self._write()

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self._engine = engine
        self._first = (engine.progress.policy.round, time.monotonic())
        self._observer.start(engine, evaluations)

    def tick(self) -> None:
        self._observer.tick()
        if time.monotonic() - self._written_s >= EVERY_S:
            self._write()

    def stop(self) -> None:
        self._write()
        self._engine = None
        self._observer.stop()

    def _write(self) -> None:
        """Replace the file. A watcher may miss a snapshot, but a run must not end because of one."""
        self._written_s = time.monotonic()
        part = self._path.with_name(f"{FILE}.part")
        with contextlib.suppress(OSError):
            part.write_bytes(msgspec.json.encode(self._snapshot()))
            os.replace(part, self._path)

    def _snapshot(self) -> Snapshot:
        engine = self._engine
        if engine is None:
            return Snapshot(process=self._process, said=self._said)
        progress = engine.progress
        tasks = sorted(progress.tasks.values(), key=lambda task: task.client)
        return Snapshot(
            process=self._process,
            round=progress.policy.round,
            device_s=progress.timeline.now_s,
            host_s=time.monotonic() - engine.started_s,
            left_s=time_left(engine, self._first),
            tasks=tuple(
                TaskNow(
                    task.client,
                    task.variant,
                    task.doing,
                    task.dispatched_s,
                    (task.compute_start_s or task.dispatched_s) + task.plan_s,
                )
                for task in tasks
            ),
        )


def time_left(engine: Engine, first: tuple[int, float]) -> float | None:
    """Estimate the host seconds to the end from the rounds since `first`, a round and when it began."""
    rounds = engine.config.experiment.rounds
    done = min(rounds, engine.progress.policy.round - 1)
    if not first[0] - 1 < done < rounds:
        return None
    return (time.monotonic() - first[1]) / (done - first[0] + 1) * (rounds - done)
