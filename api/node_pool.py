"""The nodes that a study uses: what each still has free, and which of them a run is placed on.

Nodes that join later are used as soon as they have described themselves; one that may be lost, only when it answers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbed.emulator.cluster.connection import connected, first_sentence
from fleetbed.emulator.cluster.nodes import (
    ANSWER_S,
    ClusterNode,
    actor_on_node,
    alive,
    ask,
    check_large_enough,
    check_nodes,
    cores_of,
    nodes,
    on_node,
    understood,
)
from fleetbed.emulator.cluster.placed_run import OF_RAY, PlacedRun, sees
from fleetbed.emulator.machine.capacity import IDLE_BYTES
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.experiment import UNDISTURBED, Experiment, RunConfig, runs
from fleetbed.profiles.fleet import sizes
from fleetbed.profiles.resolve import load_fleet

SERVER_BYTES = 512 << 20  # of memory for the process of a run itself
ACTOR_S = 20.0  # in which an actor starts on a node whose cores are free, also if that is busy
LOOK_S = 2.0  # between two looks for new nodes
TOKEN = ".seen-by-nodes"


@dataclass(frozen=True)
class RunNeed:
    """What a run takes of a node."""

    memory_bytes: int
    alone: bool  # whether it needs the whole node, because it measures or paces itself there
    forks: bool = False  # whether its clients are processes
    cores: int = 1


def need_of(config: RunConfig, search: Sequence[Path]) -> RunNeed:
    experiment = config.experiment
    clients = sum(sizes(load_fleet(experiment.fleet, search, "fleet"))) if experiment.processes == "resident" else 0
    alone = experiment.timing.source not in UNDISTURBED
    return RunNeed(SERVER_BYTES + IDLE_BYTES * clients, alone, forks=experiment.processes != "inline")


@contextlib.contextmanager
def node_pool(address: str | None, experiment: Experiment, search: Sequence[Path]) -> Iterator[NodePool]:
    """Connect to the cluster, and let its nodes prepare for the runs of this experiment.

    Raises HostCannot if the nodes do not fit together, or none is large enough.
    """
    needs = [need_of(config, search) for config in runs(experiment)]
    with connected(address):
        needs.sort(key=lambda need: not need.alone)
        pool = NodePool(address, needs[0])
        pool.check(needs)
        pool.warm_up(needs)
        yield pool


class PoolNode:
    """A node and what is free there."""

    def __init__(self, node: ClusterNode) -> None:
        self.node = node
        self.cores, self.memory_bytes = node.cores, node.memory_bytes
        self.shares_folder = False  # whether it sees the folder of the study
        self.doubtful = False
        self.ready: list[tuple[RunNeed, Any]] = []  # actors that wait for a run that needs so much

    def cores_for(self, need: RunNeed) -> int:
        return self.node.cores if need.alone else need.cores

    def has(self, need: RunNeed) -> bool:
        return not self.doubtful and 0 < self.cores_for(need) <= self.cores and need.memory_bytes <= self.memory_bytes

    def take(self, need: RunNeed) -> None:
        self.cores -= self.cores_for(need)
        self.memory_bytes -= need.memory_bytes

    def give_back(self, need: RunNeed) -> None:
        self.cores += self.cores_for(need)
        self.memory_bytes += need.memory_bytes


class NodePool:
    """The nodes of the cluster that this process is connected to."""

    def __init__(self, address: str | None, first: RunNeed) -> None:
        """`first`: what the first run needs."""
        self._address = address
        self._study: Path | None = None
        self._say: Callable[[str], None] = print
        self._asked: dict[Any, dict[str, Any]] = {}  # by the answer that is awaited: what Ray knows of the node
        self._looked_s = time.monotonic()
        self.places = self._first_places(first)
        check_nodes([place.node for place in self.places.values()], address)
        self._known = set(self.places)

    def check(self, needs: Sequence[RunNeed]) -> None:
        """Raise HostCannot unless there is a node for each of these."""
        for need in dict.fromkeys(needs):
            check_large_enough(
                [place.node for place in self.places.values()],
                cores=need.cores,
                memory_bytes=need.memory_bytes,
                what="a run of this study",
            )

    def _first_places(self, need: RunNeed) -> dict[str, PoolNode]:
        """The nodes as they describe themselves, by id; those that can start an actor for this run do.

        A node whose cores are taken, or without fleetbed, cannot, and describes itself in another way.
        """
        import ray

        asked: dict[Any, tuple[dict[str, Any], Any]] = {}
        there = alive()
        for known in there.values():
            if cores := cores_of(known):
                actor = self._new_actor(known["NodeID"], need, cores if need.alone else need.cores)
                asked[actor.describe.remote()] = known, actor
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ACTOR_S) if asked else ([], [])
        places = {}
        for answer in ready:
            known, actor = asked[answer]
            with contextlib.suppress(ray.exceptions.RayError):  # asked again below
                place = places[known["NodeID"]] = PoolNode(understood(known, ray.get(answer)))
                place.ready.append((need, actor))
        if others := {id_ for id_, known in there.items() if id_ not in places and (cores_of(known) or not places)}:
            places |= {node.id: PoolNode(node) for node in nodes(others)}
        return places

    def warm_up(self, needs: Sequence[RunNeed]) -> None:
        """Start the commands of the first of these runs: they import what they need while this process does."""
        taken: list[tuple[PoolNode, RunNeed]] = []
        for need in needs:
            if (place := self.choose(need, None)) is None:
                break
            place.take(need)
            taken.append((place, need))
        actors = [self.actor(place, need) for place, need in taken]
        for (place, need), actor in zip(taken, actors, strict=True):
            actor.prepare.remote()
            place.ready.append((need, actor))
            place.give_back(need)

    def use_for(self, study: Path, say: Callable[[str], None]) -> None:
        """Find out which nodes see the folder of the study."""
        self._study, self._say = study, say
        self._ask_for_folder(list(self.places.values()))

    def actor(self, place: PoolNode, need: RunNeed) -> Any:
        """An actor for a run there, which may wait for one already."""
        for waiting in place.ready:
            if waiting[0] == need:
                place.ready.remove(waiting)
                return waiting[1]
        place.ready.clear()  # they have cores that this run needs
        return self._new_actor(place.node.id, need, place.cores_for(need))

    def _new_actor(self, node: str, need: RunNeed, cores: int) -> Any:
        environment = {name: os.environ[name] for name in OF_RAY if name in os.environ}
        kind = actor_on_node(PlacedRun, node, cores=cores, threads=2)
        return kind.remote(need.forks, os.getcwd(), environment)

    def has(self, processor: str) -> bool:
        """Whether there is a node with this CPU type."""
        return any(place.node.cpu_model == processor for place in self.places.values())

    def choose(self, need: RunNeed, processor: str | None) -> PoolNode | None:
        """The node with the most free cores, of this CPU type if one is given; None: wait until one is free."""
        fitting = [
            place for place in self.places.values() if place.has(need) and processor in (None, place.node.cpu_model)
        ]
        return max(fitting, key=lambda place: place.cores, default=None)

    def doubt(self, place: PoolNode) -> None:
        """Use this node again only when it has answered."""
        if not place.doubtful and place.node.id in self.places:
            place.doubtful = True
            self._ask(place.node.id)

    def refresh(self) -> None:
        """Look for nodes that have joined or are lost."""
        import ray

        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            for new, known in alive().items():
                if new not in self._known and cores_of(known):
                    self._known.add(new)
                    self._ask(new)
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for answer in ready:
            known = self._asked.pop(answer)
            try:
                node = understood(known, ray.get(answer))
            except ray.exceptions.RayError as error:
                self._forget(known["NodeID"], first_sentence(error))
                continue
            if node.id in self.places:
                self.places[node.id].doubtful = False
            else:
                self._join(node)

    def _ask(self, node: str) -> None:
        if (known := alive().get(node)) is None:
            self._forget(node, "Ray has noticed that it does not answer.")
        else:
            self._asked[ask(node)] = known

    def _forget(self, node: str, why: str) -> None:
        if (lost := self.places.pop(node, None)) is not None:
            self._say(f"node {lost.node.name} is lost: {why}")

    def _join(self, node: ClusterNode) -> None:
        try:
            check_nodes([node], self._address)
        except HostCannot as error:
            self._say(f"a node has joined, but is not used: {error}")
            return
        self._say(f"node {node.name} has joined")
        place = PoolNode(node)
        self._ask_for_folder([place])
        self.places[node.id] = place

    def _ask_for_folder(self, places: Sequence[PoolNode]) -> None:
        """Find out by a token which of the nodes see the study's folder."""
        import ray

        assert self._study is not None  # a study uses the pool
        token = secrets.token_hex(16)
        path = self._study / TOKEN
        path.write_text(token)
        try:
            for place, answer in [(place, self._sees(place, path, token)) for place in places]:
                with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                    place.shares_folder = bool(ray.get(answer, timeout=ANSWER_S))
        finally:
            path.unlink(missing_ok=True)

    def _sees(self, place: PoolNode, path: Path, token: str) -> Any:
        """Ask a node whether it sees this file; by its actor if it has one, which need not be started."""
        if place.ready:
            return place.ready[0][1].sees.remote(path, token)
        return on_node(sees, place.node.id).remote(path, token)
