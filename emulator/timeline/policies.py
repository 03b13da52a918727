"""Policies decide which clients take part and when results are merged; the engine carries their decisions out.

`Rounds` serves sync, deadline and over-select: a round is opened, closed and merged. `Stream` serves async and
buffered: clients are kept busy, results are merged as they come. State is plain data, so a checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from fleetbed.emulator.randomness import numpy_rng
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, Participation, Policy


class Decision(Struct, frozen=True, kw_only=True):
    """What the engine is to do now. `merge` lists tasks to merge, in order; an empty one closes a round without any."""

    invite: tuple[int, ...] = ()
    merge: tuple[int, ...] | None = None
    abandon: tuple[int, ...] = ()  # clients whose tasks are given up
    timer_s: float | None = None  # from now


NOTHING = Decision()


class Rounds(Struct, tag="rounds"):
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

    @property
    def min_clients(self) -> int:
        """The least number of clients whose results make a merge."""
        return 1

    def is_over(self, rounds: int) -> bool:
        return self.round > rounds

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
        timer_s = self.policy.deadline_s if self.policy.kind == "deadline" else None
        return Decision(invite=tuple(members), timer_s=timer_s)

    def on_client_available(self, idle: Sequence[int], away: Sequence[int]) -> Decision:
        return self.open(idle, away) if self.waiting_for_clients else NOTHING

    def _draw(self, idle: Sequence[int], away: Sequence[int]) -> list[int]:
        self.draws += 1
        candidates = [*idle, *away] if self.invites_absent else list(idle)
        tiers = [tier for tier in self.tiers if any(client in candidates for client in tier)]
        if tiers:
            tier = tiers[int(numpy_rng(self.seed, "tier", self.draws).integers(len(tiers)))]
            candidates = [client for client in candidates if client in tier]
        return choose(candidates, self._invited(), self.seed, self.draws)

    def ended(self, task: int, client: int, *, ok: bool, idle: Sequence[int], diverged: bool = False) -> Decision:
        del idle, diverged  # a round that no client completed ends all the same
        for table in (self.waiting, self.late):
            if client in table:
                table.remove(client)
        if ok:
            self.arrived_clients.append(client)
            self.arrived.append(task)
        take = self.policy.take if self.policy.kind == "over-select" else None
        enough = not self.waiting or (take is not None and len(self.arrived) >= take)
        return self._close() if self.is_open and enough else NOTHING

    def timer(self, opened: int) -> Decision:
        return self._close() if self.is_open and opened == self.opened else NOTHING

    def merged(self, results: int) -> None:
        del results
        self.stage = (self.stage + 1) % self.stages

    def weight(self, staleness: int) -> float:
        del staleness
        return 1.0

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


class Stream(Struct, tag="stream"):
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

    @property
    def min_clients(self) -> int:
        """The least number of clients whose results make a merge: one that waits for a merge is not invited again."""
        return self.buffer

    def is_over(self, rounds: int) -> bool:
        return self.round > rounds

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
        invited = choose(idle, self.concurrency - len(self.busy), self.seed, self.draws)
        self.busy.extend(invited)
        return tuple(invited)


AnyPolicy = Rounds | Stream


def choose(idle: Sequence[int], count: int, seed: int, draw: int) -> list[int]:
    """Draw `count` of the free clients uniformly; the result depends only on the key of the draw."""
    if count <= 0 or not idle:
        return []
    rng = numpy_rng(seed, "select", draw)
    return sorted(int(c) for c in rng.choice(sorted(idle), min(count, len(idle)), replace=False))


def make_policy(
    experiment: Experiment, policy: Policy, seed: int, planned_s: Mapping[int, float], stages: int
) -> AnyPolicy:
    """Make the policy for these clients, given how long the work of each takes."""
    clients, participation = len(planned_s), experiment.participation
    size = _part(clients, participation.ratio)
    check_policy(participation, policy, clients)
    if policy.kind in ("async", "buffered"):
        buffer = 1 if policy.kind == "async" else (policy.buffer or 1)
        concurrency = min(clients, policy.concurrency or size)
        return Stream(policy, seed, size, buffer, concurrency)
    made = Rounds(policy, seed, size, stages, invites_absent=participation.selection == "uniform")
    if participation.selection == "tier":
        made.tiers = tiers_of(planned_s, participation.tiers)
    if participation.last_ratio is not None:
        made.last_round, made.last_size = experiment.rounds, _part(clients, participation.last_ratio)
    return made


def _part(clients: int, ratio: float) -> int:
    return max(1, int(clients * ratio + 1e-9))  # 100 times 0.29 is 28.999…


def tiers_of(planned_s: Mapping[int, float], count: int) -> list[list[int]]:
    """Clients from the fastest to the slowest in groups that are as equal in size as possible."""
    ordered = sorted(planned_s, key=lambda client: (planned_s[client], client))
    count = min(count, len(ordered))
    cuts = [len(ordered) * part // count for part in range(count + 1)]
    return [ordered[start:stop] for start, stop in pairwise(cuts)]


def check_policy(participation: Participation, policy: Policy, clients: int) -> None:
    """Refuse a policy that cannot work with so many clients."""
    if participation.selection == "tier" and policy.kind in ("async", "buffered"):
        raise BadInput(
            f"participation.selection: tier draws a round from one tier, but {policy.kind} has no rounds; "
            "use uniform or available"
        )
    if participation.last_ratio is not None and policy.kind not in ("sync", "deadline"):
        raise BadInput(
            f"participation.last_ratio is {participation.last_ratio:g}, but {policy.kind} does not read it: only "
            f"sync and deadline invite a part of the fleet in each round; remove it"
        )
    for key, value in (("invite", policy.invite), ("buffer", policy.buffer)):
        if value is not None and value > clients:
            why = "it would never be full" if key == "buffer" else "there are no more to invite"
            raise BadInput(f"policies: {key} is {value}, but {clients} clients take part: {why}; lower it")
