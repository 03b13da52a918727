"""Reference times: what a pass costs on this host, hot and alone. Measured once per host, kept in the calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from fleetbed.emulator import quiet
from fleetbed.emulator.calibration import Calibration, Store
from fleetbed.emulator.executor import SERVICE, Executor, Order
from fleetbed.emulator.messages import Measure, Measured
from fleetbed.emulator.planner import Reference
from fleetbed.models.base import InputSpec
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import Model, Optimizer


class References:
    """Looks a pass up in the calibration; what is not there is measured now, with nothing else running."""

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
        # all that the time of a pass depends on beside the pass itself
        update = f"fused {optimizer.name}"
        about = msgspec.json.encode([model.family, model.options, spec, update, bool(optimizer.momentum)])
        self._prefix = f"{model.family}-{hashlib.blake2b(about, digest_size=6).hexdigest()}"
        self._say = say
        self._measured = 0

    def seconds(self, reference: Reference) -> float:
        optimise = "-optimise" if reference.optimise else ""
        key = f"{self._prefix}/{reference.variant}/{reference.kind}-{reference.part}-{reference.samples}{optimise}"
        if key not in self.calibration.steps:
            with quiet.alone(self._say):
                self.calibration = self._store.add_steps(self.calibration, {})  # another run may have measured it
                if key not in self.calibration.steps:
                    self.calibration = self._store.add_steps(self.calibration, {key: self._measure(reference)})
        return self.calibration.steps[key]

    def _measure(self, reference: Reference) -> float:
        # numbers of their own, far from those of evaluations, which count down from -1
        self._measured += 1
        task = -(1 << 40) - self._measured
        header = Measure(task=task, **msgspec.structs.asdict(reference))
        self._executor.submit(Order(header=header, worker=SERVICE))
        outcome = self._executor.wait(task)
        if not isinstance(outcome.answer, Measured):
            raise FleetbedError(f"measuring {reference} on this host failed: {outcome.detail}")
        return outcome.answer.seconds
