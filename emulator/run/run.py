"""Carries out one run, from its configuration to its records: lay out, choose, start the fleet, loop, clean up."""

from __future__ import annotations

import contextlib
import errno
import platform
import shutil
import sqlite3
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.emulator.checks.doctor import examine
from fleetbed.emulator.checks.verify import load_report, worst
from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.layout import Layout, lay_out
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.engine.snapshots import SnapshotWriter
from fleetbed.emulator.limits.gpu import card_names
from fleetbed.emulator.machine import host, ulimits
from fleetbed.emulator.machine.calibration import host_fingerprint
from fleetbed.emulator.machine.capacity import check_processes_fit
from fleetbed.emulator.method.bundle import Bundle, Value
from fleetbed.emulator.method.failures import CodeFailed
from fleetbed.emulator.method.local_training import recalibrate
from fleetbed.emulator.method.targets import all_inputs, target_tensors
from fleetbed.emulator.records.kept_merges import KeptMerges, size_text
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.results import Result
from fleetbed.emulator.records.seal import Seal
from fleetbed.emulator.records.tables import NoticeRow
from fleetbed.emulator.resume import identity
from fleetbed.emulator.resume.checkpoint import Checkpoint, Checkpoints, Loaded
from fleetbed.emulator.resume.resumption import look_up
from fleetbed.emulator.run.deadlines import missed_deadlines
from fleetbed.emulator.run.fleet import FleetProcesses, setup_of
from fleetbed.emulator.run.preparation import (
    calibration_from,
    calibration_meta,
    prepare_again,
    prepare_fresh,
)
from fleetbed.emulator.run.start import first_progress
from fleetbed.emulator.timeline.own_policies import check_state
from fleetbed.emulator.timeline.policies import Rounds
from fleetbed.emulator.wire.storage import load_bundle, save_bundle, write_atomically
from fleetbed.models.plug_ins import code_files
from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.experiment import RunConfig

#: a run whose tasks overran their plans by more than this (95th percentile) is labelled degraded
DEGRADED_OVERRUN = 1.05
ERROR_LOG = "error.log"  # the traceback of a method that failed
MIN_FREE_BYTES = 1 << 20  # with less free space than this, a write to the records may fail
#: advice for a run in which nothing was merged, by the outcome of most tasks
HINTS = {
    "late": "raise policies.deadline_s or device_time_limit_s, or lower training.max_steps",
    "offline": "check availability: clients left before their results had arrived",
    "refused": "lower training.optimizer.lr: results contained values that are not finite",
}


def start(config: RunConfig, folder: Path, *, search: Sequence[Path], command: str, observer: Observer) -> None:
    """Carry out a new run in a new folder. A run that is refused leaves no folder behind."""
    layout = lay_out(config, search)
    check_processes_fit(len(layout.specs), config.experiment.processes)
    create_folder(folder)
    try:
        with disk_errors(folder), open_records(folder) as records:
            (folder / "partition.json").write_bytes(layout.split.to_json())
            records.set_meta(**first_facts(config, command), profiles=identity.profiles(layout))
            with recorded_status(records, folder):
                result = _Run(layout, folder, records, observer).begin()
    except BadInput:
        if not Checkpoints(folder).found():  # nothing was done yet
            shutil.rmtree(folder)
        raise
    observer.say(done_text(result))


def resume(config: RunConfig, folder: Path, *, search: Sequence[Path], observer: Observer) -> None:
    """Continue an interrupted or killed run, or one that gets more rounds, from its last intact checkpoint."""
    with disk_errors(folder), open_records(folder) as records:
        layout, loaded = look_up(config, folder, records, search)
        check_processes_fit(len(layout.specs), config.experiment.processes)
        partition = layout.split.to_json()  # it matches the digest in the records; the file may have been changed
        write_atomically(folder / "partition.json", lambda part: part.write_bytes(partition))
        before = records.meta("config")["experiment"]["rounds"]
        if before < config.experiment.rounds:
            text = f"rounds were added: {before} at first, {config.experiment.rounds} now"
            records.notice("rounds", text, loaded.checkpoint.host_s, None)
        records.set_meta(status="running", error=None, ended=None, config=msgspec.to_builtins(config))
        with recorded_status(records, folder):
            result = _Run(layout, folder, records, observer).go_on(loaded)
    observer.say(done_text(result))


def check(config: RunConfig, search: Sequence[Path]) -> None:
    """Raise the error with which `start` would refuse this run, without writing anything but the data's cache."""
    lay_out(config, search)


