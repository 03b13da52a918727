"""Sends the records of a study to a tracker: what is there already, and what is added while the study goes on."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec import Struct

from fleetbed.analysis.page.changes import ChangingRuns
from fleetbed.analysis.page.page import page
from fleetbed.analysis.tables.compare import side_by_side
from fleetbed.analysis.tables.runs import DATABASE, Run
from fleetbed.analysis.tracking.points import Sent, new_points
from fleetbed.analysis.tracking.trackers import TRACKERS, Opener, TrackedRun
from fleetbed.emulator.records.snapshot import read_snapshot
from fleetbed.profiles.errors import BadInput, FleetbedError

FOLDER = "trackers"  # in the folder of a study
LOOK_S = 1.0  # between two looks at a study that goes on
RETRY_S = 10.0  # after which a tracker that failed is tried again


class Standing(Struct, frozen=True):
    """What a tracker has of a run. It is kept in the study's folder, so that nothing is ever sent twice."""

    id: str
    sent: Sent = Sent()
    points: int = 0
    ended: str | None = None  # the status that the tracker was told


class Sender:
    """One tracker and the runs of one study. A tracker that fails is tried again: it never stops the study."""

    def __init__(self, name: str, folder: Path, say: Callable[[str], None]) -> None:
        """`folder` is that of a study, or of a run in one."""
        self._name, self._title = name, TRACKERS[name].title
        self._study = folder.absolute().parent if (folder / DATABASE).exists() else folder
        self._say = say
        self._runs = ChangingRuns([folder])
        self._path = self._study / FOLDER / f"{name}.json"
        self._lock: TextIO | None = None
        self._open: Opener | None = None  # imported when there is something to send
        self._standings: dict[str, Standing] = {}
        self._at_work: dict[str, TrackedRun] = {}
        self._problem: str | None = None

    @property
    def place(self) -> Path:
        """The folder for what stays on this host."""
        return self._path.with_suffix("")

    def follow(self, over: Callable[[], bool]) -> None:
        """Send what is new, again and again, until the study is over; then the rest."""
        retry_s = 0.0
        while not over():
            began_s = time.thread_time()
            if self._runs.refresh() or (self._problem is not None and time.monotonic() > retry_s):
                before = self._problem
                self._send_all(lambda _: False)  # if it was killed, that is known at the end
                if self._problem is not None and self._problem != before:
                    self._say(f"{self._title}: {self._problem}; the run goes on, and this is tried again")
                self._runs.rest(time.thread_time() - began_s)
                retry_s = time.monotonic() + RETRY_S
            time.sleep(LOOK_S)
        self.finish(going_on=False)

    def finish(self, *, going_on: bool) -> None:
        """Send everything that is there, and close. `going_on`: runs may still be carried out by somebody else."""
        self._runs.refresh(now=True)
        self._send_all(_is_gone if going_on else lambda _: True)
        for run in self._at_work.values():
            with self._guarded():
                run.end(None, None)
        if self._lock is not None:
            self._lock.close()
        if self._problem is not None:
            raise FleetbedError(
                f"{self._title} did not get everything ({self._problem}); send the rest with: "
                f"fleetbed track {self._name} {self._study}"
            )

    def _send_all(self, is_gone: Callable[[Path], bool]) -> None:
        """Send all runs; `is_gone` says whether the process of a run has ended that did not record how."""
        self._problem = None
        for folder, run in self._runs.read.items():
            if isinstance(run, Run):
                status = run.about.status
                ended = status if status != "running" else "killed" if is_gone(folder) else None
                with self._guarded():
                    self._send(run, ended)

    def _send(self, run: Run, ended: str | None) -> None:
        if self._open is None:
            self._take_up()
            self._open = TRACKERS[self._name].opener()
        name = run.folder.name
        standing = self._standings.get(name)
        points, sent = new_points(run, standing.sent if standing else Sent())
        if standing is not None and not points and standing.ended == ended:
            return
        if name not in self._at_work:
            self._at_work[name] = self._open(run, self.place, standing.id if standing else None)
        one = self._at_work[name]
        if standing is None:
            standing = Standing(one.id)
            self._keep(name, standing)
        one.send(points, standing.points)
        self._keep(name, Standing(one.id, sent, standing.points + len(points)))
        if ended is not None:
            with tempfile.TemporaryDirectory() as made:
                report = Path(made) / "report.html"
                report.write_text(page(side_by_side([run], None, [])), encoding="utf-8")
                self._at_work.pop(name).end(ended, report)
            self._keep(name, msgspec.structs.replace(self._standings[name], ended=ended))

    def _take_up(self) -> None:
        """Read where an earlier process stopped, and keep others from sending the same."""
        self._path.parent.mkdir(exist_ok=True)
        if self._lock is None:
            self._lock = self._path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{self._study}: another process sends it to {self._title}; wait for that one") from None
        try:
            self._standings = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Standing])
        except FileNotFoundError:
            self._standings = {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadInput(f"{self._path}: cannot be read ({error}); remove it, and all of it is sent again") from error

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Remember what went wrong in a tracker: its libraries raise whatever they like."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            first = str(error).strip().partition("\n")[0]
            self._problem = first if isinstance(error, BadInput) else f"{type(error).__name__}: {first}".rstrip(": ")

    def _keep(self, name: str, standing: Standing) -> None:
        self._standings[name] = standing
        beside = self._path.with_name(f"{self._path.name}.part")
        beside.write_bytes(msgspec.json.encode(self._standings))
        os.replace(beside, self._path)


def _is_gone(folder: Path) -> bool:
    snapshot = read_snapshot(folder)
    return snapshot is not None and snapshot.alive is False
