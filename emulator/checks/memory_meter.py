"""Measures the peak memory of a client. Run as a module with the address of a socket, it reads one case per line.

For each line a zygote forks a worker into a memory group, which carries out one task. Zygote, worker and method are
those of a run; the data is generated for the case.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from fleetbed.emulator.data import Dataset, Split
from fleetbed.emulator.data.store import Meta
from fleetbed.emulator.limits import Group, LimitPlan, best_limits
from fleetbed.emulator.machine.parent import die_with
from fleetbed.emulator.method.algorithm import Client, Context
from fleetbed.emulator.method.context import PublicPool
from fleetbed.emulator.processes.forking import keep_what_steps_free, ready_to_fork, run_in_fork, warm
from fleetbed.emulator.processes.task_runner import TaskRunner
from fleetbed.emulator.processes.worker import serve
from fleetbed.emulator.wire.messages import Enrolment
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import AlgorithmChoice, Optimizer, Training

CLIENTS = 3  # a client may be sent something of others
PUBLIC_SAMPLES = 64
#: parameters under which the heaviest task comes soon and the public samples suffice
PARAMS: dict[str, dict[str, int]] = {
    "fedselect": {"every": 1},
    "fedmd": {"public": PUBLIC_SAMPLES},
    "fedet": {"public": PUBLIC_SAMPLES},
    "fedhenn": {"rad": PUBLIC_SAMPLES},
    "fedhenn_homo": {"rad": PUBLIC_SAMPLES},
}
STEPS = 4  # the optimiser's state exists from the second step on, and by then the allocator has settled


class Case(Struct, frozen=True):
    """A variant, as a method trains it."""

    family: str
    variant: str
    spec: InputSpec
    batch: int
    optimizer: Optimizer
    method: str = "fedavg"

    @property
    def clients(self) -> tuple[Client, ...]:
        """The measured client, and others like it."""
        return tuple(Client(number, self.variant, STEPS * self.batch) for number in range(CLIENTS))

    @property
    def algorithm(self) -> AlgorithmChoice:
        return AlgorithmChoice(name=self.method, params=PARAMS.get(self.method, {}))


def workplace(case: Case, folder: Path) -> TaskRunner:
    """A run whose clients have the same samples, and keep their files in this folder."""
    rows = np.arange(case.clients[0].samples)
    runner = TaskRunner(
        folder=folder,
        dataset=_dataset(case.spec, len(rows)),
        split=Split(train=(rows,) * CLIENTS, test=(rows,) * CLIENTS, public=rows[:0]),
        context=Context(
            seed=0,
            spec=case.spec,
            family=family(case.family),
            clients=(),
            training=Training(batch=case.batch, optimizer=case.optimizer),
            rounds=2,
            most_clients=CLIENTS,
            public=public_samples(case.spec),
        ),
        algorithm=case.algorithm,
    )
    return runner.enrol(Enrolment(clients=case.clients, keep_heap=False))


def public_samples(spec: InputSpec) -> PublicPool:
    return PublicPool(_dataset(spec, PUBLIC_SAMPLES), np.arange(PUBLIC_SAMPLES))


def _dataset(spec: InputSpec, samples: int) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(spec.vocabulary or 256, size=(samples, *spec.shape)).astype(
        np.uint16 if spec.vocabulary else np.uint8
    )
    y = rng.integers(spec.classes, size=samples)
    meta = Meta(
        source="made up",
        key="",
        kind="values" if spec.kind == "values" else "images",
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
    address, shared, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    die_with(os.getppid())
    limits = best_limits("memory-check")
    print(limits.backend, flush=True)
    try:
        for number, line in enumerate(sys.stdin):
            group = limits.create(LimitPlan(f"case-{number}"))
            run_in_fork(partial(_zygote, msgspec.json.decode(line, type=Case), folder, address, shared, group))
            group.remove()
    finally:
        limits.close()


def _zygote(case: Case, folder: Path, address: str, shared: int, group: Group) -> None:
    """Start the worker from a fresh zygote, as in a run, so that the heap of earlier cases does not matter."""
    here = workplace(case, folder)
    warm(here.warm_up)
    keep_what_steps_free()
    ready_to_fork()

    def client() -> None:
        group.join()
        serve(here, "case", address, shared, group, one_task=True)

    run_in_fork(client)


if __name__ == "__main__":
    main()
