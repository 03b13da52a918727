"""Makes the policy of a run from what the experiment says, and refuses one that cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from fleetbed.emulator.method.failures import CodeFailed
from fleetbed.emulator.timeline.own_policies import check_state, is_own, policy_type, read_params
from fleetbed.emulator.timeline.policies import AnyPolicy, Rounds, Stream
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Experiment, Policy


def make_policy(
    experiment: Experiment, policy: Policy, seed: int, planned_s: Mapping[int, float], stages: int
) -> AnyPolicy:
    """Make the policy for these clients, given how long the work of each takes."""
    check_policy(experiment, policy, len(planned_s))
    return _made(experiment, policy, seed, planned_s, stages)


def _made(experiment: Experiment, policy: Policy, seed: int, planned_s: Mapping[int, float], stages: int) -> AnyPolicy:
    clients, participation = len(planned_s), experiment.participation
    size = _part(clients, participation.ratio)
    kind, own = policy_type(policy), is_own(policy)
    made: Rounds | Stream
    if issubclass(kind, Stream):
        concurrency = min(clients, policy.concurrency or size)
        made = kind(policy, seed, size, policy.buffer or 1, concurrency)
    else:
        # a user's policy chooses among the clients that are there: it might choose absent ones for ever
        made = kind(policy, seed, size, stages, invites_absent=participation.selection == "uniform" and not own)
        if participation.selection == "tier":
            made.tiers = tiers_of(planned_s, participation.tiers)
        if participation.last_ratio is not None:
            made.last_round, made.last_size = experiment.rounds, _part(clients, participation.last_ratio)
    if own:
        made.params, made.planned_s = read_params(policy), dict(planned_s)
        made.start()
        _check_started(made, clients)
    return made


def _check_started(policy: Rounds | Stream, clients: int) -> None:
    """Check what `start` of a user's policy may have set."""
    for name in ("buffer", "concurrency") if isinstance(policy, Stream) else ("size",):
        value = getattr(policy, name)
        if not isinstance(value, int) or not 1 <= value <= clients:
            raise CodeFailed(
                f"the policy {policy.policy.kind} failed: start set {name} to {value!r:.60}, but a number from 1 to "
                f"{clients}, the number of clients, is needed"
            )


def _part(clients: int, ratio: float) -> int:
    return max(1, int(clients * ratio + 1e-9))  # 100 times 0.29 is 28.999…


def tiers_of(planned_s: Mapping[int, float], count: int) -> list[list[int]]:
    """Clients from the fastest to the slowest in groups that are as equal in size as possible."""
    ordered = sorted(planned_s, key=lambda client: (planned_s[client], client))
    count = min(count, len(ordered))
    cuts = [len(ordered) * part // count for part in range(count + 1)]
    return [ordered[start:stop] for start, stop in pairwise(cuts)]


def check_policy(experiment: Experiment, policy: Policy, clients: int, where: str = "policy") -> None:
    """Refuse a policy that cannot work with so many clients. `where` is its key path."""
    participation = experiment.participation
    kind = policy_type(policy, where)
    if participation.selection == "tier" and issubclass(kind, Stream):
        raise BadInput(
            f"participation.selection: tier draws a round from one tier, but {policy.title} has no rounds; "
            "use uniform or available"
        )
    if participation.last_ratio is not None and (issubclass(kind, Stream) or policy.kind == "over-select"):
        raise BadInput(
            f"participation.last_ratio is {participation.last_ratio:g}, but {policy.title} does not read it: only "
            f"sync and deadline invite a part of the fleet in each round; remove it"
        )
    for key, value in (("invite", policy.invite), ("buffer", policy.buffer)):
        if value is not None and value > clients:
            why = "it would never be full" if key == "buffer" else "there are no more to invite"
            raise BadInput(f"policies: {key} is {value}, but {clients} clients take part: {why}; lower it")
    if is_own(policy):
        read_params(policy, where)
        try:
            check_state(_made(experiment, policy, 0, dict.fromkeys(range(clients), 1.0), 1))
        except CodeFailed as error:
            raise BadInput(f"{where}.kind: {error}.") from error
