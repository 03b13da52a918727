"""How well the device time of opaque code is predicted: by its CPU seconds, and as `metered` does it.

    python tests/benchmarks/opaque_time.py [--only counting]

The truth is the published training steps on a Raspberry Pi 4 that `fleetbed validate` uses. Each of these models trains
a step on one core of this host, and its CPU seconds, multiplied by how much slower the board is (the ratio of the rates
of matrix products), are one prediction. `any factor` multiplies them by the constant that suits these models best: what
remains is that one ratio does not hold for all code. `operators and the rest` is what `metered` does: the step is
counted while it runs, its operators are charged by class, and the CPU seconds outside of them as above. The rates are
fitted to the other models. Steps are measured with batches of 1 and 3, to take some minutes, and extended to the
published one along a straight line; Python between the operators takes as long for any batch.

Before that it prints what counting costs in the calls of the Flower app of the tests, in CPU seconds, and how much the
device seconds of one call vary from time to time on a Raspberry Pi 4: by CPU seconds; by CPU seconds multiplied by what
the first, counted call took on the device over the CPU seconds of the next, so that only one is counted; and as
`metered` does.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.nn import functional as F

from fleetbed.models.cost.opaque import Counted, OpaqueCount, entry_s
from fleetbed.models.cost.operations import compute_seconds
from fleetbed.models.cost.points import Point, read_points, shipped_points
from fleetbed.models.cost.rate_fit import errors, fit_rates
from fleetbed.models.cost.timm_step import CLASSES, step_work, timm_name
from fleetbed.models.cost.validation import validate_points
from fleetbed.profiles.rates import rates_of, reference_device
from fleetbed.profiles.types import Device

# isort: split
import timm

BATCHES = (1, 3)
APP = Path(__file__).parent.parent / "flower" / "apps" / "fashion_torch"


def cpu_s(call: Callable[[], object], repetitions: int = 2) -> float:
    """The least CPU seconds of a call, after one that warms up."""
    call()
    return min(taken(call) for _ in range(repetitions))


def taken(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def counted(call: Callable[[], object]) -> tuple[float, Counted]:
    """CPU seconds of a call that is counted, and its count."""
    count = OpaqueCount()
    with count:
        seconds = taken(call)
    return seconds, count.counted()


def metered_s(seconds: float, found: Counted, device: Device, gflops: float) -> float:
    """Device seconds as `flower/metered.py` has them."""
    outside = max(0.0, seconds - found.cpu_s)
    return compute_seconds(device, found.operations) + outside * slowdown(device, gflops)


def slowdown(device: Device, gflops: float) -> float:
    return gflops / device.cpu.fp32_gflops * device.train_scale


def matmul_gflops(side: int = 1024) -> float:
    left, right = torch.rand(side, side), torch.rand(side, side)
    return 2 * side**3 / cpu_s(lambda: left @ right, 9) / 1e9


def steps_of(point: Point, batches: tuple[int, ...]) -> list[tuple[float, float, Counted]]:
    """A training step with each batch: its CPU seconds, those of another one that is counted, and its count."""
    model = timm.create_model(timm_name(point.model), num_classes=CLASSES).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def measured(batch: int) -> tuple[float, float, Counted]:
        x, y = torch.rand(batch, *point.shape), torch.zeros(batch, dtype=torch.long)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        found = counted(step)  # it also warms up
        return (taken(step), *found)

    return [measured(batch) for batch in batches]


def boards() -> None:
    points = read_points(shipped_points(), ())
    compared = [row.point for row in validate_points(points).compared]
    works = [step_work(point.model, point.shape, point.batch).work for point in compared]
    gflops = matmul_gflops()
    measured = [point.seconds for point in compared]
    by_cpu, by_class = [], []
    for point in compared:
        device = points.devices[point.device]
        others = [number for number in range(len(compared)) if compared[number].model != point.model]
        published = [measured[number] / device.train_scale for number in others]
        rates = fit_rates([works[number] for number in others], published, rates_of(device).call_us)
        low, high = steps_of(point, BATCHES)
        gc.collect()
        more = (point.batch - BATCHES[1]) / (BATCHES[1] - BATCHES[0])
        by_cpu.append((high[0] + more * (high[0] - low[0])) * slowdown(device, gflops))
        work = high[2].operations + more * (high[2].operations - low[2].operations)
        found = msgspec.structs.replace(high[2], operations=work)
        by_class.append(metered_s(high[1], found, msgspec.structs.replace(device, rates=rates), gflops))
        told = f"CPU {by_cpu[-1]:7.2f}  operators and the rest {by_class[-1]:7.2f}"
        print(f"{point.model:24} {point.seconds:7.2f} s  {told}", flush=True)
    factor = float(np.exp(np.median(np.log(np.array(measured) / np.array(by_cpu)))))
    print(f"\nhost {gflops:.1f} GFLOPS a core, best factor {factor:.2f}\n")
    print("| prediction | points | median error | 90 % below | worst |\n|---|---|---|---|---|")
    for name, predicted in (
        ("CPU seconds", by_cpu),
        ("CPU seconds, any factor", [factor * value for value in by_cpu]),
        ("operators and the rest", by_class),
    ):
        error = errors(predicted, measured)
        print(f"| {name} | {error.points} | {error.median:.0%} | {error.p90:.0%} | {error.worst:.0%} |")


def counting(calls: int = 40) -> None:
    """Print what counting costs, and how much the device seconds of equal calls differ."""
    sys.path.insert(0, str(APP))
    from fashion_torch.task import Net, load_data, test, train

    loaders = load_data(0, 10, 96, 32)
    net, device, gflops = Net(), reference_device(), matmul_gflops()
    train(net, loaders[0], 1, 0.01)
    entry_s()
    print("| call | counted, CPU s | 5 to 95 %: CPU s x slowdown | counted once | every call counted |")
    print("|---|---|---|---|---|")
    for name, call in (
        ("train", lambda: train(net, loaders[0], 1, 0.01)),
        ("evaluate", lambda: test(net, loaders[1])),
    ):
        first_s, first = counted(call)
        pairs = [(taken(call), *counted(call)) for _ in range(calls)]
        plain = [pair[0] for pair in pairs]
        each = [metered_s(seconds, found, device, gflops) for _, seconds, found in pairs]
        # what the first call took without its counting is not known: the next call stands for it
        once = metered_s(first_s, first, device, gflops) / plain[0]
        ways = [[value * slowdown(device, gflops) for value in plain], [value * once for value in plain], each]
        cost = statistics.median(seconds / value for value, seconds, _ in pairs)
        print(f"| {name} | {cost:.2f} times | {' | '.join(spread(way) for way in ways)} |", flush=True)


def spread(values: list[float]) -> str:
    low, high = np.quantile(values, [0.05, 0.95])
    middle = statistics.median(values)
    return f"{1e3 * middle:.0f} ms ({low / middle - 1:+.0%} to {high / middle - 1:+.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["counting"], help="what counting costs, without the published steps")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    counting()
    if asked.only is None:
        boards()


if __name__ == "__main__":
    main()