def create_folder(folder: Path) -> None:
    """Create the folder of a run, which must not exist."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise BadInput(
            f"{folder}: the run's folder already exists; choose another with --out, or use --resume"
        ) from error
    except OSError as error:
        raise BadInput(
            f"{folder}: the run's folder cannot be created ({error.strerror}); choose another with --out"
        ) from error


def check_resumable(config: RunConfig, folder: Path, *, search: Sequence[Path]) -> None:
    """Raise the error that `resume` would raise, without changing anything."""
    with disk_errors(folder), open_records(folder) as records:
        look_up(config, folder, records, search)


class NothingMerged(FleetbedError):
    """The run finished all of its rounds, but its model is still the initial one."""


class _Run:
    """A run in its folder. `begin` makes new decisions; `continue_from` restores them and the progress."""

    def __init__(self, layout: Layout, folder: Path, records: Records, observer: Observer) -> None:
        self._layout = layout
        self._config = layout.config
        self._folder = folder
        self._records = records
        self._observer = SnapshotWriter(observer, folder)
        self._checkpoints = Checkpoints(folder)
        self._seal = Seal(records)
        self._started_s = 0.0  # host times in the records count from here

    def begin(self) -> Result | None:
        self._started_s = started_s = time.monotonic()
        self._records.set_meta(started=now())
        with contextlib.closing(self._processes()) as fleet:
            prepared = prepare_fresh(self._layout, fleet, self._observer)
            progress = first_progress(self._layout, prepared)
            late = missed_deadlines(self._layout, prepared)
            for sentence in late:
                self._observer.say(sentence)
            if (evaluation := self._config.experiment.evaluation).changes:
                self._observer.say(size_text(progress.state.tensors, evaluation))
            self._records.write(prepared.client_rows)
            self._note([*prepared.notices, *(("deadline", sentence) for sentence in late)], started_s)
            self._records.set_meta(
                timing=prepared.timing.meta(),
                calibration=calibration_meta(prepared.calibration),
                series=prepared.method.needs.reported,
                in_rounds=isinstance(progress.policy, Rounds),
            )
            return self._loop(fleet, prepared, progress, started_s)

    def _note(self, notices: Sequence[tuple[str, str]], started_s: float) -> None:
        host_s = time.monotonic() - started_s
        self._records.write(NoticeRow(host_s=host_s, device_s=0.0, kind=kind, text=text) for kind, text in notices)

    def go_on(self, loaded: Loaded) -> Result | None:
        checkpoint, damaged = loaded
        progress = checkpoint.progress
        for problem in damaged.values():
            self._observer.say(f"{problem}; continuing from an older checkpoint")
        self._checkpoints.clean(damaged)
        self._records.rewind(progress.version, progress.next_task, progress.tasks, progress.timeline.now_s)
        KeptMerges(self._folder, self._config.experiment.evaluation).rewind(progress.version)
        self._seal.upto(progress.version, progress.next_task, progress.tasks)
        self._observer.say(f"continuing after merge {progress.version}, {progress.timeline.now_s:.1f} s of device time")
        self._started_s = time.monotonic() - checkpoint.host_s
        with contextlib.closing(self._processes()) as fleet:
            prepared = prepare_again(
                self._layout,
                fleet,
                self._observer,
                clients=progress.clients,
                time_scale=self._records.meta("timing").get("time_scale"),
                calibration=calibration_from(self._records.meta("calibration")),
            )
            return self._loop(fleet, prepared, progress, time.monotonic() - checkpoint.host_s)

    def _processes(self) -> FleetProcesses:
        return FleetProcesses(setup_of(self._layout, self._folder), self._observer.tick, self._on_notice)

    def _on_notice(self, text: str) -> None:
        """Record and show a sentence about a node that has joined or was lost."""
        self._observer.say(text)
        self._records.notice("node", text, time.monotonic() - self._started_s, None)

    def _loop(self, fleet: FleetProcesses, prepared: Prepared, progress: Progress, started_s: float) -> Result | None:
        """Carry out the rounds; return the run's result."""
        experiment, participants, method = self._config.experiment, prepared.participants, prepared.method
        self._observer.say(f"starting {len(participants)} clients ({experiment.processes})")
        fleet.start(participants, prepared.timing, keep_heap=prepared.keep_heap)
        self._records.set_meta(heap_between_tasks="kept" if prepared.keep_heap else "given back")
        self._records.write(fleet.cap_rows(participants))
        self._records.set_meta(nodes=fleet.nodes())
        engine = Engine(
            layout=self._layout,
            folder=self._folder,
            prepared=prepared,
            executor=fleet.executor,
            records=self._records,
            progress=progress,
            checkpoint=lambda p: self._save(p, time.monotonic() - started_s),
            tick=self._observer.tick,
            started_s=started_s,
            say=self._observer.say,
        )
        self._observer.start(engine, engine.evaluations)
        try:
            engine.run()
        finally:
            self._observer.stop()
        context = method.context.with_initial() if method.needs.initial_on_client else method.context
        for target in method.targets(engine.progress.state):
            if target.shared:  # what is the client's of it is saved as the client's own
                continue
            kept = engine.progress.clients[target.client].kept if target.client is not None else None
            own = None if kept is None else load_bundle(self._folder / kept)
            tensors = target_tensors(target, context, own)
            if target.recalibrate:  # as it was evaluated
                model = context.family.load(target.variant, context.spec, tensors)
                recalibrate(model, all_inputs(self._layout.dataset, self._layout.split, experiment.evaluation.batch))
                tensors = dict(model.state_dict())
            about: dict[str, Value] = {"variant": target.variant, "client": target.client}
            save_bundle(self._folder / "models" / f"{target.name}.safetensors", Bundle(tensors, about))
        self._records.write(fleet.cap_rows(participants))
        self._records.set_meta(nodes=fleet.nodes())
        self._records.set_meta(degraded=_degraded(self._records))
        if engine.progress.version == 0:
            raise NothingMerged(_nothing_merged(self._records))
        return engine.evaluations.latest

    def _save(self, progress: Progress, host_s: float) -> None:
        check_state(progress.policy)
        self._checkpoints.save(
            Checkpoint(
                run=identity.run_digest(self._config),
                rounds=self._config.experiment.rounds,
                records=self._seal.upto(progress.version, progress.next_task, progress.tasks),
                host_s=host_s,
                progress=progress,
            )
        )


