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

from fleetbed.analysis.page.changes import ChangingRuns
from fleetbed.analysis.page.page import document, parts
from fleetbed.analysis.page.payload import payload
from fleetbed.analysis.tables.compare import side_by_side
from fleetbed.analysis.tables.runs import Run
from fleetbed.emulator.records.snapshot import Snapshot, read_snapshot
from fleetbed.emulator.records.study_file import STUDY
from fleetbed.profiles.experiment import Experiment, runs

MOST_NOTICES = 30


class Watched:
    """Runs and studies in folders; new runs are noticed, and only records that have changed are read again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = Lock()  # a reading at a time, however many pages ask
        self._runs = ChangingRuns(folders)
        self._stamp = 0
        self._data: dict[str, Any] = {"parts": {}, "payload": None}

    def page(self) -> str:
        title = {"title": escape("Waiting for the first run")}
        state = self.state(None)
        return document(title | state["parts"], state, live=True)

    def state(self, known: int | None) -> dict[str, Any]:
        """Return what runs are doing now; with parts and data of the page unless the asker has these already."""
        with self._lock:
            self._refresh()
            found: dict[str, Any] = {
                "stamp": self._stamp,
                "now": [self._now(*item) for item in self._runs.read.items()],
            }
            found["now"] += [{"name": name, "state": "not started"} for name in self._unstarted()]
            return found if known == self._stamp else {**found, **self._data}

    def _refresh(self) -> None:
        began_s = time.thread_time()
        if not self._runs.refresh(now=any(_seems_killed(*item) for item in self._runs.read.items())):
            return
        self._stamp += 1
        there = [run for run in self._runs.read.values() if isinstance(run, Run)]
        if there:
            comparison = side_by_side(there, None, [])
            self._data = {"parts": parts(comparison), "payload": payload(comparison)}
        self._runs.rest(time.thread_time() - began_s)

    def _unstarted(self) -> list[str]:
        there = {folder.name for folder in self._runs.read}
        return [name for folder in self._folders for name in _planned(folder) if name not in there]

    def _now(self, folder: Path, run: Run | str) -> dict[str, Any]:
        snapshot = read_snapshot(folder)
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


def _seems_killed(folder: Path, run: Run | str) -> bool:
    """Whether the process of a run is gone although its records, as read last, do not say how it ended."""
    if isinstance(run, str) or run.about.status != "running":
        return False
    snapshot = read_snapshot(folder)
    return snapshot is not None and snapshot.alive is False


def _state(run: Run, snapshot: Snapshot | None) -> str:
    if run.about.status != "running" or snapshot is None or snapshot.alive is None:
        return run.state
    return "running" if snapshot.alive else run.state.replace("still running or killed", "killed")


def _planned(folder: Path) -> list[str]:
    """Return the names of all runs of a study, as far as its file says."""
    try:
        study = msgspec.json.decode((folder / STUDY).read_bytes())
        return [config.name for config in runs(msgspec.convert(study["experiment"], Experiment))]
    except (OSError, KeyError, TypeError, msgspec.MsgspecError):
        return []
