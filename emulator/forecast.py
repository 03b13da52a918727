"""What a run will take, told beforehand: the engine's own loop with the work left out.

Timeline, policy, plans and transfers are the run's own; instead of training, every client sends back what it was sent,
and nothing is merged. So device time is right as far as plans and sizes of messages do not change on the way.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from fleetbed.emulator import host, pacing
from fleetbed.emulator.algorithm import Arrival, Merged
from fleetbed.emulator.bundle import Bundle
from fleetbed.emulator.checkpoint import KEEP
from fleetbed.emulator.engine import Engine
from fleetbed.emulator.evaluation import Evaluations
from fleetbed.emulator.executor import Order, Outcome
from fleetbed.emulator.fleet import Fleet
from fleetbed.emulator.layout import lay_out
from fleetbed.emulator.messages import Evaluated, Train, Trained
from fleetbed.emulator.preparation import Fresh, prepare_fresh
from fleetbed.emulator.progress import first_progress
from fleetbed.emulator.records import Records
from fleetbed.emulator.watch import Watch
from fleetbed.models.cost import forward_flops
from fleetbed.profiles.experiment import RunConfig

#: training reaches about this part of the matrix product's rate on a host core; only forecasts of host time use it
EFFICIENCY = 0.2
ROW_BYTES = 700  # of a task in the records, with its share of the file's overhead


class Forecast(Struct, frozen=True, kw_only=True):
    run: str
    clients: int
    unfit: int
    tasks: int
    device_s: float
    host_s: float | None  # None: this host was never calibrated, see `fleetbed calibrate`
    dilation: float | None
    disk_bytes: int


def forecast(config: RunConfig, *, search: Sequence[Path], watch: Watch) -> Forecast:
    """Lay out, choose and plan as the run would, then go through its timeline without the work."""
    layout = lay_out(config, search)
    with tempfile.TemporaryDirectory(prefix="fleetbed-forecast-") as name:
        folder = Path(name)
        (folder / "partition.json").write_bytes(layout.split.to_json())
        with closing(Fleet(layout, folder, watch.tick)) as fleet:
            prepared = prepare_fresh(layout, fleet, watch)
        if prepared.dilation is not None:
            prepared.dilation.fixed = True  # nothing is measured below
        prepared.method.merge = _unmerged  # type: ignore[method-assign]
        with closing(Records(Path(":memory:"))) as records:
            echo = _Echo()
            engine = Engine(
                layout=layout,
                prepared=prepared,
                executor=echo,
                evaluations=Evaluations(echo, records, config.experiment.evaluation.batch),
                records=records,
                progress=first_progress(layout, prepared),
                checkpoint=lambda _: None,
                tick=watch.tick,
                started_s=time.monotonic(),
            )
            engine.run()
            rows = records.rows("SELECT client, plan_s, flops FROM tasks")
    test_flops = statistics.fmean(
        forward_flops(layout.family, variant, layout.dataset.spec) for variant in prepared.method.context.variants
    ) * len(layout.dataset.y_test)
    return Forecast(
        run=config.name,
        clients=len(prepared.participants),
        unfit=len(layout.specs) - len(prepared.participants),
        tasks=len(rows),
        device_s=engine.progress.timeline.now_s,
        host_s=_host_s(prepared, rows, echo.evaluations * test_flops),
        dilation=None if prepared.dilation is None else prepared.dilation.now,
        disk_bytes=_disk_bytes(prepared, len(rows)),
    )


def _host_s(prepared: Fresh, rows: list[tuple[int, float, float]], evaluated_flops: float) -> float | None:
    """The sum of the work over what the host admits at once; waiting for stragglers in paced runs comes on top."""
    if prepared.calibration is None:
        return None
    rate = EFFICIENCY * prepared.calibration.rate.alone_gflops * 1e9
    cores = host.cores()
    if prepared.dilation is None:
        return (sum(flops for _, _, flops in rows) + evaluated_flops) / rate / cores
    load = sum(plan_s * prepared.dilation.now * prepared.load_of(client) for client, plan_s, _ in rows)
    return load / pacing.capacity(cores) + evaluated_flops / rate


def _disk_bytes(prepared: Fresh, tasks: int) -> int:
    """Two checkpoints and the room of the next one, the models at the end, what clients keep, and the records."""
    state = prepared.state.nbytes()
    sizes = {choice.variant: choice.cost.state_bytes for choice in prepared.choices.values()}
    models = sum(sizes[target.variant] for target in prepared.method.targets(prepared.state))
    return (KEEP + 1) * state + 2 * models + ROW_BYTES * tasks


def _unmerged(state: Bundle, arrivals: Sequence[Arrival], stage: str, version: int) -> Merged:
    del arrivals, stage, version
    return Merged(state=state)


class _Echo:
    """An executor that does nothing: clients send back what they were sent."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.evaluations = 0
        self._orders: dict[int, Order] = {}

    def submit(self, order: Order) -> None:
        self._orders[order.task] = order

    def wait(self, task: int) -> Outcome:
        order = self._orders.pop(task)
        header = order.begun()
        if not isinstance(header, Train):
            self.evaluations += 1
            return Outcome(kind="ok", answer=Evaluated(task=task, samples=0, accuracy=0.0, loss=0.0))
        answer = Trained(
            task=task,
            keep=None,
            metrics={},
            steps=0,
            samples=0,
            seconds=header.pace_total_s,
            cpu_s=0.0,
            throttled_s=None,
            peak_bytes=None,
            anon_bytes=None,
        )
        return Outcome(kind="ok", answer=answer, frames=order.frames)

    def cancel(self, task: int) -> None:
        self._orders.pop(task, None)

    def close(self) -> None:
        self._orders.clear()
