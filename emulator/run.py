"""One run from its configuration to its records: lay out, choose, start the fleet, loop, clean up."""

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

from fleetbed.emulator import host, identity
from fleetbed.emulator.bundle import Bundle, Value
from fleetbed.emulator.calibration import host_fingerprint
from fleetbed.emulator.checkpoint import Checkpoints
from fleetbed.emulator.doctor import examine
from fleetbed.emulator.engine import Engine
from fleetbed.emulator.evaluation import Evaluations
from fleetbed.emulator.fleet import Fleet
from fleetbed.emulator.layout import Layout, lay_out
from fleetbed.emulator.preparation import (
    Prepared,
    calibration_from,
    calibration_meta,
    prepare_again,
    prepare_fresh,
)
from fleetbed.emulator.progress import Progress, first_progress
from fleetbed.emulator.records import Records
from fleetbed.emulator.room import check_room
from fleetbed.emulator.storage import load_bundle, save_bundle
from fleetbed.emulator.targets import target_tensors
from fleetbed.emulator.verify import kept, worst
from fleetbed.emulator.watch import Watch
from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.experiment import RunConfig

#: a run whose tasks overran their plans by more than this (95th percentile) is labelled degraded
DEGRADED_OVERRUN = 1.05
LEAST_ROOM_BYTES = 1 << 20  # with less than this a write to the records may fail


def is_unborn(folder: Path) -> bool:
    """Whether there is nothing to go on with: no folder, or a run that was killed before its first checkpoint."""
    return not Checkpoints(folder).found()


def is_done(folder: Path) -> bool:
    with _records(folder) as records:
        return bool(records.meta("status") == "done")


def start(config: RunConfig, folder: Path, *, search: Sequence[Path], command: str, watch: Watch) -> None:
    """A new run in a new folder. What is refused is refused before the folder exists."""
    layout = lay_out(config, search)
    check_room(len(layout.specs), config.experiment.processes)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise BadInput(f"{folder}: the run's folder exists; choose another with --out, or use --resume") from error
    except OSError as error:
        raise BadInput(
            f"{folder}: the run's folder cannot be made ({error.strerror}); choose another with --out"
        ) from error
    try:
        with _room(folder), _records(folder) as records:
            (folder / "partition.json").write_bytes(layout.split.to_json())
            records.set_meta(**_head(config, command), profiles=identity.profiles(layout))
            with _status(records, watch):
                _Run(layout, folder, records, watch).begin()
    except BadInput:
        shutil.rmtree(folder)
        raise


def resume(config: RunConfig, folder: Path, *, search: Sequence[Path], watch: Watch) -> None:
    """Go on with a run that was interrupted or killed, from its newest whole checkpoint."""
    with _room(folder), _records(folder) as records:
        identity.check_same(str(folder), "versions", records.meta("versions"), identity.versions())
        identity.check_same(str(folder), "configuration", records.meta("config"), config)
        layout = lay_out(config, search)
        check_room(len(layout.specs), config.experiment.processes)
        identity.check_same(str(folder), "profiles", records.meta("profiles"), identity.profiles(layout))
        records.set_meta(status="running", error=None, ended=None)
        with _status(records, watch):
            _Run(layout, folder, records, watch).go_on()


