"""Reads runs that may still be going on again and again, but only those whose records have changed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetbed.analysis.tables.runs import DATABASE, Run, RunNotStarted, find_runs, open_run
from fleetbed.emulator.records.study_file import STUDY
from fleetbed.profiles.errors import BadInput

LEAST_S = 2.0  # between two readings of the records
SHARE = 10  # a reading that takes a second of CPU is followed by this many of rest: the host has better things to do


class ChangingRuns:
    """Runs and studies in folders. New runs are noticed; `read` has each run as it was read last, or why it was not."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.read: dict[Path, Run | str] = {}
        self._folders = folders
        self._marks: dict[Path, Any] = {}  # what the files of each run looked like
        self._next_s = 0.0
        for folder in self._found():  # what cannot be read at the start is the user's mistake
            with contextlib.suppress(RunNotStarted):  # unless its run is just about to begin
                open_run(folder)

    def refresh(self, *, now: bool = False) -> bool:
        """Read what has changed, unless the last reading was a moment ago; return whether anything had."""
        if time.monotonic() < self._next_s and not now:
            return False
        changed = False
        for folder in self._found():
            marks = _marks(folder)
            if self._marks.get(folder) != marks:
                self._marks[folder] = marks
                self.read[folder] = _opened(folder)
                changed = True
        return changed

    def rest(self, cpu_s: float) -> None:
        """Do not read again soon: the more CPU time the work with what was read took, the longer the rest."""
        self._next_s = time.monotonic() + max(LEAST_S, SHARE * cpu_s)

    def _found(self) -> list[Path]:
        return [run for folder in self._folders for run in _runs_in(folder)]


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs of a folder; a study that was just created has none yet."""
    if (folder / STUDY).is_file() and not any(folder.glob(f"*/{DATABASE}")):
        return []
    return find_runs([folder])


def _marks(folder: Path) -> list[tuple[int, int]]:
    """Return what changes whenever the records do."""
    files = (folder / DATABASE, folder / f"{DATABASE}-wal")
    return [(path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.exists()]


def _opened(folder: Path) -> Run | str:
    try:
        return open_run(folder)
    except BadInput as error:
        return str(error)
