"""The rounds of round_cost.py in Flower's simulation. Run by that script, with the Python of Flower's environment.

    PYTHONPATH=tests/benchmarks python -c "import flower_rounds; flower_rounds.main()" DATA SAMPLES ROUNDS STYLE

Imported, since Ray's actors could not find the functions of a main module. Prints the seconds of each round, from its
start to that of the next, as JSON in its last line. The clients are either `tuned`: their code is the plain training
that the bare processes do, and an actor of Ray keeps data and model between tasks, as they do. Or they are written as
in Flower's `tutorial` for PyTorch: a model, a DataLoader and torch's SGD are made for every message; the data stays.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from round_setting import BATCH, CLIENTS, LR, MOMENTUM, PER_ROUND, PlainTraining
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

started: list[float] = []


@cache
def training(data: str, samples: int) -> PlainTraining:
    return PlainTraining(Path(data), samples)


def from_tutorial(data: str, samples: int, number: int, arrays: dict[str, Tensor]) -> nn.Module:
    """A client's training as Flower's tutorial for PyTorch writes it."""
    plain = training(data, samples)
    model = plain.new_model()
    model.load_state_dict(arrays)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for x, y in DataLoader(TensorDataset(*plain.tensors_of(number)), BATCH, shuffle=True, drop_last=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()
    return model


def tuned(data: str, samples: int, number: int, arrays: dict[str, Tensor]) -> nn.Module:
    plain = training(data, samples)
    plain.model.load_state_dict(arrays)
    plain.client(number, number)
    return plain.model


def client_app(data: str, samples: int, client: Callable[..., nn.Module]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        model = client(data, samples, number, message.content["arrays"].to_torch_state_dict())
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": samples}),
            }
        )
        return Message(content=content, reply_to=message)

    return app


class TimedFedAvg(FedAvg):
    def configure_train(self, *args: object, **kwargs: object) -> object:
        started.append(time.perf_counter())
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> object:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():  # it would go on without them, and be quick
                raise RuntimeError(reply.error)
        return super().aggregate_train(server_round, replies)


def server_app(data: str, samples: int, rounds: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        strategy = TimedFedAvg(fraction_train=PER_ROUND / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid, ArrayRecord(training(data, samples).model.state_dict()), num_rounds=rounds)
        started.append(time.perf_counter())

    return app


def main() -> None:
    data, samples, rounds, style = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    run_simulation(
        server_app(data, samples, rounds),
        client_app(data, samples, {"tuned": tuned, "tutorial": from_tutorial}[style]),
        num_supernodes=CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False},
        },
    )
    print(json.dumps([later - earlier for earlier, later in pairwise(started)]))
