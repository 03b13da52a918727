"""Progress display of a run: a live view on a terminal, a line in a notebook, plain lines in a pipe or a file."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.engine.snapshots import time_left
from fleetbed.profiles.yaml_text import plain

if TYPE_CHECKING:
    from fleetbed.emulator.engine.engine import Engine
    from fleetbed.emulator.engine.evaluation import Evaluations
    from fleetbed.emulator.engine.task import Task

REFRESH_S = 0.25
MOST_CLIENTS = 16


class PlainObserver(Observer):
    """Prints one line for each message and for each finished round."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr  # looked up late: it may have been replaced since this module was imported
        self._engine: Engine | None = None
        self._evaluations: Evaluations | None = None
        self._round = 0
        self._first = (0, 0.0)

    def say(self, text: str) -> None:
        print(plain(text), file=self._out, flush=True)

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self._engine, self._evaluations = engine, evaluations
        self._round = engine.progress.policy.round
        self._first = (self._round, time.monotonic())

    def tick(self) -> None:
        if self._engine is not None and self._engine.progress.policy.round > self._round:
            if self._round:
                self.say(summary(self._engine, self._evaluations, self._first))
            self._round = self._engine.progress.policy.round

    def stop(self) -> None:
        self.tick()
        self._engine = None


class LiveObserver(PlainObserver):
    """Redraws round, device time, accuracy, time left, and what each client is doing, in place."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live: Live | None = None
        self._drawn_s = 0.0

    def say(self, text: str) -> None:
        self._console.print(Text(plain(text)))

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        super().start(engine, evaluations)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def tick(self) -> None:
        super().tick()
        now_s = time.monotonic()
        if self._live is not None and self._engine is not None and now_s - self._drawn_s >= REFRESH_S:
            self._drawn_s = now_s
            self._live.update(_view(self._engine, self._evaluations, self._first), refresh=True)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        super().stop()


class NotebookObserver(PlainObserver):
    """Prints messages into the cell's output, and keeps one line there up to date."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)  # notebooks show the other stream as an error
        self._line: Any = None
        self._drawn_s = 0.0

    def tick(self) -> None:
        now_s = time.monotonic()
        if self._engine is not None and now_s - self._drawn_s >= REFRESH_S:
            self._drawn_s = now_s
            self._draw(summary(self._engine, self._evaluations, self._first))

    def stop(self) -> None:
        if self._engine is not None:
            self._draw(summary(self._engine, self._evaluations, self._first))
        self._engine = self._line = None

    def _draw(self, text: str) -> None:
        from IPython.display import display

        content = {"text/plain": plain(text)}
        if self._line is None:
            self._line = display(content, raw=True, display_id=True)
        else:
            self._line.update(content, raw=True)


def make_observer() -> Observer:
    """Return the observer that suits where this program runs."""
    if _in_notebook():
        return NotebookObserver()
    console = Console(stderr=True)
    return LiveObserver(console) if console.is_terminal else PlainObserver()


def _in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel; a kernel has imported IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def summary(engine: Engine, evaluations: Evaluations | None, first: tuple[int, float]) -> str:
    """Describe the progress of the run in one line."""
    progress, rounds = engine.progress, engine.config.experiment.rounds
    done = min(rounds, progress.policy.round - 1)
    parts = [f"round {done}/{rounds}", f"device {duration(progress.timeline.now_s)}"]
    if evaluations is not None and evaluations.latest is not None:
        parts.append(str(evaluations.latest))  # of an earlier round: evaluation lags behind
    if engine.last_arrival is not None:
        who = engine.participants[engine.last_arrival]
        parts.append(f"last {who.spec.name} {who.spec.kind}")
    parts.append(f"host {duration(time.monotonic() - engine.started_s)}")
    if (left_s := time_left(engine, first)) is not None:
        parts.append(f"about {duration(left_s)} left")
    return ", ".join(parts)


def _view(engine: Engine, evaluations: Evaluations | None, first: tuple[int, float]) -> Group:
    config, progress = engine.config, engine.progress
    title = Text(plain(f"{config.algorithm.title}, {config.policy.title}, seed {config.seed}"), style="bold")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("client", "device", "variant", "doing", "since", "planned end"):
        table.add_column(column, justify="right" if column in ("since", "planned end") else "left")
    tasks = sorted(progress.tasks.values(), key=lambda task: (task.outcome != "", -_planned_end(task), task.client))
    for task in tasks[:MOST_CLIENTS]:
        who = engine.participants[task.client]
        cells = (
            who.spec.name,
            who.spec.kind,
            task.variant,
            task.doing,
            duration(progress.timeline.now_s - task.dispatched_s),
            duration(_planned_end(task)),
        )
        table.add_row(*(Text(plain(cell)) for cell in cells))  # rich would interpret a plain string as markup
    if len(tasks) > MOST_CLIENTS:
        table.add_row("", f"and {len(tasks) - MOST_CLIENTS} more", "", "", "", "")
    return Group(title, Text(plain(summary(engine, evaluations, first))), table)


def _planned_end(task: Task) -> float:
    return (task.compute_start_s or task.dispatched_s) + task.plan_s


def duration(seconds: float) -> str:
    """Format seconds for people, in s, min or h."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
