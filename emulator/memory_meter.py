"""Measuring what a client's memory grows to: `python -m fleetbed.emulator.memory_meter ADDRESS`, one case per line.

A process as warm as the zygote forks a worker per case into a memory group of its own, after a throw-away child has
touched what all share. The worker is that of a run and runs a method of a run, on data made up for the case.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from fleetbed.emulator.algorithm import Client, Context
from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.data import Dataset, Split
from fleetbed.emulator.data.store import Meta
from fleetbed.emulator.limits import Group, LimitPlan, best_limits
from fleetbed.emulator.worker import serve
from fleetbed.emulator.workplace import Workplace
from fleetbed.emulator.zygote import PR_SET_PDEATHSIG
from fleetbed.models.base import InputSpec
from fleetbed.models.families import family
from fleetbed.profiles.experiment import AlgorithmChoice, Optimizer, Training

STEPS = 4  # the optimiser's state is there from the second on, and the allocator has settled


class Case(Struct, frozen=True):
    """A variant that is trained as plain averaging of weights does it."""

    family: str
    variant: str
    spec: InputSpec
    batch: int
    optimizer: Optimizer


def workplace(case: Case) -> Workplace:
    samples = STEPS * case.batch
    context = Context(
        seed=0,
        spec=case.spec,
        family=family(case.family),
        clients=(Client(0, case.variant, samples),),
        training=Training(batch=case.batch, optimizer=case.optimizer),
        rounds=1,
    )
    rows = np.arange(samples)
    return Workplace(
        folder=Path(),
        dataset=_dataset(case.spec, samples),
        split=Split(train=(rows,), test=(rows,), public=rows[:0]),
        context=context,
        method=load_method(AlgorithmChoice(name="fedavg"), context),
    )


def _dataset(spec: InputSpec, samples: int) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(spec.vocabulary or 256, size=(samples, *spec.shape)).astype(
        np.uint16 if spec.vocabulary else np.uint8
    )
    y = rng.integers(spec.classes, size=samples)
    meta = Meta(
        source="made up",
        key="",
        classes=spec.classes,
        shape=spec.shape,
        vocabulary=spec.vocabulary,
        mean=[],
        std=[],
        normalise=False,
        augment=(),
        files={},
    )
    return Dataset(meta, {"train": x, "test": x}, {"train": y, "test": y})


def main() -> None:
    address = sys.argv[1]
    _die_with_parent()
    limits = best_limits("memory-check")
    print(limits.backend, flush=True)
    try:
        for number, line in enumerate(sys.stdin):
            here = workplace(msgspec.json.decode(line, type=Case))
            gc.collect()
            gc.freeze()
            _fork(here.warm_up)
            group = limits.create(LimitPlan(f"case-{number}"))
            _fork(_client, here, address, group, f"case-{number}")
            group.remove()
    finally:
        limits.close()


def _client(here: Workplace, address: str, group: Group, identity: str) -> None:
    group.join()
    serve(here, identity, address, group, one_task=True)


def _fork(work: Callable[..., None], *given: object) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _die_with_parent()
            work(*given)
            status = 0
        except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's stack
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"a measured process ended with exit code {os.waitstatus_to_exitcode(status)}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
