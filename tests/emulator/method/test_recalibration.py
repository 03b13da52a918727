"""Batch norm's statistics, estimated anew on the training data of all clients."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetbed.emulator.method.local_training import recalibrate
from fleetbed.emulator.method.targets import all_inputs
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family


class Plain(nn.Sequential):
    """With one exit, as a model has it."""

    def exits(self, x: Tensor) -> list[Tensor]:
        return [self(x)]


def two_norms() -> Plain:
    torch.manual_seed(3)
    net = Plain(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3))
    for norm in (net[1], net[5]):
        norm.running_mean.fill_(7.0)
        norm.running_var.fill_(9.0)
        norm.num_batches_tracked.fill_(11)
        nn.init.uniform_(norm.weight)
    return net


def normalised(x: Tensor, norm: Any) -> Tensor:
    """By the batch's own statistics."""
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias


def test_they_are_the_means_over_the_batches() -> None:
    net = two_norms()
    batches = [torch.randn(size, 5) * size for size in (4, 6, 3)]
    recalibrate(net, batches)
    with torch.no_grad():
        first = [net[0](x) for x in batches]
        second = [net[4](normalised(h, net[1]).relu()) for h in first]
    for norm, seen in ((net[1], first), (net[5], second)):
        torch.testing.assert_close(norm.running_mean, torch.stack([h.mean(0) for h in seen]).mean(0))
        torch.testing.assert_close(norm.running_var, torch.stack([h.var(0) for h in seen]).mean(0))


@pytest.mark.parametrize("training", [True, False])
def test_nothing_else_changes(training: bool) -> None:
    net = two_norms().train(training)
    before = {name: p.clone() for name, p in net.named_parameters()}
    recalibrate(net, [torch.randn(6, 5)])
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert all(module.training == training for module in net.modules())
    assert [norm.momentum for norm in (net[1], net[5])] == [0.1, 0.1]
    assert all(p.grad is None for p in net.parameters())


def test_the_tensors_that_the_model_was_loaded_with_stay() -> None:
    """They may be the server's own, or the initial ones that every client begins with."""
    nets, spec = family("resnet-width", {"base_width": 4}), InputSpec((1, 8, 8), 3)
    tensors = dict(nets.build("resnet26-half", spec).state_dict())
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    model = nets.load("resnet26-half", spec, tensors).eval()
    recalibrate(model, [torch.randn(4, 1, 8, 8)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert not torch.equal(model.state_dict()["bn1.running_mean"], before["bn1.running_mean"])


def test_a_model_without_batch_norm_sees_no_data() -> None:
    def never() -> Any:
        raise AssertionError
        yield

    recalibrate(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), never())


class Numbered:
    def batch(self, split: str, rows: np.ndarray, rng: object) -> tuple[Tensor, Tensor]:
        assert (split, rng) == ("train", None)
        return torch.from_numpy(rows), torch.zeros(len(rows))


@pytest.mark.parametrize(
    ("counts", "batch", "sizes"),
    [((3, 5), 8, [8]), ((3, 5), 7, [4, 4]), ((3, 2), 2, [3, 2]), ((4, 3), 1, [3, 2, 2]), ((2, 0), 64, [2])],
)
def test_all_clients_data_is_seen_once_and_never_a_single_sample(
    counts: tuple[int, ...], batch: int, sizes: list[int]
) -> None:
    edges = np.cumsum([0, *counts])
    split = SimpleNamespace(train=[np.arange(a, b) for a, b in pairwise(edges)])
    slices = [x.tolist() for x in all_inputs(Numbered(), split, batch)]  # type: ignore[arg-type]
    assert [len(part) for part in slices] == sizes
    assert [row for part in slices for row in part] == list(range(sum(counts)))


def test_a_lone_sample_is_shown_twice() -> None:
    split = SimpleNamespace(train=[np.array([5]), np.array([], dtype=int)])
    assert [x.tolist() for x in all_inputs(Numbered(), split, 4)] == [[5, 5]]  # type: ignore[arg-type]
