"""The client's half: makes one call of the ClientApp, in the process of its client."""

from __future__ import annotations

import random
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from msgspec import Struct

from fleetbed.emulator.method.algorithm import Reply
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.job import StepPacer
from fleetbed.emulator.processes.forking import one_thread
from fleetbed.emulator.randomness import derive
from fleetbed.emulator.wire.messages import Enrolment, Setup, Train, kept_name
from fleetbed.emulator.wire.storage import load_bundle, save_bundle
from fleetbed.flower import identity
from fleetbed.flower.app import Config, load_part, read_app
from fleetbed.flower.packing import numbers, pack, unpack
from fleetbed.models.cost.opaque import Counted, OpaqueCount, entry_s

#: the file in the run's folder that tells the clients' processes of the app
APP_FILE = "flower.json"
LOSSES = ("loss", "train_loss", "train-loss", "eval_loss")  # names of metrics that are the loss of a task


class Node(Struct, frozen=True):
    """A client as Flower knows it."""

    node_id: int
    config: Config


class AppFile(Struct, frozen=True):
    app: str
    run_config: Config
    nodes: tuple[Node, ...]  # by client


class ClientAppRaised(Exception):
    """The app's own code raised an error; the traceback is in workers.log."""


@dataclass(frozen=True)
class OpaqueCounts:
    """Opaque code tells neither steps nor samples; its torch operators are counted as they run."""

    counted: Counted | None
    steps: int = 0
    samples: int = 0


@dataclass(frozen=True)
class FlowerRunner:
    folder: Path
    app: ClientApp
    about: AppFile
    seed: int
    keep_heap: bool = False
    enrolled: bool = False

    def enrol(self, enrolment: Enrolment) -> FlowerRunner:
        return replace(self, keep_heap=enrolment.keep_heap, enrolled=True)

    def warm_up(self) -> None:
        """Train a step with torch, so that no client is charged for what torch does only once in a process."""
        one_thread()
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
        for optimizer in (torch.optim.SGD(model.parameters(), 0.1, 0.9), torch.optim.Adam(model.parameters())):
            loss = torch.nn.functional.cross_entropy(model(torch.zeros(2, 1, 4, 4)), torch.zeros(2, dtype=torch.long))
            loss.backward()
            optimizer.step()
        unpack(pack(RecordDict({"arrays": ArrayRecord(model.state_dict())})))
        entry_s()

    def train(
        self, order: Train, message: Bundle, pacer: StepPacer | None, device: str = "cpu"
    ) -> tuple[Reply, OpaqueCounts]:
        content, header = unpack(message)
        node = self.about.nodes[order.client]
        identity.set_for(node.node_id)
        instruction = Message(
            content=content,
            dst_node_id=node.node_id,
            message_type=header.message_type,
            group_id=header.group_id,
            ttl=header.ttl,
        )
        identity.name(instruction, header.message_id)
        state = RecordDict() if order.kept is None else unpack(load_bundle(self.folder / order.kept, cached=False))[0]
        context = Context(
            run_id=identity.RUN_ID,
            node_id=node.node_id,
            node_config=dict(node.config),
            state=state,
            run_config=dict(self.about.run_config),
        )
        seed_all(derive(self.seed, order.client, order.task, "flower"))
        count = OpaqueCount()
        with count:
            reply = self._call(instruction, context)
        metrics = numbers(reply.content)
        loss = next((metrics[name] for name in LOSSES if name in metrics), None)
        answer = Reply(
            message=pack(reply.content),
            keep=pack(context.state) if context.state else None,
            metrics=metrics if loss is None else {**metrics, "loss": loss},
        )
        return answer, OpaqueCounts(count.counted() if count.total.calls else None)

    def _call(self, instruction: Message, context: Context) -> Message:
        try:
            reply = self.app(instruction, context)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            sys.stderr.flush()
            raise ClientAppRaised(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
        if reply.has_error():
            raise ClientAppRaised(str(reply.error.reason))
        return reply

    def keep(self, order: Train, keep: Bundle | None) -> str | None:
        if keep is None:
            return None
        name = kept_name(order.client, order.task)
        save_bundle(self.folder / name, keep, cached=False)
        return name


def open_runner(setup: Setup) -> FlowerRunner:
    """Import the ClientApp, once for all clients."""
    folder = Path(setup.folder)
    about = msgspec.json.decode((folder / APP_FILE).read_bytes(), type=AppFile)
    parts = read_app(Path(about.app))
    app: Any = load_part(parts, parts.client, ClientApp)
    return FlowerRunner(folder, app, about, setup.config.seed)


def seed_all(seed: int) -> None:
    """Seed the generators that code draws from if it does not say otherwise, so that a run can be repeated."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
