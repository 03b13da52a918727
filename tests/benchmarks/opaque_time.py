"""How well the device time of opaque code can be predicted: by its CPU seconds, or by its torch operators by class.

    python tests/benchmarks/opaque_time.py [--batch 4]

The truth is the published training steps on a Raspberry Pi 4 that `fleetbed validate` uses. Each of these models trains
a step on one core of this host, and its CPU seconds, multiplied by how much slower the board is (the ratio of the rates
of matrix products), are one prediction. The other is the time of its operators by class, with rates fitted to the other
models. `any factor` multiplies the CPU seconds by the constant that suits these models best: what remains is that one
ratio does not hold for all code. Steps are measured with smaller batches and scaled up, to take a minute or two.

Then it prints what counting costs: the CPU seconds of a call of the Flower app of the tests, counted and not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from fleetbed.models.cost.operations import OperatorCount
from fleetbed.models.cost.points import Point, read_points, shipped_points
from fleetbed.models.cost.rate_fit import errors
from fleetbed.models.cost.timm_step import CLASSES, timm_name
from fleetbed.models.cost.validation import validate_points

# isort: split
import timm

APP = Path(__file__).parent.parent / "flower" / "apps" / "fashion_torch"


def cpu_s(call: Callable[[], object], repetitions: int = 2) -> float:
    """The least CPU seconds of a call, after one that warms up."""
    call()
    found = []
    for _ in range(repetitions):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def matmul_gflops(side: int = 1024) -> float:
    left, right = torch.rand(side, side), torch.rand(side, side)
    return 2 * side**3 / cpu_s(lambda: left @ right, 9) / 1e9


def step_s(point: Point, batch: int) -> float:
    """CPU seconds of a training step on this host, for the batch of the point."""
    model = timm.create_model(timm_name(point.model), num_classes=CLASSES).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.rand(batch, *point.shape), torch.zeros(batch, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return cpu_s(step, 1) * point.batch / batch


def boards(batch: int) -> None:
    points = read_points(shipped_points(), ())
    compared = [row for row in validate_points(points).compared if row.unseen_s is not None]
    gflops = matmul_gflops()
    measured, by_cpu, by_class = [], [], []
    for row in compared:
        device = points.devices[row.point.device]
        seconds = step_s(row.point, batch)
        gc.collect()
        measured.append(row.point.seconds)
        by_cpu.append(seconds * gflops / device.rate_gflops * device.train_scale)
        assert row.unseen_s is not None
        by_class.append(row.unseen_s)
        print(f"{row.point.model:24} {row.point.seconds:7.2f} s  CPU {by_cpu[-1]:7.2f}  by class {by_class[-1]:7.2f}")
    factor = float(np.exp(np.median(np.log(np.array(measured) / np.array(by_cpu)))))
    print(f"\nhost {gflops:.1f} GFLOPS a core, best factor {factor:.2f}\n")
    print("| prediction | points | median error | 90 % below | worst |\n|---|---|---|---|---|")
    for name, found in (
        ("CPU seconds", by_cpu),
        ("CPU seconds, any factor", [factor * value for value in by_cpu]),
        ("operators by class", by_class),
    ):
        error = errors(found, measured)
        print(f"| {name} | {error.points} | {error.median:.0%} | {error.p90:.0%} | {error.worst:.0%} |")


def counting() -> None:
    sys.path.insert(0, str(APP))
    from fashion_torch.task import Net, load_data, train

    loader, _ = load_data(0, 10, 96, 32)
    net = Net()

    def call() -> None:
        train(net, loader, 1, 0.01)

    def counted() -> None:
        with OperatorCount():
            call()

    ratios = [cpu_s(counted) / cpu_s(call) for _ in range(5)]
    print(f"\na call of the app of the tests, counted: {statistics.median(ratios):.2f} times its CPU seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    counting()
    boards(asked.batch)


if __name__ == "__main__":
    main()
