"""Measures the rate of each class of operation: `python -m fleetbed.emulator.checks.class_timing THREADS SECONDS`.

The operators of a probe network that has all classes are timed inside its training steps. Timed alone they would be too
fast, because a step uses new memory, which the kernel has to map, and cold caches. Two other networks train as well, to
check the rates against. All of them take turns, so that other load affects them equally; the lower quartile of the
times counts. It runs as a separate process, whose thread variables were set before it started.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetbed.emulator.checks.class_rates import ClassTimes, TrainingStep
from fleetbed.emulator.method.optimizers import SGD
from fleetbed.models.cost.operations import Operations, OperatorCount, seconds_of
from fleetbed.models.cost.timm_step import StepWork, count_step
from fleetbed.profiles.types import Rates

# isort: split
import timm  # after timm_step, which makes torchvision importable

BATCH, SHAPE, CLASSES = 2, (3, 192, 192), 100
STEPS = ("resnet18", "mobilenetv2_100")  # a ResNet and a depthwise net
MIN_TURNS = 5
CALLS = 50  # of a tiny operator
#: the least part of a class's time that counts as arithmetic, however long its memory traffic should take
LEAST_PART = 0.2


class Probe(nn.Module):
    """Blocks of a ResNet, of a depthwise net and of a transformer, side by side at each of four sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 4, 1, bias=False)
        widths = (32, 64, 128, 256)
        self.dense = nn.ModuleList(_dense(c) for c in widths)
        self.depthwise = nn.ModuleList(_inverted(c) for c in widths)
        self.down = nn.ModuleList(nn.Conv2d(c, 2 * c, 1, 2, bias=False) for c in widths)
        self.mix = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for dense, depthwise, down in zip(self.dense, self.depthwise, self.down, strict=True):
            x = F.relu_(x + dense(x))
            x = x + depthwise(x)
            x = down(x)
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.mix(tokens)
        out: Tensor = self.head(tokens.mean(1))
        return out


def _dense(channels: int) -> nn.Module:
    convs = [nn.Conv2d(channels, channels, 3, 1, 1, bias=False) for _ in range(2)]
    return nn.Sequential(convs[0], nn.BatchNorm2d(channels), nn.ReLU(inplace=True), convs[1], nn.BatchNorm2d(channels))


def _inverted(channels: int) -> nn.Module:
    inner = 4 * channels
    return nn.Sequential(
        nn.Conv2d(channels, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU6(inplace=True),
        nn.Conv2d(inner, inner, 3, 1, 1, groups=inner, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU6(inplace=True),
        nn.Conv2d(inner, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
    )


class TimedCount(OperatorCount):
    """Counts the work of each class, and the seconds that its operators took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.work: dict[str, Operations] = {}
        self._clock = clock
        self._took_s = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.total
        out = super().__torch_dispatch__(func, types, args, kwargs)
        work = self.total - before
        if work.calls:
            name = next((name for name in _ARITHMETIC if getattr(work, name)), "memory_bytes")
            self.seconds[name] = self.seconds.get(name, 0.0) + self._took_s
            self.work[name] = self.work.get(name, Operations()) + work
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = self._clock()
        out = super().run(func, args, kwargs)
        self._took_s = self._clock() - start
        return out


_ARITHMETIC = ("conv_1x1_flop", "conv_flop", "depthwise_flop", "matmul_flop")


def measure_rates(seconds: float) -> ClassTimes:
    """Measure for about this many seconds, but at least MIN_TURNS turns."""
    torch.manual_seed(0)
    probe = _step(Probe())
    nets = {name: timm.create_model(name, num_classes=CLASSES) for name in STEPS}
    works = {name: _work(net) for name, net in nets.items()}
    steps = {name: _step(net) for name, net in nets.items()}
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    calls: list[float] = []
    inside: list[float] = []
    counts: list[TimedCount] = []
    end = time.perf_counter() + seconds
    for body in (probe, *steps.values()):
        body()  # the first is slower
    while time.perf_counter() < end or len(counts) < MIN_TURNS:
        calls.append(_timed(_tiny) / CALLS)
        inside.append(_counted(_tiny).seconds["memory_bytes"] / CALLS)
        counts.append(_counted(probe))
        for name, body in steps.items():
            times[name].append(_timed(body))
    rates = _rates(counts, _lower_quartile(inside), _lower_quartile(calls))
    return ClassTimes(
        rates=rates,
        steps=[TrainingStep(name, _lower_quartile(times[name]), seconds_of(rates, works[name].work)) for name in STEPS],
        turns=len(counts),
        spread=max(_spread(samples) for samples in times.values()),
    )


def _rates(counts: list[TimedCount], inside_s: float, call_s: float) -> Rates:
    """Divide work by time, class by class.

    The time inside an operator that each call takes, and that of the bytes that a convolution moves, is subtracted
    first.
    """
    took = {name: _lower_quartile([count.seconds[name] for count in counts]) for name in counts[0].seconds}
    work = counts[0].work
    memory_s = _rest(took["memory_bytes"], work["memory_bytes"].calls * inside_s)
    memory_gb_s = work["memory_bytes"].memory_bytes / 1e9 / memory_s
    gflops = {
        name: work[name].flop
        / 1e9
        / _rest(took[name], work[name].memory_bytes / 1e9 / memory_gb_s + work[name].calls * inside_s)
        for name in _ARITHMETIC
    }
    return Rates(
        conv_1x1_gflops=_rounded(gflops["conv_1x1_flop"]),
        conv_gflops=_rounded(gflops["conv_flop"]),
        depthwise_gflops=_rounded(gflops["depthwise_flop"]),
        matmul_gflops=_rounded(gflops["matmul_flop"]),
        memory_gb_s=_rounded(memory_gb_s),
        call_us=_rounded(1e6 * call_s),
    )


def _rest(whole_s: float, beside_s: float) -> float:
    return max(whole_s - beside_s, LEAST_PART * whole_s)


def _counted(body: Callable[[], object]) -> TimedCount:
    count = TimedCount(_clock())
    with count:
        body()
    return count


def _step(net: nn.Module) -> Callable[[], object]:
    net.train()
    optimizer = SGD(net.parameters(), lr=0.01, momentum=0.0, weight_decay=0.0)
    x, y = torch.rand(BATCH, *SHAPE), torch.zeros(BATCH, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def _work(net: nn.Module) -> StepWork:
    """Count the work on a copy, because counting removes the data of the parameters."""
    return count_step(copy.deepcopy(net), SHAPE, BATCH)


def _tiny() -> None:
    """Run operators, forward and backward, that have next to nothing to do."""
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(CALLS // 2):
        y = y * x
    y.backward()


def _clock() -> Callable[[], float]:
    """Return the clock to use: the CPU time of a single thread, which excludes other processes, or wall time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _timed(body: Callable[[], object]) -> float:
    clock = _clock()
    start = clock()
    body()
    return clock() - start


def _lower_quartile(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=4)[0]


def _spread(samples: list[float]) -> float:
    deciles = statistics.quantiles(samples, n=10)
    return (deciles[-1] - deciles[0]) / statistics.median(samples)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    print(msgspec.json.encode(measure_rates(float(sys.argv[2]))).decode())


if __name__ == "__main__":
    main()
