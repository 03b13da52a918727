"""Has a node take up a run: starts its actor, and sends it the data, unless it has them, and the configuration."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.emulator.cluster.nodes import ClusterNode
from fleetbed.emulator.data.store import read_meta
from fleetbed.emulator.remote.node import RayNode
from fleetbed.emulator.wire.messages import Enrolment, Setup
from fleetbed.profiles.errors import FleetbedError

START_S = 120.0  # how long an actor may take to start: it imports torch
JOIN_S = 600.0  # how long each further step may take: a piece of the data arrives, or each model is trained for a step
PIECE_BYTES = 32 << 20  # in which data is sent


def start_actor(node: ClusterNode, run: str) -> Any:
    """Start the actor of a node, which takes all of its cores; returns at once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node.id, soft=False)
    kind = ray.remote(RayNode).options(num_cpus=node.cores, max_restarts=0, scheduling_strategy=place)
    return kind.remote(run, node.cores)


class Joining:
    """What nodes need of a run. Every piece is in the object store once, from where each node gets it."""

    def __init__(self, setup: Setup, enrolment: Enrolment) -> None:
        self._data = Path(setup.dataset)
        self._content = (
            msgspec.json.encode(setup),
            (Path(setup.folder) / "partition.json").read_bytes(),
            msgspec.json.encode(enrolment),
        )
        self._sent: list[Any] = []
        self._pieces: list[tuple[str, int, Any]] = []
        self._lock = threading.Lock()

    def join(self, actor: Any) -> None:
        """Have the actor take up the run; blocks until it is ready for orders."""
        import ray

        if ray.get(actor.lacks_data.remote(self._data.name), timeout=START_S):
            for file, offset, piece in self._data_pieces():
                ray.get(actor.take_data.remote(self._data.name, file, offset, piece), timeout=JOIN_S)
        ray.get(actor.open.remote(*self._references()), timeout=JOIN_S)

    def _references(self) -> list[Any]:
        import ray

        with self._lock:
            if not self._sent:
                self._sent = [ray.put(each) for each in self._content]
        return self._sent

    def _data_pieces(self) -> list[tuple[str, int, Any]]:
        import ray

        with self._lock:
            if not self._pieces:
                self._pieces = [(file, offset, ray.put(piece)) for file, offset, piece in _read(self._data)]
        return self._pieces


def _read(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    """The files of a data set piece by piece; the one that makes it whole comes last."""
    meta = read_meta(folder)
    if meta is None:
        raise FleetbedError(f"{folder} is not a complete prepared data set; start the run again to prepare it anew")
    for name in (*meta.files, "meta.json"):
        with (folder / name).open("rb") as file:
            offset = 0
            while piece := file.read(PIECE_BYTES):
                yield name, offset, piece
                offset += len(piece)