class _Run:
    """A run in its folder; `begin` and `go_on` differ in where the decisions and the progress come from."""

    def __init__(self, layout: Layout, folder: Path, records: Records, watch: Watch) -> None:
        self._layout = layout
        self._config = layout.config
        self._folder = folder
        self._records = records
        self._watch = watch
        self._checkpoints = Checkpoints(folder)

    def begin(self) -> None:
        started_s = time.monotonic()
        self._records.set_meta(started=_now())  # what the records' host times count from
        with contextlib.closing(Fleet(self._layout, self._folder, self._watch.tick)) as fleet:
            prepared = prepare_fresh(self._layout, fleet, self._watch)
            self._records.write({"clients": prepared.client_rows})
            self._records.set_meta(
                timing=prepared.timing(self._config.experiment.timing.source),
                calibration=calibration_meta(prepared.calibration),
            )
            self._loop(fleet, prepared, first_progress(self._layout, prepared), started_s)

    def go_on(self) -> None:
        stored, progress, problems = self._checkpoints.load()
        for problem in problems:
            self._watch.say(f"{problem}; going on from the checkpoint before it")
        under_way = [task.number for task in stored.tasks]
        self._records.rewind(stored.version, stored.next_task, under_way, progress.timeline.now_s)
        self._watch.say(f"going on after merge {stored.version}, {progress.timeline.now_s:.1f} s of device time")
        with contextlib.closing(Fleet(self._layout, self._folder, self._watch.tick)) as fleet:
            prepared = prepare_again(
                self._layout,
                fleet,
                self._watch,
                variants=stored.variants,
                dilation=self._records.meta("timing")["dilation"],
                calibration=calibration_from(self._records.meta("calibration")),
            )
            for number, who in prepared.participants.items():
                who.kept = stored.kept[number]
                who.fit = number not in stored.unfit
            self._loop(fleet, prepared, progress, time.monotonic() - stored.host_s)

    def _loop(self, fleet: Fleet, prepared: Prepared, progress: Progress, started_s: float) -> None:
        experiment, participants, method = self._config.experiment, prepared.participants, prepared.method
        self._watch.say(f"starting {len(participants)} clients ({experiment.processes})")
        fleet.start(participants)
        self._records.write({"caps": fleet.cap_rows(participants)})
        evaluations = Evaluations(fleet.executor, self._records, experiment.evaluation.batch)
        engine = Engine(
            layout=self._layout,
            prepared=prepared,
            executor=fleet.executor,
            evaluations=evaluations,
            records=self._records,
            progress=progress,
            checkpoint=lambda p: self._checkpoints.save(p, participants, time.monotonic() - started_s),
            tick=self._watch.tick,
            started_s=started_s,
        )
        self._watch.start(engine, evaluations)
        try:
            engine.run()
        finally:
            self._watch.stop()
            self._checkpoints.close()
        for target in method.targets(engine.progress.state):
            kept = participants[target.client].kept if target.client is not None else None
            own = None if kept is None else load_bundle(self._folder / kept)
            tensors = target_tensors(target, method.context, own)
            about: dict[str, Value] = {"variant": target.variant, "client": target.client}
            save_bundle(self._folder / "models" / f"{target.name}.safetensors", Bundle(tensors, about))
        self._records.write({"caps": fleet.cap_rows(participants)})
        self._records.set_meta(degraded=_degraded(self._records))


@contextlib.contextmanager
def _records(folder: Path) -> Iterator[Records]:
    records = Records(folder / "run.sqlite")
    try:
        yield records
    finally:
        records.close()


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """A full disk is a sentence, not a traceback; the folder cannot say it, for there is no room."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        # SQLite may call a full disk an input/output error
        no_room = isinstance(error, sqlite3.OperationalError) and shutil.disk_usage(folder).free < LEAST_ROOM_BYTES
        if no_room or getattr(error, "errno", None) == errno.ENOSPC:
            raise FleetbedError(
                f"the disk is full: {error}; free some room and go on with --resume, nothing that was merged is lost"
            ) from error
        raise


@contextlib.contextmanager
def _status(records: Records, watch: Watch) -> Iterator[None]:
    """However the run ends, its folder says so."""
    try:
        yield
    except KeyboardInterrupt:
        records.set_meta(status="interrupted", ended=_now())
        raise
    except FleetbedError as error:
        records.set_meta(status="failed", error=str(error), ended=_now())
        raise
    records.set_meta(status="done", ended=_now())
    watch.say("done")


def _head(config: RunConfig, command: str) -> dict[str, Any]:
    proved = kept()
    return {
        "fleetbed_version": version("fleetbed"),
        "config": msgspec.to_builtins(config),
        "status": "running",
        "command": command,
        "fingerprint": host_fingerprint(),
        "versions": identity.versions(),
        "host_can": msgspec.to_builtins(examine().knobs),
        "verify": None if proved is None else msgspec.to_builtins(worst(proved)),
        "host": {
            "cpu": host.cpu_model(),
            "cores": host.cores(),
            "memory_bytes": host.memory_bytes(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "gpu": None,
        },
    }


def _degraded(records: Records) -> bool:
    overruns = [overrun for (overrun,) in records.rows("SELECT overrun FROM tasks WHERE overrun IS NOT NULL")]
    return len(overruns) > 1 and statistics.quantiles(overruns, n=20)[-1] > DEGRADED_OVERRUN


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
