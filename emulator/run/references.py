"""Reference times: how long a pass takes on this host, warmed up and alone. Stored in the host's calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from fleetbed.emulator.machine import measuring_lock
from fleetbed.emulator.machine.calibration import RETRIES, Calibration, Store, disturbance
from fleetbed.emulator.processes.executor import SERVICE, Executor, Order
from fleetbed.emulator.wire.messages import Measure, Measured
from fleetbed.models.base import InputSpec
from fleetbed.models.plug_ins import code_files
from fleetbed.models.work import Part, Pass, Work
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import Model, Optimizer
from fleetbed.profiles.files import title_of


class Reference(Struct, frozen=True):
    """A pass through a variant whose time on the host is measured."""

    variant: str
    kind: str  # first, train, forward, parameters
    part: Part
    samples: int
    optimise: bool = False


def references(variant: str, work: Work) -> Iterator[tuple[Reference, int]]:
    """The passes that a task is made of, each with how often it occurs. Its first step is slower than the others."""
    begun = False
    for phase in work.phases:
        if not phase.steps:
            continue
        step = Reference(variant, "train", phase.trains, phase.batch, optimise=True)
        if not begun:
            yield msgspec.structs.replace(step, kind="first"), 1
        if later := phase.steps - (not begun):
            yield step, later
        begun = True
        for extra in phase.each_step:
            yield _reference(variant, extra), phase.steps * extra.times
        if phase.parameter_passes:
            yield Reference(variant, "parameters", "all", 1), phase.steps * phase.parameter_passes
    for extra in work.once:
        yield _reference(variant, extra), extra.times


def _reference(variant: str, extra: Pass) -> Reference:
    return Reference(variant, extra.kind, extra.part, extra.samples)


class References:
    """Looks up passes in the calibration, and measures a missing one at once, with nothing else running."""

    def __init__(
        self,
        calibration: Calibration,
        store: Store,
        executor: Executor,
        model: Model,
        spec: InputSpec,
        optimizer: Optimizer,
        say: Callable[[str], None],
    ) -> None:
        self.calibration = calibration
        self._store = store
        self._executor = executor
        # everything that the time of a pass depends on, apart from the pass itself
        update = f"fused {optimizer.name}"
        code = sorted(code_files([model.family]).values())
        about = msgspec.json.encode([model.family, *code, model.options, spec, update, bool(optimizer.momentum)])
        self._prefix = f"{title_of(model.family)}-{hashlib.blake2b(about, digest_size=6).hexdigest()}"
        self._say = say
        self._measured = 0

    def host_s(self, variant: str, work: Work) -> float:
        """Return the seconds that this work takes on this host."""
        return sum(self.seconds(reference) * count for reference, count in references(variant, work))

    def seconds(self, reference: Reference) -> float:
        optimise = "-optimise" if reference.optimise else ""
        key = f"{self._prefix}/{reference.variant}/{reference.kind}-{reference.part}-{reference.samples}{optimise}"
        if key not in self.calibration.steps:
            with measuring_lock.alone(self._say):
                self.calibration = self._store.add_steps(self.calibration, {})  # another run may have measured it
                if key not in self.calibration.steps:
                    seconds, problem = self._steady(reference)
                    disturbed = {} if problem is None else {key: problem}
                    self.calibration = self._store.add_steps(self.calibration, {key: seconds}, disturbed)
        return self.calibration.steps[key]

    def _steady(self, reference: Reference) -> tuple[float, str | None]:
        """Return the time of a pass, and the disturbance if every measurement of it was disturbed."""
        found: list[float] = []
        problem = None
        while len(found) <= RETRIES:
            measured = self._measure(reference)
            problem = disturbance(measured.spread, measured.other_cores)
            if problem is None:
                return measured.seconds, None
            found.append(measured.seconds)
        return min(found), problem  # other load only ever makes it slower

    def _measure(self, reference: Reference) -> Measured:
        # a separate range of numbers, far from those of evaluations, which count down from -1
        self._measured += 1
        task = -(1 << 40) - self._measured
        header = Measure(task=task, **msgspec.structs.asdict(reference))
        self._executor.submit(Order(header=header, worker=SERVICE))
        outcome = self._executor.wait(task)
        if not isinstance(outcome.answer, Measured):
            raise FleetbedError(f"measuring {reference} on this host failed: {outcome.detail}")
        return outcome.answer
