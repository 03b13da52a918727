"""The clients' optimisers against torch's own, and without the import that those cost."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch
from torch import nn

from fleetbed.emulator.method.optimizers import SGD, Adam, Stepper, make_optimizer
from fleetbed.profiles.experiment import Optimizer


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def train(net: nn.Sequential, optimizer: Stepper | torch.optim.Optimizer) -> None:
    """Six steps; the first layer takes part from the third on only, so its state begins later."""
    rng = torch.Generator().manual_seed(1)
    for number in range(6):
        x = torch.randn(8, 5, generator=rng)
        optimizer.zero_grad()
        hidden = net[0](x) if number >= 2 else torch.randn(8, 4, generator=rng)
        net[1](hidden).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_steps_as_torch_does(momentum: float, weight_decay: float) -> None:
    ours, theirs = two_layers(), two_layers()
    train(ours, SGD(ours.parameters(), 0.1, momentum, weight_decay))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay))
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adam_steps_as_torch_does(weight_decay: float) -> None:
    ours, theirs = two_layers(), two_layers()
    train(ours, Adam(ours.parameters(), 0.1, weight_decay))
    train(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1, weight_decay=weight_decay))
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_biases_may_be_spared_from_weight_decay(name: str) -> None:
    ours, theirs, plain = two_layers(), two_layers(), two_layers()
    choice = Optimizer(name=name, lr=0.1, momentum=0.5, weight_decay=0.1, decay_biases=False)  # type: ignore[arg-type]
    train(ours, make_optimizer(choice, ours))  # type: ignore[arg-type]
    groups = [
        {"params": [layer.weight for layer in theirs], "weight_decay": 0.1},
        {"params": [layer.bias for layer in theirs], "weight_decay": 0.0},
    ]
    kind = torch.optim.Adam if name == "adam" else torch.optim.SGD
    train(theirs, kind(groups, lr=0.1, **({} if name == "adam" else {"momentum": 0.5})))
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their)
    train(plain, make_optimizer(msgspec.structs.replace(choice, decay_biases=True), plain))  # type: ignore[arg-type]
    assert not torch.allclose(plain[1].bias, ours[1].bias)


def test_a_step_does_not_bring_the_compiler_in() -> None:
    code = """
import sys, torch
from fleetbed.emulator.method.optimizers import SGD, Adam
net = torch.nn.Linear(2, 2)
for optimizer in (SGD(net.parameters(), 0.1, 0.9, 0.0), Adam(net.parameters(), 0.1, 0.0)):
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
