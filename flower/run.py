"""Carries out one run of a Flower app, from its configuration to its records.

It is a run like any other: the same engine, processes, limits and records. What differs is said in the records: the app
chooses no variant by memory, its durations are metered, and a ServerApp cannot be continued in its middle.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.layout import Surroundings, surroundings
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.engine.participant import ClientProgress, Participant
from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.progress import Progress
from fleetbed.emulator.machine import host
from fleetbed.emulator.machine.capacity import check_processes_fit
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.results import Result
from fleetbed.emulator.records.tables import ClientRow
from fleetbed.emulator.run.fitting import MIB
from fleetbed.emulator.run.fleet import FleetProcesses
from fleetbed.emulator.run.preparation import HEAP_PART, calibration_meta, host_calibration
from fleetbed.emulator.run.run import (
    NothingMerged,
    create_folder,
    disk_errors,
    done_text,
    first_facts,
    now,
    open_records,
    recorded_status,
)
from fleetbed.emulator.timeline.availability import make_availability
from fleetbed.emulator.timeline.events import Timeline
from fleetbed.emulator.timeline.network import Pipe
from fleetbed.emulator.wire.messages import Setup
from fleetbed.flower import identity
from fleetbed.flower.app import DOWNLOAD, AppParts, Config, check_flower, config_of, load_part, needs_download
from fleetbed.flower.client import APP_FILE, AppFile, Node
from fleetbed.flower.grid import FleetGrid
from fleetbed.flower.metered import Metered
from fleetbed.flower.reported import Reported
from fleetbed.flower.rounds import Exchange, FlowerMethod, ServerAppRounds
from fleetbed.flower.serverapp import running
from fleetbed.models.work import Work
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import RunConfig

REASON = "a Flower app: it chooses no model by the device's memory"


@dataclass(frozen=True)
class FlowerLayout:
    around: Surroundings
    parts: AppParts
    run_config: Config
    server: Any  # the ServerApp
    flower: str  # the version


def lay_out(config: RunConfig, search: Sequence[Path]) -> FlowerLayout:
    """Load and check everything that the configuration names, the app included. Nothing is written."""
    found = check_flower()
    parts, run_config = config_of(config.experiment)
    around = surroundings(config, search)
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    load_part(parts, parts.client, ClientApp)
    return FlowerLayout(around, parts, run_config, load_part(parts, parts.server, ServerApp), found)


def check(config: RunConfig, search: Sequence[Path]) -> None:
    """Raise the error with which `start` would refuse this run."""
    lay_out(config, search)


def start(config: RunConfig, folder: Path, *, search: Sequence[Path], command: str, observer: Observer) -> None:
    """Carry out a new run in a new folder. A run that is refused leaves no folder behind."""
    layout = lay_out(config, search)
    check_processes_fit(len(layout.around.specs), config.experiment.processes)
    create_folder(folder)
    try:
        with disk_errors(folder), open_records(folder) as records:
            facts = first_facts(config, command)
            facts["versions"] |= {"flwr": layout.flower}
            records.set_meta(**facts, run_config=layout.run_config)
            with recorded_status(records, folder):
                result = _FlowerRun(layout, folder, records, observer).carry_out()
    except BadInput:
        shutil.rmtree(folder)
        raise
    observer.say(done_text(result))


def resume(config: RunConfig, folder: Path, *, search: Sequence[Path], observer: Observer) -> None:
    del config, search, observer
    raise BadInput(
        f"{folder}: a run of a Flower app cannot be continued in the middle of its ServerApp; move the folder away, "
        "and --resume starts the run again"
    )


class _FlowerRun:
    def __init__(self, layout: FlowerLayout, folder: Path, records: Records, observer: Observer) -> None:
        self._layout = layout
        self._around = layout.around
        self._config = layout.around.config
        self._folder = folder
        self._records = records
        self._observer = observer
        self._engine: Engine | None = None
        self._reported = Reported(records, layout.around.config.algorithm.title)

    def carry_out(self) -> Result | None:
        started_s = time.monotonic()
        self._records.set_meta(started=now())
        seed, specs = self._config.seed, self._around.specs
        nodes = identity.node_ids(seed, len(specs))
        self._write_app(nodes)
        setup = Setup(config=self._config, folder=str(self._folder.absolute()), runner="fleetbed.flower.client")
        grid = FleetGrid(nodes)
        with contextlib.closing(FleetProcesses(setup, self._observer.tick)) as fleet:
            prepared = self._prepare(fleet, Exchange(grid, nodes, self._observer.tick))
            self._observer.say(f"starting {len(specs)} clients ({self._config.experiment.processes})")
            fleet.start(prepared.participants, prepared.timing, keep_heap=prepared.keep_heap)
            self._records.set_meta(heap_between_tasks="kept" if prepared.keep_heap else "given back")
            self._records.write(fleet.cap_rows(prepared.participants))
            method = prepared.method
            assert isinstance(method, FlowerMethod)
            engine = self._engine = Engine(
                layout=self._around,
                folder=self._folder,
                prepared=prepared,
                executor=fleet.executor,
                records=self._records,
                progress=self._progress(prepared, method.exchange),
                checkpoint=self._after_merge,
                tick=self._observer.tick,
                started_s=started_s,
                say=self._observer.say,
                ended=method.exchange.ended,
            )
            self._observer.start(engine, engine.evaluations)
            try:
                with running(self._layout.server, grid, self._layout.run_config, seed, self._folder, self._note):
                    engine.run()
                self._reported.write(engine.evaluations)
            finally:
                self._observer.stop()
            self._records.write(fleet.cap_rows(prepared.participants))
            assert isinstance(prepared.timing, Metered)
            self._records.notice("timing", prepared.timing.summary(), time.monotonic() - started_s, None)
        self._check_result(engine)
        return engine.evaluations.latest

    def _write_app(self, nodes: Sequence[int]) -> None:
        """Tell the clients' processes of the app, and each client of its partition and its device."""
        told = tuple(
            Node(
                node_id=node,
                config={
                    "partition-id": spec.number,
                    "num-partitions": len(nodes),
                    "fleetbed.device": spec.kind,
                    "fleetbed.memory-mib": int(spec.device.cap_mib),
                },
            )
            for node, spec in zip(nodes, self._around.specs, strict=True)
        )
        about = AppFile(str(self._layout.parts.folder), self._layout.run_config, told)
        (self._folder / APP_FILE).write_bytes(msgspec.json.encode(about))

    def _prepare(self, fleet: FleetProcesses, exchange: Exchange) -> Prepared:
        specs, flower = self._around.specs, self._config.experiment.flower
        assert flower is not None
        calibration = host_calibration(fleet, self._observer)
        timing = Metered(calibration.rate, {spec.number: spec.device for spec in specs}, flower.hang_s)
        name = self._config.algorithm.title
        participants = {
            spec.number: Participant(
                spec=spec,
                samples=0,
                progress=ClientProgress(name),
                cap_bytes=int(spec.device.cap_mib * MIB),
                heaviest=Work(),
                capped=True,
                share=1.0,
                slowdown=timing.slowdown(spec.device, name, Work()),
            )
            for spec in specs
        }
        self._records.write(_client_row(who) for who in participants.values())
        self._records.set_meta(timing=timing.meta(), calibration=calibration_meta(calibration), series=None)
        needed = sum(who.cap_bytes for who in participants.values())
        return Prepared(
            participants=participants,
            timing=timing,
            method=FlowerMethod(exchange, self._note),
            calibration=calibration,
            keep_heap=self._config.experiment.processes == "resident" and needed <= HEAP_PART * host.available_bytes(),
        )

    def _progress(self, prepared: Prepared, exchange: Exchange) -> Progress:
        link, participants = self._around.server_link, prepared.participants
        progress = Progress(
            timeline=Timeline(down=Pipe(link.up_mbit_s * 1e6), up=Pipe(link.down_mbit_s * 1e6)),
            policy=ServerAppRounds(self._config.policy, self._config.seed, len(participants), 1, exchange=exchange),
            availability=make_availability(
                self._config.experiment.availability,
                [who.spec for who in participants.values()],
                self._around.presence,
                self._config.seed,
            ),
            clients={number: who.progress for number, who in participants.items()},
            state=prepared.method.setup(),
            free_since=dict.fromkeys(participants, 0.0),
        )
        for event in progress.availability.begin(participants):
            progress.timeline.add(event)
        return progress

    def _note(self, who: str, round_: int, metrics: dict[str, float]) -> None:
        """Note what the clients or the ServerApp measured; the latter calls this in its own thread."""
        assert self._engine is not None
        progress = self._engine.progress
        version = progress.version + (who == "clients")  # the merge is being made
        self._reported.note(version, progress.timeline.now_s, who, round_, metrics)

    def _after_merge(self, progress: Progress) -> None:
        assert self._engine is not None
        self._reported.write(self._engine.evaluations)
        used = {client.kept for client in progress.clients.values()} | {
            name for task in progress.tasks.values() for name in (task.kept, task.keep)
        }
        for path in (self._folder / "state").glob("client-*/task-*.safetensors"):
            if str(path.relative_to(self._folder)) not in used and not self._may_come(path, progress):
                path.unlink()

    def _may_come(self, path: Path, progress: Progress) -> bool:
        """Whether the file may be what a task under way keeps, whose reply has not been read yet."""
        return any(path.stem.endswith(f"{number:08d}") for number in progress.tasks)

    def _check_result(self, engine: Engine) -> None:
        """Refuse to call a run a result in which no client ever answered."""
        if engine.progress.version:
            return
        rows = self._records.rows(
            "SELECT outcome, detail, count(*) FROM tasks GROUP BY outcome, detail ORDER BY 3 DESC LIMIT 1"
        )
        if not rows:
            raise NothingMerged("the ServerApp ended without sending a message to any client; see server.log")
        outcome, detail, count = rows[0]
        hint = f"; {DOWNLOAD}" if needs_download(detail) else ""
        raise NothingMerged(f"no client gave a result: {count} tasks ended with {outcome}: {detail}{hint}")


def _client_row(who: Participant) -> ClientRow:
    spec = who.spec
    return ClientRow(
        client=spec.number,
        name=spec.name,
        device=spec.kind,
        device_title=spec.device.title,
        link=spec.link_name,
        variant=who.progress.variant,
        reason=REASON,
        memory_predicted_bytes=None,
        memory_cap_bytes=who.cap_bytes,
        rate_gflops=spec.device.rate_gflops,
        slowdown=who.slowdown,
        load_w=spec.device.power.load_w,
        idle_w=spec.device.power.idle_w,
        samples=0,
        test_samples=0,
        label_counts="[]",
    )
