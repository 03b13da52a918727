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

from fleetbed.emulator import host, pacing
from fleetbed.emulator.algorithm import Algorithm, Client
from fleetbed.emulator.bundle import Bundle, Value
from fleetbed.emulator.calibration import Calibration, Store, host_fingerprint, load_or_measure
from fleetbed.emulator.checkpoint import Checkpoints
from fleetbed.emulator.engine import Engine, Participant, Progress
from fleetbed.emulator.evaluation import Evaluations
from fleetbed.emulator.fitting import MIB, client_rows, fit
from fleetbed.emulator.fleet import Fleet
from fleetbed.emulator.layout import Layout, lay_out
from fleetbed.emulator.network import Pipe
from fleetbed.emulator.planner import Planner
from fleetbed.emulator.policies import make_policy
from fleetbed.emulator.records import Records
from fleetbed.emulator.references import References
from fleetbed.emulator.storage import load_bundle, save_bundle
from fleetbed.emulator.targets import target_tensors
from fleetbed.emulator.timeline import Timeline
from fleetbed.emulator.watch import Watch
from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.experiment import RunConfig

#: a run whose tasks overran their plans by more than this (95th percentile) is labelled degraded
DEGRADED_OVERRUN = 1.05
VERSIONS = ("fleetbed", "torch", "torchvision", "numpy", "pyzmq")


def is_done(folder: Path) -> bool:
    with _records(folder) as records:
        return bool(records.meta("status") == "done")


def start(config: RunConfig, folder: Path, *, search: Sequence[Path], command: str, watch: Watch) -> None:
    """A new run in a new folder. What is refused is refused before the folder exists."""
    layout = lay_out(config, search)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise BadInput(f"{folder}: the run's folder exists; choose another with --out, or use --resume") from error
    except OSError as error:
        raise BadInput(
            f"{folder}: the run's folder cannot be made ({error.strerror}); choose another with --out"
        ) from error
    try:
        (folder / "partition.json").write_bytes(layout.split.to_json())
        with _records(folder) as records:
            records.set_meta(**_head(config, command))
            with _status(records, watch):
                _Run(layout, folder, records, watch).begin()
    except BadInput:
        shutil.rmtree(folder)
        raise


