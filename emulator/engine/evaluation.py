"""Evaluation by the experimenter: on the host, off the timeline, and without using the run's randomness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from fleetbed.emulator.method.algorithm import Target
from fleetbed.emulator.method.bundle import Bundle, prefixed
from fleetbed.emulator.processes.executor import SERVICE, Executor, Order
from fleetbed.emulator.records.records import Records, finite
from fleetbed.emulator.records.results import Result, result_of
from fleetbed.emulator.records.tables import EvaluationRow
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import EXTRAS, Evaluate, Evaluated
from fleetbed.profiles.errors import FleetbedError


class Moment(Struct, frozen=True):
    """The moment of an evaluation: after this merge, at the end of this round, at this device time."""

    version: int
    round: int
    device_s: float


class Evaluations:
    """Has models evaluated by the services and records the results.

    The numbers of its orders are negative, because the tasks of clients count up from 0. `on_diverged` is called with a
    sentence and the device time for every loss that is not finite.
    """

    def __init__(
        self, executor: Executor, records: Records, batch: int, on_diverged: Callable[[str, float], None]
    ) -> None:
        self._executor = executor
        self._records = records
        self._batch = batch
        self._next = -1
        self._pending: dict[int, tuple[Target, Moment]] = {}
        self._measured: dict[int, list[EvaluationRow]] = {}  # by version, until all of its targets are measured
        self._on_diverged = on_diverged
        self.latest: Result | None = None  # of the newest version all of whose targets were measured, for observers

    def submit(
        self,
        targets: Sequence[Target],
        kept: Mapping[int, str | None],
        when: Moment,
    ) -> None:
        for target in targets:
            file = kept[target.client] if target.client is not None else None
            header = Evaluate(
                task=self._next,
                variant=target.variant,
                kept=file,
                prefix=target.prefix,
                local_client=target.client if target.local else None,
                batch=self._batch,
                recalibrate=target.recalibrate,
            )
            self._pending[self._next] = replace(target, tensors=None, extras={}), when
            frames = codec.pack(Bundle({**(target.tensors or {}), **prefixed(EXTRAS, target.extras)}))
            self._executor.submit(Order(header=header, worker=SERVICE, frames=frames, start_s=when.device_s))
            self._next -= 1

    def collect(self, *, wait: bool = False, before: int | None = None) -> None:
        """Record the results that have come in; with `wait`, wait for all, or for all `before` this version."""
        for number, (target, when) in sorted(self._pending.items(), reverse=True):
            due = wait and (before is None or when.version < before)
            if not due and number not in self._executor.outcomes:
                continue
            outcome = self._executor.wait(number)
            if not isinstance(outcome.answer, Evaluated):
                raise FleetbedError(f"evaluating {target.name} failed: {outcome.detail}")
            found = outcome.answer
            del self._pending[number]
            row = EvaluationRow(
                version=when.version,
                round=when.round,
                device_s=when.device_s,
                target=target.name,
                variant=target.variant,
                client=None if target.shared else target.client,
                local=int(target.local),
                samples=found.samples,
                accuracy=found.accuracy,
                loss=finite(found.loss),
                f1=found.f1,
                mae=finite(found.mae),
            )
            self.add(row)
            if row.loss is None and row.samples:
                self._on_diverged(f"the loss of {row.target} after round {row.round} is {found.loss}", row.device_s)

    def add(self, row: EvaluationRow) -> None:
        """Record a measurement, and keep the result of its version once all of its targets are measured."""
        self._records.write([row])
        version = row.version
        self._measured.setdefault(version, []).append(row)
        if all(when.version != version for _, when in self._pending.values()):
            result = result_of(self._measured.pop(version))
            if result is not None and (self.latest is None or version >= self.latest.version):
                self.latest = result
