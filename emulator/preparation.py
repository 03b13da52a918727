"""What a run decides before its first round: durations' source, variants, dilation, shares of the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fleetbed.emulator import bench, pacing, quiet
from fleetbed.emulator.algorithm import Algorithm, Client
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.calibration import Calibration, Store, load_or_measure
from fleetbed.emulator.dilation import Dilation
from fleetbed.emulator.fitting import MIB, client_rows, fit, needs, try_out
from fleetbed.emulator.fleet import Fleet
from fleetbed.emulator.layout import Layout
from fleetbed.emulator.participant import Participant
from fleetbed.emulator.planner import Planner, Reference
from fleetbed.emulator.references import References
from fleetbed.emulator.replay import Recording, read_recording
from fleetbed.emulator.watch import Watch
from fleetbed.models.choose import Choice


@dataclass(frozen=True, kw_only=True)
class Prepared:
    participants: dict[int, Participant]
    planner: Planner
    method: Algorithm
    dilation: Dilation | None  # None: full speed
    calibration: Calibration | None
    recording: Recording | None  # of the run that is replayed

    def load_of(self, client: int) -> float:
        """The part of a core that it fills while it trains, with all cores busy: its share is of one that is alone."""
        share = self.participants[client].share
        if self.dilation is None or self.calibration is None:
            return share
        return share / self.calibration.rate.busy_to_alone

    def timing(self, source: str) -> dict[str, Any]:
        rate = None if self.calibration is None else self.calibration.rate
        return {
            "source": source,
            "dilation": None if self.dilation is None else self.dilation.now,
            "host_alone_gflops": None if rate is None else rate.alone_gflops,
            "host_busy_gflops": None if rate is None else rate.busy_gflops,
        }


@dataclass(frozen=True, kw_only=True)
class Fresh(Prepared):
    """The decisions of a run that begins, with what its records say of them."""

    state: Bundle
    choices: dict[int, Choice]
    client_rows: list[dict[str, Any]]


def prepare_fresh(layout: Layout, fleet: Fleet, watch: Watch) -> Fresh:
    source = layout.config.experiment.timing.source
    calibration = None
    if source in ("enforced", "calibrated"):
        if Store().load() is None:
            watch.say("measuring how fast this host is, once: about ten seconds")
            fleet.settle()
            with quiet.alone(watch.say):
                load_or_measure()
        calibration = load_or_measure()
    recording = _recording(layout)
    planner, references = _planner(layout, fleet, calibration, recording, watch)
    if recording is None:
        choices = fit(layout, lambda device, variant, work: planner.plan(device, variant, work, 0).total_s)
    else:  # it was chosen then, by plans; what was measured may be longer than a budget allows
        choices = fit(layout, lambda *_: 0.0)
        choices = {number: replace(choices[number], variant=v) for number, v in recording.variants.items()}
    if source in ("enforced", "calibrated"):
        choices = try_out(layout, choices, fleet)
    variants = {number: choice.variant for number, choice in choices.items() if choice.variant is not None}
    watch.say(_summary(variants, len(choices)))
    dilation = _pace(layout, _dilation(layout, variants, calibration))
    if dilation is not None and dilation.now > 1:
        seconds = f"{dilation.now:.2f} host seconds"
        taken = seconds if dilation.fixed else f"at first {seconds} or more"
        watch.say(f"the fleet is faster than this host: a device second takes {taken}")
    participants = make_participants(layout, variants, planner, dilation)
    method = layout.method([who.client for who in participants.values()])
    state = method.setup()
    _lend(layout, method, state, participants)
    if references is not None:
        # now, alone on the host, rather than when the first task needs them
        watch.say("looking up the reference times of the models in use, or measuring them")
        for who in participants.values():
            planner.plan(who.spec.device, who.client.variant, method.heaviest(state, who.client), 0)
        calibration = references.calibration
    return Fresh(
        participants=participants,
        planner=planner,
        method=method,
        dilation=dilation,
        calibration=calibration,
        recording=recording,
        state=state,
        choices=choices,
        client_rows=client_rows(layout, choices, planner.slowdown),
    )


def prepare_again(
    layout: Layout,
    fleet: Fleet,
    watch: Watch,
    *,
    variants: dict[int, str],
    dilation: float | None,
    calibration: Calibration | None,
) -> Prepared:
    """A run that goes on keeps what it decided, and the calibration that it decided it by."""
    recording = _recording(layout)
    planner, _ = _planner(layout, fleet, calibration, recording, watch)
    pace = _pace(layout, dilation)
    participants = make_participants(layout, variants, planner, pace)
    method = layout.method([who.client for who in participants.values()])
    _lend(layout, method, method.setup(), participants)
    return Prepared(
        participants=participants,
        planner=planner,
        method=method,
        dilation=pace,
        calibration=calibration,
        recording=recording,
    )


def make_participants(
    layout: Layout, variants: dict[int, str], planner: Planner, dilation: Dilation | None
) -> dict[int, Participant]:
    found = {}
    assigned = layout.assigned
    for number, variant in variants.items():
        spec = layout.specs[number]
        slowdown = planner.slowdown(spec.device)
        found[number] = Participant(
            spec=spec,
            client=Client(number, variant, len(layout.split.train[number])),
            cap_bytes=int(spec.device.cap_mib * MIB),
            capped=number not in assigned,
            share=1.0 if dilation is None or slowdown is None else pacing.share(slowdown, dilation.now),
        )
    return found


def _lend(layout: Layout, method: Algorithm, state: Bundle, participants: dict[int, Participant]) -> None:
    """Decide who trains in lent memory: whoever is not paced and has a cap far above what it needs."""
    experiment = layout.config.experiment
    if experiment.timing.source == "enforced" or experiment.processes == "inline":
        return
    needed = needs(layout, method, state, [who.client for who in participants.values()])
    for number, who in participants.items():
        if who.spec.device.trains_on == "cpu":
            cost = needed[number]
            received = min(cost.memory.get("held", 0), cost.state_bytes)  # is looked at where it lies
            on_it = cost.memory_bytes - cost.memory["process"] - received
            who.lent_bytes = bench.size_for(on_it, who.cap_bytes - cost.memory_bytes if who.capped else None)


def _planner(
    layout: Layout, fleet: Fleet, calibration: Calibration | None, recording: Recording | None, watch: Watch
) -> tuple[Planner, References | None]:
    experiment, spec = layout.config.experiment, layout.dataset.spec
    optimizer = experiment.training.optimizer
    references = None
    if calibration is not None:
        references = References(calibration, Store(), fleet.executor, experiment.model, spec, optimizer, watch.say)
    planner = Planner(
        source=experiment.timing.source,
        family=layout.family,
        spec=spec,
        optimizer=optimizer,
        host_gflops=None if calibration is None else calibration.rate.alone_gflops,
        seconds=references.seconds if references is not None else _no_reference,
        recorded_s=None if recording is None else recording.compute_s,
    )
    return planner, references


def _recording(layout: Layout) -> Recording | None:
    timing = layout.config.experiment.timing
    if timing.source != "replay" or timing.replay is None:
        return None
    return read_recording(Path(timing.replay), layout.config)


def _dilation(layout: Layout, variants: Iterable[int], calibration: Calibration | None) -> float | None:
    timing = layout.config.experiment.timing
    if timing.source != "enforced" or calibration is None:
        return None
    rate = calibration.rate
    specs = [layout.specs[number] for number in variants]
    slowdowns = {spec.kind: pacing.slowdown(rate.alone_gflops, spec.device) for spec in specs}
    if timing.dilation == "auto":
        return pacing.auto_dilation(slowdowns.values(), rate.busy_to_alone)
    pacing.check_dilation(timing.dilation, slowdowns, rate.busy_to_alone)
    return timing.dilation


def _pace(layout: Layout, start: float | None) -> Dilation | None:
    return None if start is None else Dilation(start, fixed=layout.config.experiment.timing.dilation != "auto")


def _summary(variants: dict[int, str], total: int) -> str:
    counts: dict[str, int] = {}
    for variant in variants.values():
        counts[variant] = counts.get(variant, 0) + 1
    chosen = ", ".join(f"{count} x {variant}" for variant, count in sorted(counts.items()))
    unfit = f"; {total - len(variants)} clients are unfit" if len(variants) < total else ""
    return f"variants chosen: {chosen}{unfit}"


def _no_reference(reference: Reference) -> float:
    raise AssertionError(f"{reference} was asked for under a timing that needs no reference times")


def calibration_meta(calibration: Calibration | None) -> dict[str, Any] | None:
    return None if calibration is None else {"id": calibration.id, **msgspec.to_builtins(calibration)}


def calibration_from(meta: dict[str, Any] | None) -> Calibration | None:
    if meta is None:
        return None
    return msgspec.convert({key: value for key, value in meta.items() if key != "id"}, Calibration)