def resume(folder: Path, *, search: Sequence[Path], watch: Watch) -> None:
    """Go on with a run that was interrupted or killed, from its newest whole checkpoint."""
    with _records(folder) as records:
        written = records.meta("versions")
        differs = [
            f"{name} {written.get(name)} then, {now} now"
            for name, now in _versions().items()
            if written.get(name) != now
        ]
        if differs:
            raise BadInput(f"{folder}: the run was started with other versions: {'; '.join(differs)}")
        layout = lay_out(msgspec.convert(records.meta("config"), RunConfig), search)
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
        experiment, started_s = self._config.experiment, time.monotonic()
        source = experiment.timing.source
        calibration = None
        if source in ("enforced", "calibrated"):
            if Store().load() is None:
                self._watch.say("measuring how fast this host is, once: about ten seconds")
            calibration = load_or_measure()
        with contextlib.closing(Fleet(self._layout, self._folder, self._watch.tick)) as fleet:
            planner, references = self._planner(fleet, calibration)
            choices = fit(self._layout, lambda device, variant, work: planner.plan(device, variant, work, 0).total_s)
            self._records.write({"clients": client_rows(self._layout, choices, planner.slowdown)})
            variants = {number: choice.variant for number, choice in choices.items() if choice.variant is not None}
            self._watch.say(_summary(variants, len(choices)))
            dilation = self._dilation(variants, calibration)
            participants = self._participants(variants, planner, dilation)
            method = self._layout.method([who.client for who in participants.values()])
            state = method.setup()
            if references is not None:
                # measured now, alone on the host, rather than when the first task needs it
                self._watch.say("measuring reference times of the models in use")
                for who in participants.values():
                    planner.plan(who.spec.device, who.client.variant, method.heaviest(state, who.client), 0)
                calibration = references.calibration
            self._records.set_meta(
                timing=_timing(source, dilation, calibration),
                calibration=None if calibration is None else {"id": calibration.id, **msgspec.to_builtins(calibration)},
            )
            progress = Progress(
                timeline=Timeline(
                    down=Pipe(self._layout.server_link.up_mbit_s * 1e6),
                    up=Pipe(self._layout.server_link.down_mbit_s * 1e6),
                ),
                policy=make_policy(
                    experiment,
                    self._config.policy,
                    self._config.seed,
                    len(participants),
                    len(method.needs.stages),
                ),
                state=state,
            )
            self._loop(fleet, participants, method, planner, dilation, progress, started_s)

    def go_on(self) -> None:
        stored, progress, problems = self._checkpoints.load()
        for problem in problems:
            self._watch.say(f"{problem}; going on from the checkpoint before it")
        self._records.rewind(stored.version, stored.next_task, [task.number for task in stored.tasks])
        self._watch.say(f"going on after merge {stored.version}, {progress.timeline.now_s:.1f} s of device time")
        timing, kept = self._records.meta("timing"), self._records.meta("calibration")
        calibration = (
            None if kept is None else msgspec.convert({k: v for k, v in kept.items() if k != "id"}, Calibration)
        )
        with contextlib.closing(Fleet(self._layout, self._folder, self._watch.tick)) as fleet:
            planner, _ = self._planner(fleet, calibration)
            participants = self._participants(stored.variants, planner, timing["dilation"])
            for number, name in stored.kept.items():
                participants[number].kept = name
            method = self._layout.method([who.client for who in participants.values()])
            self._loop(
                fleet,
                participants,
                method,
                planner,
                timing["dilation"],
                progress,
                time.monotonic() - stored.host_s,
            )

    def _loop(
        self,
        fleet: Fleet,
        participants: dict[int, Participant],
        method: Algorithm,
        planner: Planner,
        dilation: float | None,
        progress: Progress,
        started_s: float,
    ) -> None:
        experiment = self._config.experiment
        self._watch.say(f"starting {len(participants)} clients ({experiment.processes})")
        fleet.start(participants)
        self._records.write({"caps": fleet.cap_rows(participants)})
        evaluations = Evaluations(fleet.executor, self._records, experiment.evaluation.batch)
        engine = Engine(
            config=self._config,
            participants=participants,
            server=self._layout.server,
            server_link=self._layout.server_link,
            method=method,
            planner=planner,
            dilation=dilation,
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
        for target in method.targets(engine.progress.state):
            kept = participants[target.client].kept if target.client is not None else None
            own = None if kept is None else load_bundle(self._folder / kept)
            tensors = target_tensors(target, method.context, own)
            about: dict[str, Value] = {"variant": target.variant, "client": target.client}
            save_bundle(self._folder / "models" / f"{target.name}.safetensors", Bundle(tensors, about))
        self._records.write({"caps": fleet.cap_rows(participants)})
        self._records.set_meta(degraded=_degraded(self._records))

    def _planner(self, fleet: Fleet, calibration: Calibration | None) -> tuple[Planner, References | None]:
        experiment = self._config.experiment
        references = None
        if calibration is not None:
            references = References(
                calibration,
                Store(),
                fleet.executor,
                experiment.model,
                self._layout.dataset.spec,
                experiment.training.optimizer,
            )
        planner = Planner(
            source=experiment.timing.source,
            family=self._layout.family,
            spec=self._layout.dataset.spec,
            optimizer=experiment.training.optimizer,
            host_gflops=None if calibration is None else calibration.rate.alone_gflops,
            seconds=references.seconds if references is not None else _no_reference,
        )
        return planner, references

    def _dilation(self, variants: dict[int, str], calibration: Calibration | None) -> float | None:
        timing = self._config.experiment.timing
        if timing.source != "enforced" or calibration is None:
            return None
        slowdowns = {}
        for number in variants:
            spec = self._layout.specs[number]
            slowdowns[spec.kind] = pacing.slowdown(calibration.rate.alone_gflops, spec.device)
        ratio = calibration.rate.busy_to_alone
        if timing.dilation == "auto":
            dilation = pacing.auto_dilation(slowdowns.values(), ratio)
        else:
            pacing.check_dilation(timing.dilation, slowdowns, ratio)
            dilation = timing.dilation
        if dilation > 1:
            self._watch.say(f"the fleet is faster than this host: a device second takes {dilation:.2f} host seconds")
        return dilation

    def _participants(
        self, variants: dict[int, str], planner: Planner, dilation: float | None
    ) -> dict[int, Participant]:
        found = {}
        for number, variant in variants.items():
            spec = self._layout.specs[number]
            slowdown = planner.slowdown(spec.device)
            found[number] = Participant(
                spec=spec,
                client=Client(number, variant, len(self._layout.split.train[number])),
                cap_bytes=int(spec.device.cap_mib * MIB),
                capped=self._config.algorithm.variant is None,
                share=1.0 if dilation is None or slowdown is None else pacing.share(slowdown, dilation),
            )
        return found


@contextlib.contextmanager
def _records(folder: Path) -> Iterator[Records]:
    records = Records(folder / "run.sqlite")
    try:
        yield records
    finally:
        records.close()


@contextlib.contextmanager
def _status(records: Records, watch: Watch) -> Iterator[None]:
    """However the run ends, its folder says so; a full disk is a sentence, not a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        records.set_meta(status="interrupted", ended=_now())
        raise
    except (OSError, sqlite3.OperationalError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "disk is full" in str(error):
            raise FleetbedError(
                f"the disk is full: {error}; free some room and go on with --resume, nothing that was merged is lost"
            ) from error
        raise
    except FleetbedError as error:
        records.set_meta(status="failed", error=str(error), ended=_now())
        raise
    records.set_meta(status="done", ended=_now())
    watch.say("done")


def _head(config: RunConfig, command: str) -> dict[str, Any]:
    return {
        "fleetbed_version": version("fleetbed"),
        "config": msgspec.to_builtins(config),
        "status": "running",
        "command": command,
        "started": _now(),
        "fingerprint": host_fingerprint(),
        "versions": _versions(),
        "host": {
            "cpu": host.cpu_model(),
            "cores": host.cores(),
            "memory_bytes": host.memory_bytes(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "gpu": None,
        },
    }


def _timing(source: str, dilation: float | None, calibration: Calibration | None) -> dict[str, Any]:
    rate = None if calibration is None else calibration.rate
    return {
        "source": source,
        "dilation": dilation,
        "host_alone_gflops": None if rate is None else rate.alone_gflops,
        "host_busy_gflops": None if rate is None else rate.busy_gflops,
    }


def _summary(variants: dict[int, str], total: int) -> str:
    counts: dict[str, int] = {}
    for variant in variants.values():
        counts[variant] = counts.get(variant, 0) + 1
    chosen = ", ".join(f"{count} x {variant}" for variant, count in sorted(counts.items()))
    unfit = f"; {total - len(variants)} clients are unfit" if len(variants) < total else ""
    return f"variants chosen: {chosen}{unfit}"


def _degraded(records: Records) -> bool:
    overruns = records.column("SELECT overrun FROM tasks WHERE overrun IS NOT NULL")
    return len(overruns) > 1 and statistics.quantiles(overruns, n=20)[-1] > DEGRADED_OVERRUN


def _versions() -> dict[str, str]:
    return {name: version(name) for name in VERSIONS}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _no_reference(reference: object) -> float:
    raise AssertionError(f"{reference} was asked for under a timing that needs no reference times")
