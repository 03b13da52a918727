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
#: the clients of methods that look at features, each with a message that needs no server to be made
CLIENTS = """
from dataclasses import replace
from pathlib import Path
from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.algorithms.fedgen import Generator, tensors_of
from fleetbed.emulator.checks.memory_meter import Case, workplace
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire.messages import Train
from fleetbed.models.base import InputSpec
from fleetbed.profiles.experiment import AlgorithmChoice, Optimizer
here = workplace(Case("fedhenn-cnn", "conv2-fc3", InputSpec((3, 32, 32), 3), 2, Optimizer()), Path())
weights = here.context.initial("conv2-fc3")
features = weights["fc.weight"].shape[1]
made = tensors_of(Generator(64, 3, 512, features))
for name, message in {"fedproto": {}, "fedtgp": {}, "fedgkt": {}, "fedgen": {**weights, **made}}.items():
    runner = replace(here, method=load_method(AlgorithmChoice(name=name), here.context))
    runner.train(Train(task=0, client=0, variant="conv2-fc3", stage="train", kept=None), Bundle(message), None)
"""


@pytest.mark.parametrize(
    "code",
    ["import fleetbed.emulator.processes.early_start, fleetbed.emulator.machine.capacity", BROKER, WORKER, CLIENTS],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    program = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert not HEAVY & loaded
    assert ("torch" in loaded) == (code in (BROKER, WORKER, CLIENTS)), "what starts the zygote must not wait for torch"
