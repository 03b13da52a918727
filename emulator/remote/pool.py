"""The nodes that take part in a run: they join, at any time, answer pings, and may be lost.

The threads of Ray, and those in which nodes join, only put work into the queue `heard`; the owner of the pool does it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any

from fleetbed.emulator.cluster.nodes import ClusterNode, alive_ids, check_nodes, nodes
from fleetbed.emulator.processes.executor import Order
from fleetbed.emulator.processes.launcher import RESUME
from fleetbed.emulator.remote.joining import Joining, start_actor
from fleetbed.profiles.errors import FleetbedError, HostCannot

LOOK_S = 5.0  # between two looks for new nodes
PING_S, ANSWER_S = 10.0, 60.0  # between two pings of a node, and how long it may take to answer one
ALONE_S = 60.0  # how long a run without nodes waits for a new one
CLOSE_S = 60.0  # how long the nodes may take to clean up
MOST_AT_ONCE = 64  # nodes that join at the same time
MOST_LOSSES = 3  # actors that a node may lose in a row


@dataclass(eq=False)
class FleetNode:
    """A node that takes part, or is about to."""

    about: ClusterNode
    actor: Any
    is_ready: bool = False  # for orders
    orders: dict[int, Order] = field(default_factory=dict)  # that it has, by task
    kept: dict[PurePath, str] = field(default_factory=dict)  # by the folder of a client: the file that it should have
    outcomes: int = 0
    losses: int = 0  # of actors, since its latest outcome
    pinged_s: float = 0.0
    silent_since_s: float | None = None  # the time of the first ping that was not answered

    @property
    def ahead(self) -> int:
        """How many of its orders wait for a core."""
        return max(0, len(self.orders) - self.about.cores)

    def room(self, *, ahead: bool) -> int:
        """How many more orders it gets: one for each core and, with `ahead`, as many that wait there."""
        return self.about.cores * (1 + ahead) - len(self.orders)

    def facts(self) -> dict[str, Any]:
        """The node as the records of the run describe it."""
        return {
            "name": self.about.name,
            "cpu": self.about.cpu_model,
            "cores": self.about.cores,
            "memory_bytes": self.about.memory_bytes,
            "outcomes": self.outcomes,
        }


class Pool:
    def __init__(
        self,
        run: str,
        heard: queue.SimpleQueue[Callable[[], None]],
        *,
        on_lost: Callable[[FleetNode], None],
        on_notice: Callable[[str], None],
    ) -> None:
        """`on_lost` is called with a node that will not carry out the orders that it has."""
        self.members: dict[str, FleetNode] = {}  # by the id of the node
        self.seen: list[FleetNode] = []  # also those that were lost
        self._run = run
        self._heard = heard
        self._on_lost, self._on_notice = on_lost, on_notice
        self._joining: Joining | None = None  # None: there is nothing to join yet
        self._known: set[str] = set()  # the ids of all nodes that have been seen
        self._aside = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="fleetbed-joining")
        self._looking: Future[None] | None = None
        self._looked_s = self._had_some_s = 0.0
        self._lost_by = "none has joined"
        for about in nodes():
            self._add(about)
        if not self.members:
            raise HostCannot("no node of the Ray cluster can take part in the run; add one with: ray start")

    @property
    def ready(self) -> list[FleetNode]:
        return [member for member in self.members.values() if member.is_ready]

    def start(self, joining: Joining) -> None:
        """Have the nodes, and all that come later, join the run."""
        self._joining = joining
        for member in self.members.values():
            self._join(member)

    def tend(self, now_s: float) -> None:
        """Look for new nodes, ping the others, and raise FleetbedError if there has been none for too long."""
        if now_s - self._looked_s >= LOOK_S and (self._looking is None or self._looking.done()):
            self._looked_s = now_s
            self._looking = self._aside.submit(self._look)
        for member in self.ready:
            if member.silent_since_s is not None and now_s - member.silent_since_s > ANSWER_S:
                self.lose(member, TimeoutError(f"it has not answered for {ANSWER_S:.0f} s"))
            elif member.silent_since_s is None and now_s - member.pinged_s >= PING_S:
                member.pinged_s = member.silent_since_s = now_s
                self.when_done(member.actor.ping.remote(), partial(self._on_sign, member, member.actor))
        if self.members:
            self._had_some_s = now_s
        elif now_s - self._had_some_s > ALONE_S:
            raise FleetbedError(f"no node of the Ray cluster is left: {self._lost_by}; {RESUME}")

    def lose(self, member: FleetNode, error: BaseException, *, is_gone: bool = False) -> None:
        """Give up the actor of a node, and start another one, unless the node itself is gone."""
        import ray

        ray.kill(member.actor)
        why = reason_of(error)
        self._lost_by = f"{member.about.name}: {why}"
        again = f"; its {len(member.orders)} tasks are queued again" if member.orders else ""
        member.is_ready, member.silent_since_s = False, None
        member.kept.clear()
        member.losses += 1
        is_gone = is_gone or isinstance(error, ray.exceptions.ActorUnschedulableError) or "node has died" in str(error)
        if is_gone or member.losses >= MOST_LOSSES:
            del self.members[member.about.id]
            self._on_notice(f"node {member.about.name} was lost: {why}{again}")
        else:
            member.actor = start_actor(member.about, self._run)
            self._on_notice(f"node {member.about.name} starts again: {why}{again}")
            if self._joining is not None:
                self._join(member)
        self._on_lost(member)

    def when_done(self, said: Any, then: Callable[[Future[Any]], None]) -> None:
        """Put this into the queue, to be called with the answer of an actor, or the error, once it is there."""
        said.future().add_done_callback(lambda done: self._heard.put(partial(then, done)))

    def close(self) -> bytes:
        """End all processes on the nodes; returns the end of what they wrote."""
        import ray

        self._aside.shutdown(wait=False, cancel_futures=True)
        said = [member.actor.close.remote() for member in self.members.values()]
        done = ray.wait(said, num_returns=len(said), timeout=CLOSE_S)[0] if said else []
        written = []
        for each in done:
            try:
                written.append(ray.get(each))
            except ray.exceptions.RayError as error:
                written.append(f"a node was lost at the end: {reason_of(error)}\n".encode())
        for member in self.members.values():
            ray.kill(member.actor)
        return b"".join(written)

    def _look(self) -> None:
        """Ask nodes that are new what they are; this runs in a thread, because they may take a minute to answer."""
        alive = alive_ids()
        self._heard.put(partial(self._drop_others, alive))
        new = alive - self._known
        for about in nodes(new) if new else ():
            self._heard.put(partial(self._add, about))

    def _drop_others(self, alive: set[str]) -> None:
        for member in [each for id_, each in self.members.items() if id_ not in alive]:
            self.lose(member, ConnectionError("Ray reports that it is dead"), is_gone=True)

    def _add(self, about: ClusterNode) -> None:
        """Start the actor of a node that was not there before; one with other versions takes no part."""
        if about.id in self._known:
            return
        self._known.add(about.id)
        try:
            check_nodes([about], None)
        except HostCannot as error:
            self._on_notice(f"a node takes no part: {error}")
            return
        if about.cores:
            member = self.members[about.id] = FleetNode(about, start_actor(about, self._run))
            others = {each.about.cpu_model for each in self.seen}
            if others and about.cpu_model not in others:
                self._on_notice(
                    f"node {about.name} has another type of CPU ({about.cpu_model}) than those before it "
                    f"({', '.join(sorted(others))}): results may differ in their last bits from those of one machine"
                )
            self.seen.append(member)
            if self._joining is not None:
                self._on_notice(f"node {about.name} joins the run")
                self._join(member)

    def _join(self, member: FleetNode) -> None:
        assert self._joining is not None
        then = partial(self._on_sign, member, member.actor)
        future = self._aside.submit(self._joining.join, member.actor)
        future.add_done_callback(lambda done: self._heard.put(partial(then, done)))

    def _on_sign(self, member: FleetNode, actor: Any, done: Future[None]) -> None:
        """Note that a node has joined or answered a ping, or give up its actor."""
        if member.actor is not actor:
            return
        if (error := done.exception()) is not None:
            self.lose(member, error)
        else:
            member.is_ready, member.silent_since_s = True, None


def reason_of(error: BaseException) -> str:
    """Why an actor gave no answer, on one line; Ray's own texts have many."""
    from ray.exceptions import GetTimeoutError, RayTaskError

    if isinstance(error, GetTimeoutError):
        return "it took too long to join; other programs may be using its cores"
    if isinstance(error, RayTaskError):
        error = error.cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    return (lines[-1] if lines else type(error).__name__)[:300].rstrip(".")