@contextlib.contextmanager
def open_records(folder: Path) -> Iterator[Records]:
    records = Records(folder / "run.sqlite")
    try:
        yield records
    finally:
        records.close()


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one sentence, which the records may no longer be able to store."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        # SQLite reports many causes as an input/output error
        by_sqlite, code = isinstance(error, sqlite3.Error), getattr(error, "errno", None)
        if code == errno.ENOSPC or (by_sqlite and _is_full(folder)):
            problem = f"the disk is full: {error}; free some space"
        elif code == errno.EFBIG or (by_sqlite and ulimits.holds_files_down()):
            problem = f"a file is larger than the shell allows (ulimit -f): {error}; raise that limit"
        else:
            found = " ".join(str(error).split())
            problem = f"{folder}: the run's folder cannot be used: {found}; make sure that you can read and write it"
        raise FleetbedError(f"{problem}, and continue with --resume; nothing that was merged is lost") from error


def _is_full(folder: Path) -> bool:
    return folder.exists() and shutil.disk_usage(folder).free < MIN_FREE_BYTES


@contextlib.contextmanager
def recorded_status(records: Records, folder: Path) -> Iterator[None]:
    """Record in the run's folder how the run ended, whatever happens."""
    try:
        yield
    except KeyboardInterrupt:
        records.set_meta(status="interrupted", ended=now())
        raise
    except CodeFailed as error:
        text = str(error)
        if error.trace:
            path = folder / ERROR_LOG
            path.write_text(error.trace)
            text = f"{text}; its traceback is in {path}"
        records.set_meta(status="failed", error=text, ended=now())
        advice = "fix it and continue with --resume; nothing that was merged is lost"
        if records.meta("files"):
            advice = "correct it and start a new run, because a changed file is not resumed"
        raise FleetbedError(f"{text}; {advice}") from error
    except FleetbedError as error:
        status = "empty" if isinstance(error, NothingMerged) else "failed"
        with contextlib.suppress(FleetbedError, sqlite3.Error):  # the records themselves may be what failed
            records.set_meta(status=status, error=str(error), ended=now())
        raise
    records.set_meta(status="done", ended=now())


def done_text(result: Result | None) -> str:
    return "done" if result is None else f"done: {result}"


def first_facts(config: RunConfig, command: str) -> dict[str, Any]:
    proved = load_report()
    return {
        "fleetbed_version": version("fleetbed"),
        "config": msgspec.to_builtins(config),
        "status": "running",
        "command": command,
        "fingerprint": host_fingerprint(),
        "versions": identity.versions(),
        "files": code_files(config.code),
        "host_can": msgspec.to_builtins(examine().knobs),
        "verify": None if proved is None else msgspec.to_builtins(worst(proved)),
        "host": {
            "name": platform.node(),
            "cpu": host.cpu_model(),
            "cores": host.cores(),
            "memory_bytes": host.memory_bytes(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "gpu": card_names(),
        },
    }


def _nothing_merged(records: Records) -> str:
    counts = records.rows("SELECT outcome, count(*) FROM tasks GROUP BY outcome ORDER BY 2 DESC, 1")
    ended = ", ".join(f"{count} {outcome}" for outcome, count in counts) or "no task was started"
    details = [detail for (detail,) in records.rows("SELECT detail FROM tasks WHERE outcome = 'crash' LIMIT 1")]
    hints = [HINTS[outcome] for outcome, _ in counts if outcome in HINTS] + [f"the first crash: {d}" for d in details]
    return (
        f"no result was merged (tasks by outcome: {ended}), so the model is still the initial one; "
        f"{hints[0] if hints else 'see the outcome and detail of each task in the records'}"
    )


def _degraded(records: Records) -> bool:
    overruns = [overrun for (overrun,) in records.rows("SELECT overrun FROM tasks WHERE overrun IS NOT NULL")]
    return len(overruns) > 1 and statistics.quantiles(overruns, n=20)[-1] > DEGRADED_OVERRUN


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
