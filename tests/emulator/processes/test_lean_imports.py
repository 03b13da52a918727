"""Broker, zygote and worker import what they need and nothing that takes seconds or megabytes beside it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch._dynamo", "torch._inductor", "sympy", "scipy", "matplotlib", "torchvision", "timm", "fvcore", "pandas"}
BROKER = """
import fleetbed.live, fleetbed.emulator.run.study
from fleetbed.models.families.lookup import family
family("resnet-stage")
"""
WORKER = """
import fleetbed.emulator.processes.zygote
import torch
from fleetbed.emulator.method.optimizers import make_optimizer
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.experiment import Optimizer
torch.set_num_threads(1)
model = family("resnet-stage", {"base_width": 2}).build("resnet10", InputSpec((1, 8, 8), 3)).train()
optimizer = make_optimizer(Optimizer(), model)
model(torch.zeros(2, 1, 8, 8)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    "code", ["import fleetbed.emulator.processes.early_start, fleetbed.emulator.machine.capacity", BROKER, WORKER]
)
def test_nothing_heavy_is_imported(code: str) -> None:
    program = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert not HEAVY & loaded
    assert ("torch" in loaded) == (code in (BROKER, WORKER)), "what starts the zygote must not wait for torch"
