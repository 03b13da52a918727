"""What the benchmarks of a round have in common: the data, the experiment, and plain training without any system.

A hundred clients, ten a round, ResNet10 at 3x32x32, plain SGD, batch 16. The data is noise: only time counts.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

CLIENTS, PER_ROUND, BATCH, CLASSES = 100, 10, 16, 10
TEST_SAMPLES = 20  # fleetbed evaluates before the first round and after the last, the others never
FAMILY, VARIANT, SHAPE = "resnet-stage", "resnet10", (3, 32, 32)
LR, MOMENTUM = 0.01, 0.0

FLEET = """\
title: A hundred boards, with memory to spare
members:
{members}
provenance:
  - figure: members
    kind: assumed
    note: Of a benchmark.
"""

EXPERIMENT = """\
title: Ten of a hundred clients a round
fleet: {fleet}
data:
  name: {data}
  partition: {{kind: contiguous}}
model:
  family: resnet-stage
  variants: [resnet10]
training:
  batch: {batch}
  optimizer: {{name: sgd, lr: {lr}, momentum: {momentum}}}
algorithms: [{{name: fedavg}}]
participation: {{ratio: {ratio}}}
timing: {{source: {source}}}
rounds: {rounds}
evaluation: {{every: 1000000}}
"""


def write_data(path: Path, samples: int, clients: int = CLIENTS) -> None:
    """Noise and random labels, the same number of samples for each client."""
    rng = np.random.default_rng(1)

    def images(count: int) -> np.ndarray:
        return rng.integers(0, 256, (count, *SHAPE[1:], SHAPE[0]), dtype=np.uint8)

    def labels(count: int) -> np.ndarray:
        return np.arange(count) % CLASSES

    train = clients * samples
    np.savez(
        path,
        x_train=images(train),
        y_train=labels(train),
        x_test=images(TEST_SAMPLES),
        y_test=labels(TEST_SAMPLES),
    )


def write_experiment(
    folder: Path,
    *,
    samples: int,
    rounds: int,
    source: str,
    clients: int = CLIENTS,
    per_round: int = PER_ROUND,
    devices: Sequence[str] = ("raspberry-pi-5-8gb",),
) -> Path:
    """A folder of profiles with the fleet, the experiment and its data; gives the experiment's file.

    There are as many clients of each kind of device, or one more.
    """
    data = folder / f"noise-{clients}x{samples}.npz"
    if not data.exists():
        write_data(data, samples, clients)
    fleet = folder / "fleets" / f"{clients}-of-{'-'.join(devices)}.yaml"
    fleet.parent.mkdir(exist_ok=True)
    counts = [len(range(position, clients, len(devices))) for position in range(len(devices))]
    members = [f"  - {{device: {device}, count: {count}}}" for device, count in zip(devices, counts, strict=True)]
    fleet.write_text(FLEET.format(members="\n".join(members)))
    path = folder / f"experiment-{clients}x{samples}-{source}-{rounds}-{'-'.join(devices)}.yaml"
    path.write_text(
        EXPERIMENT.format(
            fleet=fleet.stem,
            data=data,
            batch=BATCH,
            lr=LR,
            momentum=MOMENTUM,
            ratio=per_round / clients,
            source=source,
            rounds=rounds,
        )
    )
    return path


class PlainTraining:
    """A client's training as one would write it by hand: one model, one thread, torch's own fused SGD."""

    def __init__(self, data: Path, samples: int) -> None:
        import torch

        from fleetbed.models.base import InputSpec
        from fleetbed.models.families.lookup import family

        torch.set_num_threads(1)
        torch.manual_seed(1)
        with np.load(data) as arrays:
            self._x, self._y = arrays["x_train"].transpose(0, 3, 1, 2).copy(), arrays["y_train"]
        self._samples = samples
        self.new_model = lambda: family(FAMILY, {}).build(VARIANT, InputSpec(SHAPE, CLASSES)).train()
        self.model = self.new_model()

    def tensors_of(self, number: int) -> tuple[Tensor, Tensor]:
        """A client's samples and labels."""
        import torch

        rows = slice(number * self._samples, (number + 1) * self._samples)
        return self._scaled(rows), torch.from_numpy(self._y[rows])

    def _scaled(self, rows: slice | np.ndarray) -> Tensor:
        import torch

        return torch.from_numpy((self._x[rows].astype(np.float32) - 127.5) / 74.0)

    def client(self, number: int, seed: int) -> None:
        """The client's samples in random order, batch by batch; the model is left as the client would send it."""
        import torch
        from torch.nn import functional as F

        optimizer = torch.optim.SGD(self.model.parameters(), LR, MOMENTUM, fused=True)
        order = np.random.default_rng(seed).permutation(self._samples) + number * self._samples
        for start in range(0, self._samples - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self._scaled(rows)), torch.from_numpy(self._y[rows]))
            loss.backward()
            optimizer.step()
            loss.item()


def bare_rounds(connection: Connection, data: Path, samples: int, clients: int) -> None:
    """One of the bare processes: whenever it is told to, it loads the same weights and trains, client by client."""
    training = PlainTraining(data, samples)
    weights = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.client(0, 0)  # torch compiles its kernels in every process anew
    connection.send(None)
    while (first := connection.recv()) is not None:
        for number in range(first, first + clients):
            training.model.load_state_dict(weights)
            training.client(number, number)
        connection.send(None)


def bare(data: Path, samples: int, rounds: int, processes: int) -> list[float]:
    """Seconds of each round of the same training, its clients split over so many processes and nothing else."""
    context = multiprocessing.get_context("spawn")
    ends, workers = [], []
    for _ in range(processes):
        here, there = context.Pipe()
        worker = context.Process(target=bare_rounds, args=(there, data, samples, PER_ROUND // processes))
        worker.start()
        ends.append(here)
        workers.append(worker)
    for end in ends:
        end.recv()
    seconds = []
    for number in range(rounds):
        start = time.perf_counter()
        for position, end in enumerate(ends):
            end.send((number * PER_ROUND + position * (PER_ROUND // processes)) % CLIENTS)
        for end in ends:
            end.recv()
        seconds.append(time.perf_counter() - start)
    for end, worker in zip(ends, workers, strict=True):
        end.send(None)
        worker.join()
    return seconds


def spread(values: Sequence[float]) -> str:
    """Median and range, for a table."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
