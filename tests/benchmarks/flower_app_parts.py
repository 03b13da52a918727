"""What flower_app.py runs with the Python of Flower's environment: the app bare, and in Flower's simulation.

Imported, since Ray's actors could not find the classes of a main module. The arguments are the app's folder, the number
of clients and the run config as JSON; the last line printed has the seconds of each round as JSON.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fleetbed.flower import identity
from fleetbed.flower.app import load_part, read_app

Config = dict[str, Any]


def asked() -> tuple[Path, int, Config]:
    folder, clients, overrides = sys.argv[1:4]
    return Path(folder), int(clients), read_app(Path(folder)).run_config(json.loads(overrides))


def part(folder: Path, kind: type[Any]) -> Any:
    parts = read_app(folder)
    return load_part(parts, parts.client if kind is ClientApp else parts.server, kind)


def bare_process(connection: Connection, folder: Path, clients: int, config: Config) -> None:
    """Call the ClientApp for the clients that it is told, until it is told none."""
    torch.set_num_threads(1)
    app = part(folder, ClientApp)
    from fashion_torch.task import Net

    arrays = ArrayRecord(Net().state_dict())
    identity.set_for(identity.SERVER_NODE)
    connection.send(None)
    while (work := connection.recv()) is not None:
        for kind, number in work:
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": config["learning-rate"]})})
            message = Message(content=content, dst_node_id=number + 1, message_type=kind)
            identity.name(message, f"{kind}-{number}")
            node_config = {"partition-id": number, "num-partitions": clients}
            app(message, Context(identity.RUN_ID, number + 1, node_config, RecordDict(), config))
        connection.send(None)


def bare() -> None:
    folder, clients, config = asked()
    context = multiprocessing.get_context("spawn")
    ends = []
    processes = len(os.sched_getaffinity(0))
    for _ in range(processes):
        here, there = context.Pipe()
        context.Process(target=bare_process, args=(there, folder, clients, config), daemon=True).start()
        ends.append(here)
    for end in ends:
        end.recv()
    starts = []
    for _ in range(config["num-server-rounds"]):
        starts.append(time.perf_counter())
        for kind, count in (("train", clients), ("evaluate", int(clients * config["fraction-evaluate"]))):
            for place, end in enumerate(ends):
                end.send([(kind, number) for number in range(place, count, processes)])
            for end in ends:
                end.recv()
    starts.append(time.perf_counter())
    print(json.dumps([later - earlier for earlier, later in pairwise(starts)]))


class Configured(ClientApp):  # type: ignore[misc]
    """The app's own ClientApp, which is given its run config."""

    def __init__(self, folder: Path, config: Config) -> None:
        super().__init__()
        self._folder, self._config = folder, config

    def __call__(self, message: Message, context: Context) -> Message:
        # Flower refuses a reply whose context has another run config
        given = Context(context.run_id, context.node_id, context.node_config, context.state, self._config)
        return part(self._folder, ClientApp)(message, given)


class RoundStarts(logging.Handler):
    """Notes when Flower logs that a round begins."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("[ROUND") or "Strategy execution finished" in text:
            self.at.append(time.perf_counter())
        if "failures" in text and not text.split("and")[-1].strip().startswith("0"):
            raise RuntimeError(text)  # the strategy would go on without these clients, and be quick


def simulation() -> None:
    folder, clients, config = asked()
    starts = RoundStarts()
    logging.getLogger("flwr").addHandler(starts)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        context.run_config = config
        part(folder, ServerApp)(grid, context)

    cores = len(os.sched_getaffinity(0))
    run_simulation(
        server,
        Configured(folder, config),
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "include_dashboard": False},
        },
    )
    assert len(starts.at) == config["num-server-rounds"] + 1, starts.at
    print(json.dumps([later - earlier for earlier, later in pairwise(starts.at)]))
