"""The state of runs that may still be going on, for a page that is asked again and again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from fleetbed.analysis.page.page import document, parts
from fleetbed.analysis.page.payload import payload
from fleetbed.analysis.tables.compare import side_by_side
from fleetbed.analysis.tables.runs import DATABASE, Run, find_runs, open_run
from fleetbed.emulator.records.snapshot import Snapshot, read_snapshot
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, runs

STUDY = "study.json"
LEAST_S = 2.0  # between two readings of the records
SHARE = 20  # a reading that takes a second is followed by this many seconds of rest: the host has better things to do
MOST_NOTICES = 30


class Watched:
    """Runs and studies in folders; new runs are noticed, and only records that have changed are read again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = Lock()  # a reading at a time, however many pages ask
        self._read: dict[Path, tuple[Any, Run | str]] = {}  # by run: what its files looked like, and the run or why not
        self._stamp = 0
        self._next_s = 0.0
        self._data: dict[str, Any] = {"parts": {}, "payload": None}
        for folder in self._found():  # what cannot be read at the start is the user's mistake
            open_run(folder)

    def page(self) -> str:
        title = {"title": escape("Waiting for the first run")}
        state = self.state(None)
        return document(title | state["parts"], state, live=True)

    def state(self, known: int | None) -> dict[str, Any]:
        """Return what runs are doing now; with parts and data of the page unless the asker has these already."""
        with self._lock:
            self._refresh()
            found: dict[str, Any] = {"stamp": self._stamp, "now": [self._now(*item) for item in self._read.items()]}
            found["now"] += [{"name": name, "state": "not started"} for name in self._unstarted()]
            return found if known == self._stamp else {**found, **self._data}

    def _refresh(self) -> None:
        if time.monotonic() < self._next_s:
            return
        began_s = time.monotonic()
        changed = False
        for folder in self._found():
            marks = _marks(folder)
            if folder not in self._read or self._read[folder][0] != marks:
                self._read[folder] = (marks, _opened(folder))
                changed = True
        if changed:
            self._stamp += 1
            there = [run for _, run in self._read.values() if isinstance(run, Run)]
            if there:
                comparison = side_by_side(there, None, [])
                self._data = {"parts": parts(comparison), "payload": payload(comparison)}
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(LEAST_S, SHARE * took_s)

    def _found(self) -> list[Path]:
        return [run for folder in self._folders for run in _runs_in(folder)]

    def _unstarted(self) -> list[str]:
        there = {folder.name for folder in self._read}
        return [name for folder in self._folders for name in _planned(folder) if name not in there]

    def _now(self, folder: Path, read: tuple[Any, Run | str]) -> dict[str, Any]:
        run, snapshot = read[1], read_snapshot(folder)
        if isinstance(run, str):
            return {"name": folder.name, "state": "starting" if snapshot and snapshot.alive else run}
        names = {client.client: (client.name, client.device) for client in run.clients}
        going_on = run.about.status == "running" and snapshot is not None and snapshot.alive is True
        found: dict[str, Any] = {
            "name": run.name,
            "state": _state(run, snapshot),
            "ended": not going_on,
            "round": run.rounds[-1].round if run.rounds else 0,
            "rounds": run.config.experiment.rounds,
            "device_s": run.device_s,
            "notices": [[notice.device_s, notice.text] for notice in run.notices[-MOST_NOTICES:]],
        }
        if going_on and snapshot is not None:
            doing = Counter(task.doing for task in snapshot.tasks)
            found |= {
                "said": snapshot.said,
                "device_s": max(run.device_s, snapshot.device_s),
                "host_s": snapshot.host_s,
                "left_s": snapshot.left_s,
                "doing": {**doing, "idle": len(names) - len({task.client for task in snapshot.tasks})},
                "tasks": [
                    [
                        *names.get(task.client, (str(task.client), "")),
                        task.variant,
                        task.doing,
                        snapshot.device_s - task.dispatched_s,
                        task.planned_end_s,
                    ]
                    for task in snapshot.tasks
                ],
            }
        return found


def _state(run: Run, snapshot: Snapshot | None) -> str:
    if run.about.status != "running" or snapshot is None or snapshot.alive is None:
        return run.state
    return "running" if snapshot.alive else run.state.replace("still running or killed", "killed")


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs of a folder; a study that was just created has none yet."""
    if (folder / STUDY).is_file() and not any(folder.glob(f"*/{DATABASE}")):
        return []
    return find_runs([folder])


def _planned(folder: Path) -> list[str]:
    """Return the names of all runs of a study, as far as its file says."""
    try:
        study = msgspec.json.decode((folder / STUDY).read_bytes())
        return [config.name for config in runs(msgspec.convert(study["experiment"], Experiment))]
    except (OSError, KeyError, TypeError, msgspec.MsgspecError):
        return []


def _marks(folder: Path) -> list[tuple[int, int]]:
    """Return what changes whenever the records do."""
    files = (folder / DATABASE, folder / f"{DATABASE}-wal")
    return [(path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.exists()]


def _opened(folder: Path) -> Run | str:
    try:
        return open_run(folder)
    except BadInput as error:
        return str(error)
