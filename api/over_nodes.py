"""Carries out the runs of a study on the nodes of a Ray cluster, each in a command of its own on one node.

A run whose node or process is lost is continued on another node from the last checkpoint that came from it. A lock in
the study's folder ensures that no two nodes work on the same run.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.emulator.cluster.connection import first_sentence
from fleetbed.emulator.cluster.mirror import Inbox, content_of
from fleetbed.emulator.cluster.placed_run import Report
from fleetbed.emulator.limits.owner import this_process
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.snapshot import FILE, Snapshot
from fleetbed.emulator.records.study_file import STUDY
from fleetbed.emulator.resume import run_folder
from fleetbed.emulator.run.study import is_finished, locked
from fleetbed.emulator.wire.storage import write_atomically
from fleetbed.node_pool import NodePool, PoolNode, RunNeed, need_of
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.experiment import RunConfig
from fleetbed.side_by_side import error_of_command

WAIT_S = 60.0  # for a lost process to release its run, for a node to join when none is left, and for runs to stop
PAUSE_S = 0.2  # between two looks at the cluster while no node reports
MOST_LOSSES = 3  # of nodes or processes, then the run itself is taken to be the reason


@dataclass
class _Job:
    """A run that has not ended yet."""

    config: RunConfig
    need: RunNeed
    losses: int = 0
    notices: list[str] = field(default_factory=list)  # why it was continued, and where
    refused_s: float | None = None  # since when another process has had its lock

    @property
    def name(self) -> str:
        return self.config.name


@dataclass
class _AtWork:
    """A run on a node."""

    job: _Job
    place: PoolNode
    actor: Any
    inbox: Inbox | None  # None: the node works in the study's folder
    stack: contextlib.ExitStack  # with the run's lock, if its node does not take it


def run_over_nodes(
    folder: Path, configs: Sequence[RunConfig], search: Sequence[Path], pool: NodePool, say: Callable[[str], None]
) -> None:
    """Carry out these runs on the nodes. If one fails, or on Ctrl-C, stop the others cleanly."""
    pool.use_for(folder.absolute(), say)
    jobs = [_Job(config, need_of(config, search)) for config in configs]
    _Study(folder.absolute(), jobs, pool, say).carry_out()


class _Study:
    def __init__(self, folder: Path, jobs: Sequence[_Job], pool: NodePool, say: Callable[[str], None]) -> None:
        self._folder, self._pool, self._say = folder, pool, say
        # those that need whole nodes first, because later no node may be free as a whole
        self._waiting = sorted(jobs, key=lambda job: not job.need.alone)
        self._at_work: dict[Any, _AtWork] = {}  # by the answer that is awaited
        self._closing: list[Any] = []
        self._failed: FleetbedError | None = None
        self._began_s = time.monotonic()
        self._idle_s: float | None = None  # since when no node carries out anything

    def carry_out(self) -> None:
        try:
            while (self._waiting or self._at_work) and self._failed is None:
                self._place()
                self._receive()
        except BaseException:
            self._stop()
            raise
        finally:
            self._end()
        if self._failed is not None:
            raise self._failed

    def _place(self) -> None:
        """Start the runs for which there is a node."""
        self._pool.refresh()
        for job in tuple(self._waiting):
            if self._pool.choose(job.need, None) is None or not self._free(job):
                continue
            if is_finished(self._folder / job.name, job.config):
                self._say(f"{job.name}: already done")
                self._waiting.remove(job)
            elif (place := self._pool.choose(job.need, self._processor(job))) is not None:
                self._waiting.remove(job)
                self._start(job, place)
        if self._at_work or not self._waiting:
            self._idle_s = None
        else:
            self._idle_s = self._idle_s or time.monotonic()
            if time.monotonic() - self._idle_s > WAIT_S:
                raise HostCannot(
                    "the Ray cluster has no node left for the other runs; when it has, continue with: "
                    f"fleetbed run --on ray --resume {self._folder}"
                )

    def _processor(self, job: _Job) -> str | None:
        """The CPU type on which this run was begun; None if it was not, or can be continued on any."""
        path = self._folder / job.name
        if run_folder.standing(path) in ("absent", "unstarted"):
            return None
        begun = run_folder.processor_of(path)
        if begun is None or self._pool.has(begun):
            return begun
        if job.need.alone:
            raise HostCannot(
                f"run {job.name} was begun on {begun}, and no node has this processor: its time scale does not fit "
                f"another; move {path} away to carry it out anew."
            )
        text = f"the run was begun on {begun}, which no node has, and continued on another processor"
        if text not in job.notices:
            job.notices.append(text)
        return None

    def _free(self, job: _Job) -> bool:
        """Whether nobody works on this run: a process of a lost node may take a moment to notice that."""
        try:
            with locked(self._folder, job.name):
                job.refused_s = None
                return True
        except BadInput:
            job.refused_s = job.refused_s or time.monotonic()
            if time.monotonic() - job.refused_s > WAIT_S:
                raise
            return False

    def _start(self, job: _Job, place: PoolNode) -> None:
        import ray

        stack = contextlib.ExitStack()
        path = self._folder / job.name
        inbox, content = None, None
        if not place.shares_folder:
            stack.enter_context(locked(self._folder, job.name))
            if run_folder.standing(path) == "unstarted":
                run_folder.clear(path)
            inbox = Inbox(path)
            content = {f"{job.name}/{name}": data for name, data in content_of(path).items()}
            content[STUDY] = (self._folder / STUDY).read_bytes()
        self._say(f"{job.name}: on node {place.node.name}")
        place.take(job.need)
        actor = self._pool.actor(place, job.need)
        begun = actor.begin.remote(job.name, self._folder, None if content is None else ray.put(content))
        self._at_work[begun] = _AtWork(job, place, actor, inbox, stack)

    def _receive(self) -> None:
        """Handle the reports that have come in."""
        import ray

        if not self._at_work:
            time.sleep(PAUSE_S)
            return
        ready, _ = ray.wait(list(self._at_work), timeout=PAUSE_S)
        for answer in ready:
            run = self._at_work.pop(answer)
            try:
                report: Report | None = ray.get(answer)
            except ray.exceptions.RayTaskError as error:  # the code on the node has failed, not the node
                self._leave(run)
                where = f"run {run.job.name}, on node {run.place.node.name}"
                self._fail(FleetbedError(f"{where}: {first_sentence(error.cause)}"))
            except ray.exceptions.RayError as error:
                self._lost(run, _reason(error))
            else:
                if report is not None:
                    self._handle(run, report)
                else:  # it has begun
                    self._at_work[run.actor.report.remote()] = run

    def _handle(self, run: _AtWork, report: Report) -> None:
        name = run.job.name
        for line in report.lines:
            self._say(f"{name}: {line}")
        if run.inbox is not None:
            for file, content in report.files:
                run.inbox.put(file, content)
            if report.gone is not None:
                run.inbox.finish(report.gone)
            if report.now is not None:
                self._show(self._folder / name, report.now)
        if report.status is None:
            self._at_work[run.actor.report.remote()] = run
        elif report.status < 0 and self._failed is None:
            self._lost(run, f"its process was ended by signal {-report.status}.")
        else:
            self._leave(run)
            error = error_of_command(self._folder, name, report.status)
            if run.inbox is not None and run_folder.standing(self._folder / name) == "unstarted":
                run_folder.clear(self._folder / name)  # it was refused, and the node has removed it
            if error is None:
                self._note(run.job)
            else:
                self._fail(error)

    def _show(self, path: Path, now: bytes) -> None:
        """Show what a run is doing to those who watch its folder, as if this process did it."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # a watcher may miss a moment
            if path.is_dir():
                shown = msgspec.structs.replace(msgspec.json.decode(now, type=Snapshot), process=this_process())
                write_atomically(path / FILE, lambda part: part.write_bytes(msgspec.json.encode(shown)))

    def _lost(self, run: _AtWork, why: str) -> None:
        """Queue a run again that has lost its node or its process."""
        self._leave(run)
        self._pool.doubt(run.place)
        job = run.job
        job.losses += 1
        job.notices.append(f"node {run.place.node.name} was lost, or the run's process there: {why}")
        self._say(f"{job.name}: {job.notices[-1]}")
        if job.losses == MOST_LOSSES:
            self._fail(
                FleetbedError(
                    f"run {job.name} was lost {MOST_LOSSES} times, see above; continue with: "
                    f"fleetbed run --on ray --resume {self._folder}"
                )
            )
        else:
            self._waiting.insert(0, job)

    def _leave(self, run: _AtWork) -> None:
        """Give back the node."""
        import ray

        run.stack.close()
        if run.inbox is not None:
            run.inbox.close()
        run.place.give_back(run.job.need)
        with contextlib.suppress(ray.exceptions.RayError):
            self._closing.append(run.actor.close.remote())

    def _note(self, job: _Job) -> None:
        """Record in a run that has ended why it was continued."""
        if job.notices:
            with contextlib.closing(Records(self._folder / job.name / "run.sqlite")) as records:
                for text in job.notices:
                    records.notice("node", text, time.monotonic() - self._began_s, None)

    def _fail(self, error: FleetbedError) -> None:
        if self._failed is None:
            self._failed = error
            self._stop()

    def _stop(self) -> None:
        """Stop all runs cleanly, and receive the last that they have written."""
        self._failed = self._failed or FleetbedError("interrupted")
        for run in self._at_work.values():
            run.actor.stop.remote()
        until_s = time.monotonic() + WAIT_S
        while self._at_work and time.monotonic() < until_s:
            self._receive()

    def _end(self) -> None:
        """End what is left, and wait until the nodes have removed it."""
        import ray

        for run in tuple(self._at_work.values()):
            self._leave(run)
        self._at_work.clear()
        if self._closing:
            ray.wait(self._closing, num_returns=len(self._closing), timeout=WAIT_S)


def _reason(error: Exception) -> str:
    """Why Ray says that an actor is gone, which it says late in a long text."""
    found = re.search(r"because (.+?)(?:\.\s|\.?$)", " ".join(str(error).split()))
    return f"{found[1]}." if found else first_sentence(error)
