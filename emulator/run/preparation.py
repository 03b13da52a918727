"""Makes the decisions of a run before its first round: timing, variants, shares of the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fleetbed.emulator.engine.layout import Layout
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.engine.participant import ClientProgress, Participant
from fleetbed.emulator.engine.prepared import Prepared
from fleetbed.emulator.engine.timing import Enforced, Modelled, Replay, Timing, TrainingCosts
from fleetbed.emulator.machine import host, measuring_lock
from fleetbed.emulator.machine.calibration import Calibration, Store, load_or_measure
from fleetbed.emulator.method.algorithm import Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.records.tables import ClientRow
from fleetbed.emulator.run.fitting import MIB, choose_variants, describe_clients, try_out
from fleetbed.emulator.run.fleet import FleetProcesses
from fleetbed.emulator.run.references import References
from fleetbed.emulator.run.replay import read_recording
from fleetbed.emulator.timeline.time_scale import make_time_scale
from fleetbed.models.cost.choose import Choice
from fleetbed.models.cost.predict import cost

#: the part of the host's available memory that clients may keep between tasks
HEAP_PART = 0.5


@dataclass(frozen=True, kw_only=True)
class Fresh(Prepared):
    """The decisions of a new run, and how its records describe them."""

    state: Bundle
    choices: dict[int, Choice]
    client_rows: list[ClientRow]
    notices: list[tuple[str, str]]  # for the user: a kind and a sentence


def prepare_fresh(layout: Layout, fleet: FleetProcesses, observer: Observer) -> Fresh:
    timing, references = _timing(layout, fleet, observer, None)
    choices = choose_variants(layout, timing.budget_s)
    if timing.tries_out:
        choices = try_out(layout, choices, fleet)
    variants = timing.variants({number: choice.variant for number, choice in choices.items()})
    choices = {number: replace(choice, variant=variants[number]) for number, choice in choices.items()}
    clients = {number: ClientProgress(variant) for number, variant in variants.items() if variant is not None}
    observer.say(_summary(clients, len(choices), [one.config.algorithm.title for one in layout.compared()]))
    if references is not None:
        observer.say("looking up, or measuring, how long the models take on this host")
    known = None if references is None else references.calibration.disturbed
    prepared, state = prepare_variants(layout, timing, references, clients, observer)
    warning = None if prepared.calibration is None else prepared.calibration.warning
    if warning is not None and prepared.calibration is not None and prepared.calibration.disturbed != known:
        observer.say(warning)
    return Fresh(
        **vars(prepared),
        state=state,
        choices=choices,
        client_rows=describe_clients(layout, choices, prepared.participants),
        notices=[] if warning is None else [("calibration", warning)],
    )


def prepare_again(
    layout: Layout,
    fleet: FleetProcesses,
    observer: Observer,
    *,
    clients: dict[int, ClientProgress],
    time_scale: float | None,
    calibration: Calibration | None,
) -> Prepared:
    """Restore the decisions of a run that continues, with the calibration that they were based on."""
    timing, references = _timing(layout, fleet, observer, calibration)
    return prepare_variants(layout, timing, references, clients, observer, time_scale)[0]


def prepare_variants(
    layout: Layout,
    timing: Timing,
    references: References | None,
    clients: dict[int, ClientProgress],
    observer: Observer,
    time_scale: float | None = None,
) -> tuple[Prepared, Bundle]:
    """Return everything that follows from the variants, and the method's first state."""
    samples = {number: len(layout.split.train[number]) for number in clients}
    seen = {number: Client(number, now.variant, samples[number]) for number, now in clients.items()}
    method = layout.method(list(seen.values()))
    state = method.setup()
    specs = layout.specs
    heaviest = {number: method.heaviest(state, client) for number, client in seen.items()}
    tasks = [(specs[n].kind, specs[n].device, clients[n].variant, heaviest[n]) for n in clients]
    if (said := timing.fit_scale(tasks, time_scale)) is not None:
        observer.say(said)
    participants = {
        number: Participant(
            spec=specs[number],
            samples=samples[number],
            progress=now,
            cap_bytes=int(specs[number].device.cap_mib * MIB),
            heaviest=heaviest[number],
            capped=number not in layout.assigned,
            share=timing.share(specs[number].device, now.variant, heaviest[number]),
            slowdown=timing.slowdown(specs[number].device, now.variant, heaviest[number]),
        )
        for number, now in clients.items()
    }
    prepared = Prepared(
        participants=participants,
        timing=timing,
        method=method,
        calibration=None if references is None else references.calibration,
        keep_heap=_keep_heap(layout, participants),
    )
    return prepared, state


def _keep_heap(layout: Layout, participants: dict[int, Participant]) -> bool:
    """Return whether clients keep their heap between tasks: if the host's memory suffices for all of their peaks.

    A heap that is given back must be faulted in again, page by page, by the next task.
    """
    if layout.config.experiment.processes != "resident":
        return False  # a process that ends with its task has no heap to keep
    optimizer, spec = layout.config.experiment.training.optimizer, layout.dataset.spec
    needed = sum(
        cost(layout.family, who.client.variant, spec, who.heaviest, optimizer).memory_bytes
        for who in participants.values()
    )
    return needed <= HEAP_PART * host.available_bytes()


def _timing(
    layout: Layout, fleet: FleetProcesses, observer: Observer, calibration: Calibration | None
) -> tuple[Timing, References | None]:
    """Return the timing that the experiment asks for, and the reference times of this host if it needs them."""
    experiment, spec = layout.config.experiment, layout.dataset.spec
    choice, optimizer = experiment.timing, experiment.training.optimizer
    training = TrainingCosts(layout.family, spec, optimizer)
    if choice.source == "modelled":
        return Modelled(training), None
    if choice.source == "replay":
        assert choice.replay is not None  # the experiment was checked
        return Replay(training, read_recording(Path(choice.replay), layout.config)), None
    calibration = calibration or host_calibration(fleet, observer)
    references = References(calibration, Store(), fleet.executor, layout.config.model, spec, optimizer, observer.say)
    scale = make_time_scale(choice.time_scale)
    return Enforced(training, calibration.rate, references.host_s, scale), references


def host_calibration(fleet: FleetProcesses, observer: Observer) -> Calibration:
    if Store().load() is None:
        observer.say("measuring the speed of this host, once: about ten seconds")
        fleet.settle()
        with measuring_lock.alone(observer.say):
            load_or_measure()
    calibration = load_or_measure()
    if calibration.warning is not None:
        observer.say(calibration.warning)
    return calibration


def _summary(clients: dict[int, ClientProgress], total: int, common_to: list[str]) -> str:
    counts = Counter(client.variant for client in clients.values())
    chosen = ", ".join(f"{count} x {variant}" for variant, count in sorted(counts.items()))
    unfit = f"; {total - len(clients)} clients are unfit" if len(clients) < total else ""
    shared = f", common to {', '.join(common_to)}" if common_to else ""
    return f"variants chosen{shared}: {chosen}{unfit}"


def calibration_meta(calibration: Calibration | None) -> dict[str, Any] | None:
    return None if calibration is None else {"id": calibration.id, **msgspec.to_builtins(calibration)}


def calibration_from(meta: dict[str, Any] | None) -> Calibration | None:
    if meta is None:
        return None
    return msgspec.convert({key: value for key, value in meta.items() if key != "id"}, Calibration)
