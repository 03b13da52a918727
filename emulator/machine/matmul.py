"""The kernels by which hosts and boards are rated: `python -m fleetbed.emulator.machine.matmul`.

Runs as a separate process, whose thread variables are set before it starts. It warms up, prints `ready`, waits
for a line (so that several can start together), measures, and prints its samples as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

SIZE = 768  # large enough to be at the full rate, small enough for the second-level cache
COPY_BYTES = 64 * 2**20
SAMPLE_S = 0.02
WARM_UP_S = 0.5


def matmul_gflops(seconds: float) -> list[float]:
    """Samples of the FP32 matrix product's rate, hot."""
    left, right, out = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE), torch.empty(SIZE, SIZE)
    return _rates(lambda: torch.mm(left, right, out=out), 2 * SIZE**3 / 1e9, seconds)


def copy_gb_s(seconds: float) -> list[float]:
    """Samples of the rate at which memory is copied, each byte counted once."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.empty(COPY_BYTES, dtype=torch.uint8)
    return _rates(lambda: target.copy_(source), COPY_BYTES / 1e9, seconds)


def _rates(kernel: Callable[[], object], amount: float, seconds: float) -> list[float]:
    once = _timed(kernel, 1)
    calls = max(1, round(SAMPLE_S / once))
    end = time.perf_counter() + seconds
    samples: list[float] = []
    while not samples or time.perf_counter() < end:
        samples.append(amount * calls / _timed(kernel, calls))
    return samples


def _timed(kernel: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        kernel()
    return time.perf_counter() - start


def main() -> None:
    name, threads, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    measure = {"matmul": matmul_gflops, "copy": copy_gb_s}[name]
    torch.set_num_threads(threads)
    measure(WARM_UP_S)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(measure(seconds)))


if __name__ == "__main__":
    main()
