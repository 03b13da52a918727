"""Policies decide which clients take part and when results are merged; the engine carries their decisions out.

`Rounds` serves sync, deadline and over-select: a round is opened, closed and merged. `Stream` serves async and
buffered: clients are kept busy, results are merged as they come. State is plain data, so a checkpoint holds it.
Policies of users derive from one of the two (`own_policies.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from fleetbed.emulator.randomness import numpy_rng
from fleetbed.profiles.experiment import Policy


class Decision(Struct, frozen=True, kw_only=True):
    """What the engine is to do now. `merge` lists tasks to merge, in order; an empty one closes a round without any."""

    invite: tuple[int, ...] = ()
    merge: tuple[int, ...] | None = None
    abandon: tuple[int, ...] = ()  # clients whose tasks are given up
    timer_s: float | None = None  # from now


NOTHING = Decision()


class AnyPolicy:
    """What both kinds of policies have: the hooks that a user's policy may define, and what they can go by.

    It is no Struct itself, so that a checkpoint leaves it to `own_policies.restored` which type a policy has.
    """

    __slots__ = ()
    policy: Policy  # as the experiment has it
    params: Any  # of a user's policy, as its own type
    seed: int
    size: int  # clients that a round invites
    planned_s: dict[int, float]  # by client: how long its work takes, without transfers; filled for users' policies
    round: int  # from 1
    stage: int
    opened: int
    draws: int

    def start(self) -> None:
        """Called once, before the first round, when all of the fields above are known."""

    def invite(self, candidates: list[int], count: int) -> Sequence[int]:
        """Choose clients to invite now; `count` is how many there would usually be."""
        return choose(candidates, count, self.seed, self.draws)

    def on_result(self, client: int, seconds: float, loss: float | None) -> None:
        """Called for every result that arrives, with the device time since its client was invited."""

    def rng(self) -> np.random.Generator:
        """Return a generator of random numbers for this draw: the same whenever the run is repeated or resumed."""
        return numpy_rng(self.seed, "own-policy", self.draws)

    # what the engine calls

    @property
    def min_clients(self) -> int:
        raise NotImplementedError

    def is_over(self, rounds: int) -> bool:
        return self.round > rounds

    def open(self, idle: Sequence[int], away: Sequence[int] = ()) -> Decision:
        raise NotImplementedError

    def on_client_available(self, idle: Sequence[int], away: Sequence[int]) -> Decision:
        raise NotImplementedError

    def ended(self, task: int, client: int, *, ok: bool, idle: Sequence[int], diverged: bool = False) -> Decision:
        raise NotImplementedError

    def timer(self, opened: int) -> Decision:
        raise NotImplementedError

    def merged(self, results: int) -> None:
        raise NotImplementedError

    def weight(self, staleness: int) -> float:
        """Return the weight of a result that is based on a state so many merges ago."""
        del staleness
        return 1.0


class Rounds(AnyPolicy, Struct):
    """Rounds with a fixed set of members: they wait for all, for the first `take`, or until the deadline."""

    policy: Policy
    seed: int
    size: int
    stages: int
    round: int = 0
    stage: int = 0
    opened: int = 0  # how many rounds and stages were opened, which tells their timers apart
    is_open: bool = False
    waiting: list[int] = []
    late: list[int] = []  # clients of an earlier round whose results still count, if the experiment says so
    arrived_clients: list[int] = []  # clients whose result has arrived
    arrived: list[int] = []  # their tasks, in timeline order
    invites_absent: bool = False  # it cannot tell which clients are away, so it may invite them
    tiers: list[list[int]] = []  # clients by speed; a round draws from one of them
    draws: int = 0
    waiting_for_clients: bool = False  # a round is due, but no client is available
    last_round: int | None = None  # in which `last_size` clients are invited instead of `size`
    last_size: int = 0
    params: Any = None
    planned_s: dict[int, float] = {}

    @property
    def min_clients(self) -> int:
        """The least number of clients whose results make a merge."""
        return 1

    def timer_s(self) -> float | None:
        """Return the device seconds after which the round that is being opened ends; None: it has no such limit."""
        return self.policy.deadline_s if self.policy.kind == "deadline" else None

    def is_complete(self) -> bool:
        """Return whether the round ends now, although it waits for more clients."""
        take = self.policy.take if self.policy.kind == "over-select" else None
        return take is not None and len(self.arrived) >= take

    def open(self, idle: Sequence[int], away: Sequence[int] = ()) -> Decision:
        """Open the next stage for clients that completed the last one, or the next round once a client is available."""
        members = [client for client in self.arrived_clients if client in idle] if self.stage else []
        if not members:
            if not self.waiting_for_clients:
                self.round, self.stage = self.round + 1, 0
            # if no client is available but late results are due, no client is invited: they close the round
            members = self._draw(idle, away) if idle or not self.late else []
            while idle and not any(client in idle for client in members):  # all are away: nothing would happen
                members = self._draw(idle, away)
        # late results may still arrive: they close a round without members
        self.waiting_for_clients = not idle and not self.late
        if self.waiting_for_clients:
            return NOTHING
        self.opened += 1
        self.is_open = True
        self.waiting, self.arrived_clients = list(members), []
        return Decision(invite=tuple(members), timer_s=self.timer_s())

    def on_client_available(self, idle: Sequence[int], away: Sequence[int]) -> Decision:
        return self.open(idle, away) if self.waiting_for_clients else NOTHING

    def _draw(self, idle: Sequence[int], away: Sequence[int]) -> list[int]:
        self.draws += 1
        candidates = [*idle, *away] if self.invites_absent else list(idle)
        tiers = [tier for tier in self.tiers if any(client in candidates for client in tier)]
        if tiers:
            tier = tiers[int(numpy_rng(self.seed, "tier", self.draws).integers(len(tiers)))]
            candidates = [client for client in candidates if client in tier]
        return list(self.invite(candidates, self._invited()))

    def ended(self, task: int, client: int, *, ok: bool, idle: Sequence[int], diverged: bool = False) -> Decision:
        del idle, diverged  # a round that no client completed ends all the same
        for table in (self.waiting, self.late):
            if client in table:
                table.remove(client)
        if ok:
            self.arrived_clients.append(client)
            self.arrived.append(task)
        return self._close() if self.is_open and (not self.waiting or self.is_complete()) else NOTHING

    def timer(self, opened: int) -> Decision:
        return self._close() if self.is_open and opened == self.opened else NOTHING

    def merged(self, results: int) -> None:
        del results
        self.stage = (self.stage + 1) % self.stages

    def _invited(self) -> int:
        if self.round == self.last_round:
            return self.last_size
        return self.policy.invite or self.size if self.policy.kind == "over-select" else self.size

    def _close(self) -> Decision:
        self.is_open = False
        arrived, self.arrived = tuple(self.arrived), []
        abandoned, self.waiting = tuple(self.waiting), []
        if self.policy.kind == "deadline" and self.policy.late == "next-round":
            self.late.extend(abandoned)
            abandoned = ()
        return Decision(merge=arrived, abandon=abandoned)


class Stream(AnyPolicy, Struct):
    """Keeps clients busy and merges every `buffer` results. A round has as many results as a synchronous one."""

    policy: Policy
    seed: int
    size: int
    buffer: int
    concurrency: int
    round: int = 0
    stage: int = 0  # always 0: methods of several stages need rounds
    opened: int = 0
    counted: int = 0
    draws: int = 0
    busy: list[int] = []
    arrived: list[int] = []
    params: Any = None
    planned_s: dict[int, float] = {}

    @property
    def min_clients(self) -> int:
        """The least number of clients whose results make a merge: one that waits for a merge is not invited again."""
        return self.buffer

    def open(self, idle: Sequence[int], away: Sequence[int] = ()) -> Decision:
        del away  # clients ask for work themselves, so absent ones are never invited
        self.round = self.counted // self.size + 1
        return Decision(invite=self._fill(idle))

    def on_client_available(self, idle: Sequence[int], away: Sequence[int]) -> Decision:
        del away
        return Decision(invite=self._fill(idle))

    def ended(self, task: int, client: int, *, ok: bool, idle: Sequence[int], diverged: bool = False) -> Decision:
        """Handle the end of a task. One that diverged is not merged but counts, or the run might never end."""
        self.busy.remove(client)
        if ok:
            self.arrived.append(task)
        if diverged:
            self.counted += 1
            return Decision(merge=())
        if len(self.arrived) < self.buffer:
            return Decision(invite=self._fill(idle))
        merge, self.arrived = tuple(self.arrived), []
        return Decision(merge=merge)

    def timer(self, opened: int) -> Decision:
        del opened
        return NOTHING

    def merged(self, results: int) -> None:
        """Count results once they are merged: a queue before the server must not end the run."""
        self.counted += results

    def weight(self, staleness: int) -> float:
        policy = self.policy
        if policy.staleness == "constant":
            return policy.mixing
        if policy.staleness == "polynomial":
            return float(policy.mixing * (1 + staleness) ** -policy.exponent)
        over = staleness - policy.hinge_b
        return policy.mixing if over <= 0 else policy.mixing / (policy.hinge_a * over + 1)

    def _fill(self, idle: Sequence[int]) -> tuple[int, ...]:
        self.draws += 1
        free = self.concurrency - len(self.busy)
        invited = self.invite(list(idle), free) if idle and free > 0 else ()
        self.busy.extend(invited)
        return tuple(invited)


def choose(idle: Sequence[int], count: int, seed: int, draw: int) -> list[int]:
    """Draw `count` of the free clients uniformly; the result depends only on the key of the draw."""
    if count <= 0 or not idle:
        return []
    rng = numpy_rng(seed, "select", draw)
    return sorted(int(c) for c in rng.choice(sorted(idle), min(count, len(idle)), replace=False))
