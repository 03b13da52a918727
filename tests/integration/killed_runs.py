"""Runs that kill themselves, each in a process of its own that has torch already."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.resolve import load_experiment


class KillIt(Observer):
    """Kills this process in the first moment at which the progress is like this."""

    def __init__(self, when: Callable[[Progress], bool]) -> None:
        self._when = when
        self._engine: Engine | None = None

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self._engine = engine

    def tick(self) -> None:
        if self._engine is not None and self._when(self._engine.progress):
            os.kill(os.getpid(), signal.SIGKILL)


def in_third_round(progress: Progress) -> bool:
    """Whether a result of the third round is still to come."""
    return progress.policy.round == 3 and not all(task.outcome for task in progress.tasks.values())


def start_and_be_killed(folder: Path, sets: tuple[str, ...]) -> None:
    """Start a study in another process, which is killed in its third round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fleetbed.emulator.run.study"])
    process = context.Process(target=_start, args=(folder, sets))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _start(folder: Path, sets: tuple[str, ...]) -> None:
    experiment = load_experiment("demo", (), sets)
    start_study(experiment, folder, search=(), command="", observer=KillIt(in_third_round))
