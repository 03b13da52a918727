"""The operators of code that declares no work: those that are counted, those that are left out, and their seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fleetbed.models.cost.opaque import OpaqueCount
from fleetbed.models.cost.operations import Operations
from fleetbed.models.cost.timm_step import count_step


def counted(run: Callable[[], object]) -> OpaqueCount:
    count = OpaqueCount()
    with count:
        run()
    return count


def test_a_step_on_real_tensors_counts_as_much_as_on_tensors_without_data() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8), nn.Flatten(), nn.Linear(288, 4)
    )
    x, y = torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    found = counted(lambda: F.cross_entropy(net(x), y).backward()).total
    declared = count_step(net, (3, 8, 8), 2).work
    for name in ("conv_1x1_flop", "conv_flop", "depthwise_flop", "matmul_flop"):
        assert getattr(found, name) == getattr(declared, name)
    assert 0 < found.memory_bytes < declared.memory_bytes  # which has the optimiser too


def test_plain_products_by_hand() -> None:
    a, b, c = torch.rand(3, 5), torch.rand(5, 7), torch.rand(7)
    assert counted(lambda: a @ b).total == Operations(matmul_flop=2 * 3 * 5 * 7, calls=1)
    assert counted(lambda: torch.addmm(c, a, b)).total == Operations(matmul_flop=2 * 3 * 5 * 7, calls=1)
    left, right = torch.rand(4, 3, 5), torch.rand(4, 5, 7)
    assert counted(lambda: left @ right).total == Operations(matmul_flop=2 * 4 * 3 * 5 * 7, calls=1)


def sparse_step() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def on_meta() -> None:
    with torch.device("meta"):
        nn.Linear(400, 400)(torch.empty(2, 400))


def of_functions() -> None:
    torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sum()), (None, 0))(torch.ones(3), torch.ones(5, 3))


def of_workers() -> None:
    assert len(list(DataLoader(TensorDataset(torch.ones(4, 3)), 2, num_workers=1))) == 2


@pytest.mark.parametrize("run", [sparse_step, on_meta, of_functions, of_workers])
def test_code_with_unusual_tensors_runs_as_without_the_count(run: Callable[[], object]) -> None:
    assert counted(run).total.flop == 0


def test_an_error_of_the_code_comes_through() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        counted(lambda: torch.ones(2, 3) @ torch.ones(2, 3))


def cpu_s(run: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds in all, and outside of operators that were counted."""
    start = time.process_time()
    count = counted(run)
    took_s = time.process_time() - start
    return took_s, took_s - count.counted().cpu_s


def test_seconds_in_operators_that_are_counted_are_told_from_all_others() -> None:
    x, waves = torch.rand(600, 600), torch.rand(300, 20_000)
    rows = np.random.default_rng(0).random((200, 20_000))
    in_all_s, outside_s = cpu_s(lambda: [x @ x for _ in range(20)])
    assert outside_s < 0.1 * in_all_s
    # numpy, and an operator that is in no class
    for run in (lambda: np.sort(rows), lambda: torch.fft.rfft(waves)):
        in_all_s, outside_s = cpu_s(run)
        assert outside_s > 0.7 * in_all_s > 0


def test_many_small_calls_do_not_count_their_own_counting() -> None:
    x = torch.zeros(4)

    def small() -> None:
        for _ in range(3000):
            x.view(2, 2)

    start = time.process_time()
    small()
    plain_s = time.process_time() - start
    _, outside_s = cpu_s(small)
    assert outside_s < 2 * plain_s  # without the correction it is several times as much
